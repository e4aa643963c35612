"""Open-vocabulary segmentation with HyperCLIP's adapter: dense CLIP features, a cost volume, CAT-Seg's aggregation.

leafward train hyperclip --task segment --data street --model openai/clip-vit-base-patch16
leafward explain runs/hyperclip-segment-quick photo.jpg --words cat grass sky
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from leafward.config import Count, Natural, NonNegative, Place, Positive, Settings, Workers
from leafward.errors import UsageError

SUMMARY = "Open-vocabulary segmentation: a CLIP model with block-diagonal adapters and cost aggregation."
MAY_CHANGE = ("check", "device", "workers")
"""Fields that a resumed run may change."""


class Config(Settings, frozen=True):
    """Data, model, adapter and training."""

    data: Path | None = None
    """Scenes: images/ and masks/ with classes.txt, ADE20K's layout, or VOC's
    (see leafward.data.scenes)."""
    ignore: int | None = 255
    """Number of mask pixels that do not count; 0 for ADE20K-150, whose classes begin at 1; 65535 for ADE20K-847."""
    model: Place | None = None
    """A directory or hub name of a Hugging Face CLIP model."""
    method: Literal["block-scale", "orthogonal", "lora", "attention", "full", "frozen"] = "block-scale"
    """What is trained in CLIP beside the decoder; orthogonal is OFT, attention trains q, k and v themselves."""
    compare: bool = False
    """Train every method under the same budget; what the one named by method learned is kept."""
    block_size: Count = 128
    """Width of the blocks."""
    constraint: Literal["free", "diagonal", "orthogonal", "orthogonal_diagonal"] = "free"
    """Constraint on the blocks of block-scale."""
    encoder: Literal["both", "image", "text"] = "both"
    """Which encoder is adapted."""
    rank: Count | None = None
    """Rank of LoRA; None: the one with about as many parameters as the blocks."""
    score: Literal["cosine", "lorentz", "cosine+radius"] = "cosine"
    """What the cost volume holds: the paper's cosine, or an extension in which the radius counts."""
    c: Positive = 0.1
    """Curvature −c of the Lorentz score."""
    radius_weight: NonNegative = 0.1
    """Weight of the radius term."""
    size: Annotated[int, Meta(ge=1, le=1 << 16)] = 384
    """Side of crops and windows in pixels, a multiple of the patch size."""
    channels: Annotated[int, Meta(ge=16, multiple_of=16)] = 128
    """Channels of the decoder."""
    window: Count = 12
    """Side of the windows of spatial attention, in patches."""
    templates: tuple[str, ...] = ("a photo of a {} in the scene.",)
    """Texts of a class; their features are averaged."""
    steps: Count = 2000
    """Training steps."""
    batch: Count = 4
    """Crops of a batch."""
    lr: Positive = 2e-4
    """Peak learning rate of the decoder."""
    clip_lr_ratio: Positive = 0.075
    """Learning rate of what is trained in CLIP, as a part of lr; the default is the authors'."""
    weight_decay: NonNegative = 1e-4
    """Weight decay; of an adapter it pulls to the identity."""
    most_scored: Count | None = None
    """Score only so many held-out scenes; None: all."""
    check: bool = True
    """A look at every image and mask before training; --no-check goes without."""
    seed: Natural = 0
    """Seed of crops, data order and beginnings."""
    precision: Literal["float32", "bfloat16", "float64"] = "float32"
    """bfloat16 is autocast of the forward pass over float32 parameters; float64 computes all in float64, for proofs."""
    log_every: Count = 10
    """Steps that one line of training metrics averages over."""
    workers: Workers = 0
    """Processes that load images."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train."""


def quick() -> Config:
    """2,000 steps of 4 crops."""
    return Config()


def paper() -> Config:
    """The paper's length: 80,000 steps."""
    return Config(steps=80_000)


PRESETS: dict[str, Callable[[], Config]] = {"quick": quick, "paper": paper}


def check(config: Config) -> None:
    """Refuse what is missing, before anything heavy is imported."""
    if config.data is None or config.model is None:
        missing = "data" if config.data is None else "model"
        raise UsageError(f"{missing} is missing: the recipe needs --data FOLDER and --model NAME")
