"""Training of any timm backbone: classification, semantic segmentation, detection and instance masks.

leafward train vision --data photos --model resnet18                       a folder of class folders
leafward train vision --preset segment --data scenes --init runs/quick     images/ and masks/, pretrained backbone
leafward train vision --preset detect --data coco                          COCO JSON or VOC XML
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from leafward.config import Part, Pixels, Place, Rate, Settings
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
Decoder = Annotated[str, Meta(pattern="^(semantic-fpn$|smp:)", description="semantic-fpn or smp:NAME")]


class Data(Settings, frozen=True):
    """What is learned from which images."""

    MAIN: ClassVar[str] = "source"
    RARE: ClassVar[frozenset[str]] = frozenset({"decoder", "sliding", "ignore", "check"})

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
    held_out: Part = 0.1
    """Part of the data that is held out where they have no split of their own."""
    check: bool = True
    """A look at every file before training starts; --no-check goes without."""


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


PRESETS: dict[str, Callable[[], Config]] = {"quick": quick, "segment": segment, "detect": detect}


def check(config: Any) -> None:
    """Refuse what is missing, before anything heavy is imported."""
    if config.data.source is None:
        raise UsageError("--data must name the images to train on")
