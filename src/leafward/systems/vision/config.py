"""Training of any timm backbone: classification, semantic segmentation, detection and instance masks.

leafward train vision --data photos --model resnet18                       a folder of class folders
leafward train vision --preset segment --data scenes --init runs/quick     images/ and masks/, pretrained backbone
leafward train vision --preset detect --data coco                          COCO JSON or VOC XML
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from msgspec import Meta

from leafward.config import Count, Natural, Part, Pixels, Place, Positive, Rate, Settings, Share, to_dict
from leafward.engine.config import Arms, LoopConfig, OptimConfig
from leafward.errors import UsageError, need
from leafward.systems.vision.augment import Augment

SUMMARY = "Any timm backbone: classify, segment or detect on your images."
MAY_CHANGE = ("data.check",)
"""Fields that a resumed run may change, beside those of every training."""
STRONG = Augment(
    auto="rand-m9-mstd0.5-inc1", scale=(0.08, 1.0), jitter=0.4, erase=0.25, mixup=0.8, cutmix=1.0, smoothing=0.1
)
"""The augmentation of the papers on ImageNet."""
V = TypeVar("V")
Decoder = Annotated[str, Meta(pattern="^(semantic-fpn$|smp:)", description="semantic-fpn or smp:NAME")]


class Data(Settings, frozen=True):
    """What is learned from which images."""

    MAIN: ClassVar[str] = "source"
    RARE: ClassVar[frozenset[str]] = frozenset({"decoder", "sliding", "ignore", "cat_max_ratio", "check"})

    source: Place | None = None
    """Classify: class folders, Parquet, .npz, a Hugging Face data set, torchvision:NAME:FOLDER. Segment: images and
    masks, ADE20K or VOC. Detect: COCO JSON or VOC XML."""
    task: Literal["classify", "segment", "detect"] = "classify"
    """What is learned."""
    size: Pixels = 96
    """Side in pixels of the images (classify), of the crops (segment), or the shorter side (detect)."""
    decoder: Decoder = "semantic-fpn"
    """Head for segmentation: semantic-fpn, or smp:NAME for a decoder of segmentation_models_pytorch."""
    sliding: bool = False
    """Segment: predict by overlapping windows of the training size instead of whole images."""
    ignore: int | None = 255
    """Segment: the mask value of pixels that do not count."""
    taxonomy: Path | None = None
    """Classify: a taxonomy with the classes as nodes, for hierarchical scores."""
    cat_max_ratio: Share = 1.0
    """Segment: a crop in which one class has more than this share is drawn again, ten times at most."""
    held_out: Part = 0.1
    """Part of the data that is held out where they have no split of their own."""
    check: bool = True
    """A look at every file before training starts; --no-check goes without."""


Window = Annotated[str, Meta(pattern=r"^/?[1-9]\d{0,3}$", description="a side in tokens (8) or a number per axis (/2)")]
Stages = tuple[V, V, V, V]


class Clusters(Settings, frozen=True):
    """How HCFormer clusters. What is None is as in its own design, or with `published` as in the authors' code."""

    RARE: ClassVar[frozenset[str]] = frozenset({"shared", "assignment", "patch_curvature", "published"})

    windows: Stages[Window] | None = None
    """For each stage the windows: 8 is a side of eight tokens, /2 two windows along each axis. None: 8 4 /2 /1."""
    centres: Stages[Count] | None = None
    """For each stage the centres along each axis of a window. None: 4 2 4 4."""
    global_centres: Stages[Natural] | None = None
    """For each stage the centres of the window level along each axis of the map, 0 for none. None: 4 4 4 0."""
    hierarchy: bool = True
    """Have a window level above the patch level."""
    shifted: bool = False
    """Move the windows of every second block by half a side."""
    bias: Literal["function", "table", "none"] = "function"
    """Position bias: a function of the offset, a table of places as in the authors' code, or none."""
    assignment: Literal["soft", "hard"] = "soft"
    """Share a token out over the centres, or give it to one, with the gradient of the soft assignment."""
    curvature: Positive = 1.0
    """Curvature c of the Lorentz levels."""
    patch_curvature: Positive | None = None
    """Curvature of the patch level, where it is another."""
    shared: bool | None = None
    """The same features and values for both levels. None: no, as published yes."""
    published: bool = False
    """The layout of the authors' code: one window of 7×7 centres in stage 3, no window level there, shared features and
    values, stage 3 of Nano and Tiny 196 wide."""

    def conditions(self) -> None:
        told = self.global_centres is None or 1 not in self.global_centres
        need(
            told,
            "global_centres",
            "0 or at least 2 in each stage, as one centre tells nothing apart",
            self.global_centres,
        )

    def chosen(self) -> dict[str, Any]:
        """What differs from the defaults, as arguments of the model."""
        default = to_dict(Clusters())
        return {name: value for name, value in to_dict(self).items() if value != default[name]}


class Config(Settings, frozen=True):
    """The data, the model and the training. The defaults are the preset `quick`."""

    data: Data = Data()
    model: str = "convnext_femto"
    """The backbone: any timm model."""
    geometry: Literal["lorentz", "euclidean"] = "lorentz"
    """Geometry of the window level of HCFormer."""
    patch_geometry: Literal["lorentz", "euclidean"] = "euclidean"
    """Geometry of the patch level of HCFormer."""
    learn_curvature: bool = False
    """Learn the curvature of HCFormer's Lorentz levels."""
    clusters: Clusters = Clusters()
    drop_path: Rate = 0.0
    """Chance to leave out the last block's branches in training; it rises to this from the first block on."""
    init: Path | None = None
    """A run or published model whose backbone to start from."""
    arms: Arms = Arms()
    augment: Augment = Augment()
    loop: LoopConfig = LoopConfig(steps=300, batch_size=32, eval_every=100, checkpoint_every=100)
    optim: OptimConfig = OptimConfig(lr=2e-3, betas=(0.9, 0.999), weight_decay=0.05, warmup_steps=30)

    def conditions(self) -> None:
        clusters = self.model.startswith("hcformer")
        need(clusters or not self.clusters.chosen(), "clusters", "left out for a model that is no HCFormer", self.model)
        scenes = self.data.task == "segment"
        need(scenes or not self.augment.photometric, "augment.photometric", "off but for segment", self.data.task)
        need(clusters or not self.arms.twin, "arms.twin", "off for a model without geometry", self.arms.twin)


def quick() -> Config:
    """A small backbone on small images: minutes on two cores."""
    return Config()


def segment() -> Config:
    """A small backbone with the Semantic FPN head on small crops."""
    return Config(
        data=Data(task="segment", size=128),
        loop=LoopConfig(steps=200, batch_size=8, eval_every=100, checkpoint_every=100),
        optim=OptimConfig(lr=1e-3, betas=(0.9, 0.999), weight_decay=1e-4, warmup_steps=20),
    )


def detect() -> Config:
    """A small backbone under Mask R-CNN on small images."""
    return Config(
        data=Data(task="detect", size=160),
        loop=LoopConfig(steps=200, batch_size=4, eval_every=200, checkpoint_every=100),
        optim=OptimConfig(lr=5e-4, betas=(0.9, 0.999), weight_decay=1e-4, warmup_steps=20),
    )


def on_imagenet(epochs: int, between_looks: int) -> LoopConfig:
    """The loop of the papers on ImageNet-1k: batches of 1024 images, 1251 an epoch, scored after every few epochs."""
    return LoopConfig(
        epochs=float(epochs),
        batch_size=1024,
        micro_batch=256,
        precision="bfloat16",
        compile=True,
        eval_every=between_looks * 1251,
        checkpoint_every=1251,
        log_every=50,
        workers=16,
    )


PRESETS: dict[str, Callable[[], Config]] = {"quick": quick, "segment": segment, "detect": detect}


def check(config: Any) -> None:
    """Refuse what is missing, before anything heavy is imported."""
    if config.data.source is None:
        raise UsageError("--data must name the images to train on")
