"""Hi-Mapper (arXiv 2404.00974): a hierarchy of visual parts on a pretrained backbone, fine-tuned on your images.

    leafward train himapper --backbone timm:resnet50 --data photos --twin            classes, with all comparisons
    leafward train himapper --backbone runs/resnet --data photos --seeds 3 --twin    on a backbone of your own
    leafward train himapper --preset segment --backbone timm:swin_tiny_patch4_window7_224 --data scenes

The paper compares with backbones that were not fine-tuned. `--twin` fine-tunes the plain backbone and the flat twin of
the tree too, with the same steps, data order and augmentation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from leafward.config import Count, NonNegative, Positive, Settings, Share, replace
from leafward.engine.config import Arms, LoopConfig, OptimConfig
from leafward.errors import UsageError, need
from leafward.systems.vision import config as vision
from leafward.systems.vision.augment import Augment
from leafward.systems.vision.config import Data

SUMMARY = "Hi-Mapper on a pretrained backbone, beside the plain backbone and the flat twin at the same budget."
MAY_CHANGE = vision.MAY_CHANGE

ABLATIONS: dict[str, dict[str, dict[str, Any]]] = {
    "nodes": {str(leaves): {"leaves": leaves} for leaves in (8, 16, 32, 64)},
    "levels": {str(levels): {"levels": levels} for levels in (2, 3, 4, 5)},
    "losses": {
        "both": {},
        "contrast": {"losses.kl": 0.0},
        "kl": {"losses.contrast": 0.0},
        "none": {"losses.kl": 0.0, "losses.contrast": 0.0},
    },
    "geometry": {"lorentz": {"geometry": "lorentz"}, "euclidean": {"geometry": "euclidean"}},
    "noise": {"sample": {"mixture": "sample"}, "moments": {"mixture": "moments"}, "points": {"deterministic": True}},
}
"""Size and depth of the tree, what teaches it, its space, and how uncertain its nodes are."""


class Losses(Settings, frozen=True):
    """Weights of what teaches the hierarchy, beside the task's own loss; of each there is a module in losses/."""

    contrast: NonNegative = 0.1
    """Every node nearer to its parent than to the other nodes of its level."""
    kl: NonNegative = 0.01
    """Divergence of the top level from the unit Gaussian."""


class Config(Settings, frozen=True):
    """The data, the backbone, the hierarchy and the training. The defaults are the preset `quick`."""

    EARLIER: ClassVar[Mapping[str, str]] = {"contrast_weight": "losses.contrast", "kl_weight": "losses.kl"}

    data: Data = Data()
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
    losses: Losses = Losses()
    ablation: bool = False
    """Fine-tune also the deterministic tree."""
    arms: Arms = Arms()
    augment: Augment = Augment()
    loop: LoopConfig = LoopConfig(steps=300, batch_size=32, eval_every=100, checkpoint_every=100)
    optim: OptimConfig = OptimConfig(lr=5e-4, betas=(0.9, 0.999), weight_decay=1e-4, warmup_steps=20)

    def conditions(self) -> None:
        most = 2 ** (self.levels - 1)
        need(self.leaves % most == 0, "leaves", f"a multiple of 2^(levels − 1) = {most}", self.leaves)
        safe = self.weights is None or self.weights.suffix == ".safetensors"
        need(safe, "weights", "a .safetensors file", self.weights)
        alone = not (self.plain and (self.arms.twin or self.ablation))
        need(alone, "plain", "off where others are compared with it (arms.twin, ablation)", self.plain)
        need(not (self.ablation and self.deterministic), "ablation", "off for the deterministic tree itself", True)


def quick() -> Config:
    """Small images, a few hundred steps."""
    return Config()


def segment() -> Config:
    """The Semantic FPN head on small crops."""
    return _as(vision.segment())


def detect() -> Config:
    """Mask R-CNN on small images."""
    return _as(vision.detect())


def _as(plain: vision.Config) -> Config:
    """The same data and training as of a plain backbone, at a rate for a pretrained one."""
    return Config(data=plain.data, loop=plain.loop, optim=replace(plain.optim, lr=3e-4))


def _paper(model: str, size: int = 224) -> Callable[[], Config]:
    def published() -> Config:
        """The paper's fine-tuning on ImageNet-1k: 50 epochs with batches of 1024 images."""
        return Config(
            backbone=f"timm:{model}",
            data=Data(size=size, check=False),
            augment=vision.STRONG,
            loop=vision.on_imagenet(epochs=50, between_looks=5),
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
    vision.check(config)
    if config.backbone is None:
        raise UsageError("--backbone must be timm:NAME, or a run whose backbone to take")
