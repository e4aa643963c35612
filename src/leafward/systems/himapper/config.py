"""Hi-Mapper (arXiv 2404.00974): a hierarchy of visual parts on a pretrained backbone, fine-tuned on your images.

    leafward train himapper --backbone timm:resnet50 --data photos --twin            classes, with all comparisons
    leafward train himapper --backbone runs/resnet --data photos --seeds 3 --twin    on a backbone of your own
    leafward train himapper --preset segment --backbone timm:swin_tiny_patch4_window7_224 --data scenes

The paper compares with backbones that were not fine-tuned. `--twin` fine-tunes the plain backbone and the flat twin of
the tree too, with the same steps, data order and augmentation.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from leafward.config import Count, NonNegative, Part, Pixels, Place, Positive, Seeds, Settings, Share
from leafward.engine.config import CHANGEABLE_LOOP, LoopConfig, OptimConfig
from leafward.errors import UsageError, need
from leafward.systems.vision.augment import Augment
from leafward.systems.vision.config import Decoder

SUMMARY = "Hi-Mapper on a pretrained backbone, beside the plain backbone and the flat twin at the same budget."
MAY_CHANGE = (*(f"loop.{name}" for name in sorted(CHANGEABLE_LOOP - {"steps"})), "check")
"""Fields that a resumed run may change. Not the steps: the learning rate's schedule ends with them."""


class Config(Settings, frozen=True):
    """The data, the backbone, the hierarchy and the training. The defaults are the preset `quick`."""

    task: Literal["classify", "segment", "detect"] = "classify"
    """What is learned."""
    data: Place | None = None
    """Classify: class folders, Parquet, .npz, a Hugging Face data set, torchvision:NAME:FOLDER. Segment: images and
    masks, ADE20K or VOC. Detect: COCO JSON or VOC XML."""
    backbone: str | None = None
    """timm:NAME, or a run (or published model) of classification whose backbone to take."""
    pretrained: bool = True
    """timm's pretrained weights of timm:NAME, which needs the network unless they are cached; --no-pretrained goes
    without."""
    weights: Path | None = None
    """A .safetensors file with the weights of timm:NAME, in place of timm's."""
    freeze_backbone: bool = False
    """Train the hierarchy and the heads alone; of the plain backbone, the heads."""
    plain: bool = False
    """No hierarchy: the backbone alone at the same settings."""
    geometry: Literal["lorentz", "euclidean"] = "lorentz"
    """Space in which the hierarchy is learned."""
    mixture: Literal["sample", "moments"] = "sample"
    """Upper nodes by samples from the mixture of their children, or by a Gaussian with its moments."""
    deterministic: bool = False
    """Points in place of Gaussians."""
    leaves: Count = 32
    """Leaves of the tree, a multiple of 2^(levels − 1)."""
    levels: Annotated[int, Meta(ge=2, le=16)] = 4
    """Levels of the tree."""
    dim: Annotated[int, Meta(ge=4, multiple_of=4)] = 128
    """Width of the nodes, a multiple of 4."""
    temperature: Positive = 0.2
    """τ of the contrast between parents and the other nodes of a level."""
    sibling_weight: Share = 1.0
    """Weight of siblings among the negatives: 1 as in the paper, 0 leaves them out."""
    contrast_weight: NonNegative = 0.1
    """Weight of the contrast beside the task's own loss."""
    kl_weight: NonNegative = 0.01
    """Weight of the divergence of the top level from the unit Gaussian."""
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
    twin: bool = False
    """Fine-tune also the plain backbone and the tree in the other geometry, and report the paired differences."""
    ablation: bool = False
    """Fine-tune also the deterministic tree."""
    seeds: Seeds = 1
    """Replicates with neighbouring seeds; two or more give intervals over seeds."""
    augment: Augment = Augment()
    loop: LoopConfig = LoopConfig(steps=300, batch_size=32, eval_every=100, checkpoint_every=100)
    optim: OptimConfig = OptimConfig(lr=5e-4, betas=(0.9, 0.999), weight_decay=1e-4, warmup_steps=20)

    def conditions(self) -> None:
        most = 2 ** (self.levels - 1)
        need(self.leaves % most == 0, "leaves", f"a multiple of 2^(levels − 1) = {most}", self.leaves)
        safe = self.weights is None or self.weights.suffix == ".safetensors"
        need(safe, "weights", "a .safetensors file", self.weights)
        alone = not (self.plain and (self.twin or self.ablation))
        need(alone, "plain", "off where others are compared with it (twin, ablation)", self.plain)
        need(not (self.ablation and self.deterministic), "ablation", "off for the deterministic tree itself", True)


def quick() -> Config:
    """Small images, a few hundred steps."""
    return Config()


def segment() -> Config:
    """The Semantic FPN head on small crops."""
    return Config(
        task="segment",
        size=128,
        loop=LoopConfig(steps=200, batch_size=8, eval_every=100, checkpoint_every=100),
        optim=OptimConfig(lr=3e-4, betas=(0.9, 0.999), weight_decay=1e-4, warmup_steps=20),
    )


def detect() -> Config:
    """Mask R-CNN on small images."""
    return Config(
        task="detect",
        size=160,
        loop=LoopConfig(steps=200, batch_size=4, eval_every=200, checkpoint_every=100),
        optim=OptimConfig(lr=3e-4, betas=(0.9, 0.999), weight_decay=1e-4, warmup_steps=20),
    )


def _paper(model: str, size: int = 224) -> Callable[[], Config]:
    def published() -> Config:
        """The paper's fine-tuning on ImageNet-1k: 50 epochs of 1251 updates with 1024 images."""
        return Config(
            backbone=f"timm:{model}",
            size=size,
            check=False,
            augment=Augment(
                auto="rand-m9-mstd0.5-inc1",
                scale=(0.08, 1.0),
                jitter=0.4,
                erase=0.25,
                mixup=0.8,
                cutmix=1.0,
                smoothing=0.1,
            ),
            loop=LoopConfig(
                steps=50 * 1251,
                batch_size=1024,
                micro_batch=256,
                precision="bfloat16",
                compile=True,
                eval_every=5 * 1251,
                checkpoint_every=1251,
                log_every=50,
                workers=16,
            ),
            optim=OptimConfig(lr=1e-4, betas=(0.9, 0.999), weight_decay=1e-4, clip_norm=None, final_ratio=0.01),
        )

    return published


PRESETS: dict[str, Callable[[], Config]] = {
    "quick": quick,
    "segment": segment,
    "detect": detect,
    "resnet50": _paper("resnet50"),
    "efficientnet-b4": _paper("efficientnet_b4", 380),
    "deit-t": _paper("deit_tiny_patch16_224"),
    "deit-s": _paper("deit_small_patch16_224"),
    "deit-b": _paper("deit_base_patch16_224"),
    "swin-t": _paper("swin_tiny_patch4_window7_224"),
    "swin-s": _paper("swin_small_patch4_window7_224"),
}


def check(config: Config) -> None:
    """Refuse what is missing, before anything heavy is imported."""
    if config.data is None:
        raise UsageError("--data must name the images to train on")
    if config.backbone is None:
        raise UsageError("--backbone must be timm:NAME, or a run whose backbone to take")
