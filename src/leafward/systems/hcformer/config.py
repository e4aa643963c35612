"""Vision with HCFormer: `leafward.systems.vision` with its backbones as the default, and the paper's trainings.

leafward train hcformer --data photos --preset quick                       a folder of class folders
leafward train hcformer --preset segment --data scenes --init runs/nano    images/ and masks/, pretrained backbone
leafward train hcformer --preset detect --data coco --twin                 COCO JSON or VOC XML; with the flat twin
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from leafward.config import checked, to_dict
from leafward.engine.config import LoopConfig, OptimConfig
from leafward.systems.vision import config as vision

_FLAT = {"geometry": "euclidean", "patch_geometry": "euclidean"}
ABLATIONS: dict[str, dict[str, dict[str, Any]]] = {
    "geometry": {
        "euclidean": _FLAT,
        "lorentz": {"geometry": "lorentz", "patch_geometry": "lorentz"},
        "both": {"geometry": "lorentz", "patch_geometry": "euclidean"},
    },
    "levels": {
        "windows": _FLAT | {"clusters.hierarchy": False, "clusters.bias": "none"},
        "shifted": _FLAT | {"clusters.hierarchy": False, "clusters.bias": "none", "clusters.shifted": True},
        "hierarchy": _FLAT | {"clusters.bias": "none"},
        "hyperbolic": {"geometry": "lorentz", "patch_geometry": "euclidean", "clusters.bias": "none"},
        "position": {"geometry": "lorentz", "patch_geometry": "euclidean"},
    },
    "curvature": {
        "0.1": {"geometry": "lorentz", "clusters.curvature": 0.1},
        "1": {"geometry": "lorentz", "clusters.curvature": 1.0},
        "10": {"geometry": "lorentz", "clusters.curvature": 10.0},
    },
    "centres": {
        "4": {"clusters.global_centres": (2, 2, 2, 0)},
        "9": {"clusters.global_centres": (3, 3, 3, 0)},
        "16": {"clusters.global_centres": (4, 4, 4, 0)},
        "25": {"clusters.global_centres": (5, 5, 5, 0)},
    },
}
"""The paper's tables: the geometry of both levels; from windows alone to all parts, beside shifted windows; the
curvature; the centres of the window level."""
SUMMARY = "HCFormer backbones and their Euclidean twins: classify, segment or detect on your images."
check = vision.check


class Config(vision.Config, frozen=True):
    """The data, the model and the training. The defaults are the preset `quick`."""

    model: str = "hcformer_nano"
    """The backbone: any timm model."""


def quick() -> Config:
    """Nano on small images: minutes on two cores."""
    return Config()


def segment() -> Config:
    """Nano with the Semantic FPN head on small crops."""
    return _nano(vision.segment())


def detect() -> Config:
    """Nano under Mask R-CNN on small images."""
    return _nano(vision.detect())


def _nano(config: vision.Config) -> Config:
    return checked(Config, to_dict(config) | {"model": "hcformer_nano"})


def imagenet() -> Config:
    """The paper's training on ImageNet-1k: 310 epochs with batches of 1024 images."""
    return Config(
        data=vision.Data(size=224, check=False),
        model="hcformer_tiny",
        drop_path=0.1,
        augment=vision.STRONG,
        loop=vision.on_imagenet(epochs=310, between_looks=10),
        optim=OptimConfig(
            lr=1e-3, betas=(0.9, 0.999), weight_decay=0.05, clip_norm=None, warmup_ratio=5 / 310, final_ratio=1e-3
        ),
    )


def ade20k() -> Config:
    """The paper's Semantic FPN on ADE20K: 80,000 updates with 16 crops of 512 pixels."""
    return Config(
        data=vision.Data(task="segment", size=512, ignore=0, cat_max_ratio=0.75),
        model="hcformer_tiny",
        drop_path=0.1,
        augment=vision.Augment(photometric=True),
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
            lr=2e-4, betas=(0.9, 0.999), weight_decay=1e-4, clip_norm=None, schedule="poly", final_ratio=0.0
        ),
    )


def coco() -> Config:
    """The paper's Mask R-CNN on COCO: 12 epochs with batches of 16 images of 800 pixels, the 1x schedule."""
    return Config(
        data=vision.Data(task="detect", size=800, check=False),
        model="hcformer_tiny",
        drop_path=0.1,
        loop=LoopConfig(
            epochs=12.0,
            batch_size=16,
            precision="bfloat16",
            eval_every=7330,
            checkpoint_every=3665,
            log_every=50,
            workers=8,
        ),
        optim=OptimConfig(
            lr=1e-4,
            betas=(0.9, 0.999),
            weight_decay=1e-4,
            clip_norm=None,
            schedule="step",
            warmup_steps=500,
            final_ratio=0.0,
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
