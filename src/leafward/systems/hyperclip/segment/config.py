"""Open-vocabulary segmentation with HyperCLIP's adapter: dense CLIP features, a cost volume, CAT-Seg's aggregation.

leafward train hyperclip --task segment --data street --model openai/clip-vit-base-patch16
leafward explain runs/hyperclip-segment-quick photo.jpg --words cat grass sky
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, ClassVar

from msgspec import Meta

from leafward.config import Count, Place, Positive, Settings, Some, Template
from leafward.engine.config import LoopConfig, OptimConfig
from leafward.systems.hyperclip.config import ABLATIONS, Adapt, Compared, check, fits

__all__ = ["ABLATIONS", "MAY_CHANGE", "PRESETS", "SUMMARY", "Config", "Data", "check"]
SUMMARY = "Open-vocabulary segmentation: a CLIP model with block-diagonal adapters and cost aggregation."
MAY_CHANGE = ("data.check",)
"""Fields that a resumed run may change, beside those of every training."""


class Data(Settings, frozen=True):
    """The scenes, and the texts of their classes."""

    MAIN: ClassVar[str] = "source"
    RARE: ClassVar[frozenset[str]] = frozenset({"most_scored", "check"})

    source: Path | None = None
    """Scenes: images/ and masks/ with classes.txt, ADE20K's layout, or VOC's
    (see leafward.data.scenes)."""
    ignore: int | None = 255
    """Number of mask pixels that do not count; 0 for ADE20K-150, whose classes begin at 1; 65535 for ADE20K-847."""
    size: Annotated[int, Meta(ge=1, le=1 << 16)] = 384
    """Side of crops and windows in pixels, a multiple of the patch size."""
    templates: Some[Template] = ("a photo of a {} in the scene.",)
    """Texts of a class; their features are averaged."""
    most_scored: Count | None = None
    """Score only so many held-out scenes; None: all."""
    check: bool = True
    """A look at every image and mask before training; --no-check goes without."""


class Config(Settings, frozen=True):
    """Data, model, adapter and training."""

    EARLIER: ClassVar[dict[str, str]] = {"batch": "loop.batch_size"}

    data: Data = Data()
    model: Place | None = None
    """A directory or hub name of a Hugging Face CLIP model."""
    channels: Annotated[int, Meta(ge=16, multiple_of=16)] = 128
    """Channels of the decoder."""
    window: Count = 12
    """Side of the windows of spatial attention, in patches."""
    clip_lr_ratio: Positive = 0.075
    """Learning rate of what is trained in CLIP, as a part of that of the decoder; the default is the authors'."""
    adapt: Adapt = Adapt()
    """What is trained in CLIP beside the decoder, and what the cost volume holds."""
    arms: Compared = Compared()
    loop: LoopConfig = LoopConfig(steps=2000, batch_size=4)
    optim: OptimConfig = OptimConfig(lr=2e-4, weight_decay=1e-4, warmup_steps=100, warmup_ratio=0.1)
    """The rate is that of the decoder. Weight decay pulls an adapter to the identity."""

    def conditions(self) -> None:
        fits(self)


def quick() -> Config:
    """2,000 steps of 4 crops."""
    return Config()


def paper() -> Config:
    """The paper's length: 80,000 steps."""
    return Config(loop=LoopConfig(steps=80_000, batch_size=4, checkpoint_every=5000))


PRESETS: dict[str, Callable[[], Config]] = {"quick": quick, "paper": paper}
