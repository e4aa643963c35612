"""Vision with HCFormer (or any timm backbone): classification, semantic segmentation, detection and instance masks.

leafward train hcformer --data photos --preset quick                       a folder of class folders
leafward train hcformer --preset segment --data scenes --init runs/nano    images/ and masks/, pretrained backbone
leafward train hcformer --preset detect --data coco --twin                 COCO JSON or VOC XML; with the flat twin
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from leafward.engine.config import CHANGEABLE_LOOP, LoopConfig, OptimConfig
from leafward.errors import UsageError, need
from leafward.tasks.augment import Augment

SUMMARY = "HCFormer backbones and their Euclidean twins: classify, segment or detect on your images."
MAY_CHANGE = (*(f"loop.{name}" for name in sorted(CHANGEABLE_LOOP - {"steps"})), "check")
"""Fields that a resumed run may change. Not the steps: the learning rate's schedule ends with them."""


@dataclass(frozen=True)
class Config:
    """The data, the model and the training. The defaults are the preset `quick`."""

    task: Literal["classify", "segment", "detect"] = "classify"
    """What is learned."""
    data: str | None = None
    """Classify: class folders, Parquet, .npz, a Hugging Face data set, torchvision:NAME:FOLDER. Segment: images and
    masks, ADE20K or VOC. Detect: COCO JSON or VOC XML."""
    model: str = "hcformer_nano"
    """The backbone: any timm model."""
    geometry: Literal["lorentz", "euclidean"] = "lorentz"
    """Geometry of the window level of HCFormer."""
    patch_geometry: Literal["lorentz", "euclidean"] = "euclidean"
    """Geometry of the patch level of HCFormer."""
    learn_curvature: bool = False
    """Learn the curvature of HCFormer's Lorentz levels."""
    drop_path: float = 0.0
    """Chance to leave out the last block's branches in training; it rises to this from the first block on."""
    init: Path | None = None
    """A run or published model whose backbone to start from."""
    size: int = 96
    """Side in pixels of the images (classify), of the crops (segment), or the shorter side (detect)."""
    decoder: str = "semantic-fpn"
    """Head for segmentation: semantic-fpn, or smp:NAME for a decoder of segmentation_models_pytorch."""
    sliding: bool = False
    """Segment: predict by overlapping windows of the training size instead of whole images."""
    ignore: int | None = 255
    """Segment: the mask value of pixels that do not count."""
    taxonomy: Path | None = None
    """Classify: a taxonomy with the classes as nodes, for hierarchical scores."""
    held_out: float = 0.1
    """Part of the data that is held out where they have no split of their own."""
    check: bool = True
    """A look at every file before training starts; --no-check goes without."""
    twin: bool = False
    """Train the other geometry as well, on the same data in the same order, and report the paired difference."""
    seeds: int = 1
    """Replicates with neighbouring seeds; two or more give intervals over seeds."""
    augment: Augment = dataclasses.field(default_factory=Augment)
    loop: LoopConfig = dataclasses.field(
        default_factory=lambda: LoopConfig(steps=300, batch_size=32, eval_every=100, checkpoint_every=100)
    )
    optim: OptimConfig = dataclasses.field(
        default_factory=lambda: OptimConfig(lr=2e-3, betas=(0.9, 0.999), weight_decay=0.05, warmup_steps=30)
    )

    def __post_init__(self) -> None:
        need(self.size >= 32, "size", "at least 32 pixels", self.size)
        need(0.0 <= self.drop_path < 1.0, "drop_path", "in [0, 1)", self.drop_path)
        need(0.0 < self.held_out < 1.0, "held_out", "a part between 0 and 1", self.held_out)
        need(self.seeds >= 1, "seeds", "an integer ≥ 1", self.seeds)
        clusters = self.model.startswith("hcformer")
        need(clusters or not self.twin, "twin", "off for a model without geometry", self.twin)
        known = self.decoder == "semantic-fpn" or self.decoder.startswith("smp:")
        need(known, "decoder", "semantic-fpn or smp:NAME", self.decoder)


def quick() -> Config:
    """Nano on small images: minutes on two cores."""
    return Config()


def segment() -> Config:
    """Nano with the Semantic FPN head on small crops."""
    return Config(
        task="segment",
        size=128,
        loop=LoopConfig(steps=200, batch_size=8, eval_every=100, checkpoint_every=100),
        optim=OptimConfig(lr=1e-3, betas=(0.9, 0.999), weight_decay=1e-4, warmup_steps=20),
    )


def detect() -> Config:
    """Nano under Mask R-CNN on small images."""
    return Config(
        task="detect",
        size=160,
        loop=LoopConfig(steps=200, batch_size=4, eval_every=200, checkpoint_every=100),
        optim=OptimConfig(lr=5e-4, betas=(0.9, 0.999), weight_decay=1e-4, warmup_steps=20),
    )


def imagenet() -> Config:
    """The paper's training on ImageNet-1k: 310 epochs of 1251 updates with 1024 images."""
    return Config(
        model="hcformer_tiny",
        size=224,
        drop_path=0.1,
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
            steps=310 * 1251,
            batch_size=1024,
            micro_batch=256,
            precision="bfloat16",
            compile=True,
            eval_every=10 * 1251,
            checkpoint_every=1251,
            log_every=50,
            workers=16,
        ),
        optim=OptimConfig(
            lr=1e-3, betas=(0.9, 0.999), weight_decay=0.05, clip_norm=None, warmup_steps=5 * 1251, final_ratio=1e-3
        ),
    )


def ade20k() -> Config:
    """The paper's Semantic FPN on ADE20K: 80,000 updates with 16 crops of 512 pixels."""
    return Config(
        task="segment",
        model="hcformer_tiny",
        size=512,
        drop_path=0.1,
        ignore=0,
        loop=LoopConfig(
            steps=80_000,
            batch_size=16,
            precision="bfloat16",
            eval_every=8000,
            checkpoint_every=4000,
            log_every=50,
            workers=8,
        ),
        optim=OptimConfig(
            lr=2e-4, betas=(0.9, 0.999), weight_decay=1e-4, clip_norm=None, schedule="linear", final_ratio=0.0
        ),
    )


def coco() -> Config:
    """The paper's Mask R-CNN on COCO: 12 epochs of 7330 updates with 16 images of 800 pixels."""
    return Config(
        task="detect",
        model="hcformer_tiny",
        size=800,
        drop_path=0.1,
        check=False,
        loop=LoopConfig(
            steps=12 * 7330,
            batch_size=16,
            precision="bfloat16",
            eval_every=7330,
            checkpoint_every=3665,
            log_every=50,
            workers=8,
        ),
        optim=OptimConfig(
            lr=1e-4, betas=(0.9, 0.999), weight_decay=1e-4, clip_norm=None, warmup_steps=500, final_ratio=0.01
        ),
    )


PRESETS: dict[str, Callable[[], Config]] = {
    "quick": quick,
    "segment": segment,
    "detect": detect,
    "imagenet": imagenet,
    "ade20k": ade20k,
    "coco": coco,
}


def run(config: Config, out: Path, *, resume: bool = False, overwrite: bool = False) -> dict[str, Any]:
    """Check the data, train, publish and score in the run directory `out`; returns what result.json holds.

    Start it with torchrun for several ranks. Raises `engine.Interrupted` after SIGTERM or SIGINT, once everything is
    saved; the same call with `resume` goes on from there.
    """
    if config.data is None:
        raise UsageError("--data must name the images to train on")
    from leafward.recipes import _hcformer_train

    return _hcformer_train.train(config, out, resume=resume, overwrite=overwrite)
