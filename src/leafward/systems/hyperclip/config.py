"""HyperCLIP's block-diagonal adapter on a folder of labelled images, beside LoRA, OFT, attention-only and full
fine-tuning under the same budget, with the radius of the features before and after.

    leafward train hyperclip --images photos --model openai/clip-vit-base-patch16 --compare --seeds 3
    leafward export runs/hyperclip-quick --to adapted --merged

The loss is the cross-entropy of the images over the class texts; the score may be the cosine of the paper, the Lorentz
distance, or the cosine with a radius term (see `leafward.encoders.scores`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from leafward.config import Count, Natural, NonNegative, Place, Positive, Seeds, Settings, Template, Workers
from leafward.errors import UsageError

SUMMARY = (
    "Block-diagonal adapters in a CLIP model, on labelled images; beside LoRA, OFT and fine-tuning with --compare."
)
MAY_CHANGE = ("device", "workers")
"""Fields that a resumed run may change."""

MethodName = Literal["block-scale", "orthogonal", "lora", "attention", "full", "frozen"]


class Config(Settings, frozen=True):
    """Data, model, adapter and training."""

    images: Path | None = None
    """A folder of class folders, or one of the usual data sets (see leafward data features)."""
    model: Place | None = None
    """A directory or hub name of CLIP or SigLIP, or open_clip:NAME@WEIGHTS."""
    method: MethodName = "block-scale"
    """What is trained; orthogonal is OFT, attention trains q, k and v themselves, frozen nothing."""
    compare: bool = False
    """Train every method under the same budget."""
    block_size: Count = 128
    """Width of the blocks."""
    constraint: Literal["free", "diagonal", "orthogonal", "orthogonal_diagonal"] = "free"
    """Constraint on the blocks of block-scale."""
    encoder: Literal["both", "image", "text"] = "both"
    """Which encoder is adapted."""
    rank: Count | None = None
    """Rank of LoRA; None: the one with about as many parameters as the blocks."""
    score: Literal["cosine", "lorentz", "cosine+radius"] = "cosine"
    """How images and texts are compared: the paper's cosine, or an extension in which the radius counts."""
    twin: bool = False
    """Train also with the cosine, where score is another: the twin without hyperbolic geometry."""
    c: Positive = 0.1
    """Curvature −c of the Lorentz score."""
    radius_weight: NonNegative = 0.1
    """Weight of the radius term."""
    scale: Positive = 100.0
    """1/τ of the logits."""
    template: Template = "a photo of a {}."
    """The text of a class; {} is its name."""
    shots: Count | None = None
    """Training images for each class; None: all of the training part."""
    steps: Count = 200
    """Training steps."""
    batch: Count = 32
    """Images of a batch."""
    lr: Positive = 1e-4
    """Peak learning rate of adapters; attention and full have a tenth of it."""
    weight_decay: NonNegative = 1e-4
    """Weight decay; of an adapter it pulls to the identity."""
    seeds: Seeds = 1
    """Trainings of each method with other shots, data order and beginnings; two or more give intervals."""
    seed: Natural = 0
    """The first of the seeds; the adapter that is kept is of this one."""
    precision: Literal["float32", "bfloat16", "float64"] = "float32"
    """bfloat16 is autocast of the forward pass over float32 parameters; float64 computes all in float64, for proofs."""
    log_every: Count = 10
    """Steps that one line of training metrics averages over."""
    workers: Workers = 0
    """Processes that load images."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train."""


def quick() -> Config:
    """16 shots, 200 steps."""
    return Config(shots=16)


def full_data() -> Config:
    """All training images, 2,000 steps."""
    return Config(steps=2000)


PRESETS: dict[str, Callable[[], Config]] = {"quick": quick, "full-data": full_data}


def check(config: Config) -> None:
    """Refuse what is missing, before anything heavy is imported."""
    if config.images is None or config.model is None:
        missing = "images" if config.images is None else "model"
        raise UsageError(f"{missing} is missing: the recipe needs --images FOLDER and --model NAME")
