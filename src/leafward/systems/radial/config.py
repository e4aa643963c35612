"""Radial Embedding: a pretrained text encoder learns the hierarchy of captions (Alper & Averbuch-Elor, ECCV 2024).

Chains of captions, general to specific, teach the text side that the specific lies behind the general as seen from a
root; the image side and a pull towards the frozen model keep everything else where it was. Before and after, the
model is scored on test chains and on HyperLex, and on a standard retrieval task beside them; without those, on captions
that were kept from training.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Literal

from leafward.config import Count, Place, Rate, Settings, replace
from leafward.engine.config import Arms, LoopConfig, OptimConfig
from leafward.errors import UsageError, need
from leafward.systems.radial.objective import RadialConfig

SUMMARY = "Radial Embedding: teach the text side of CLIP, SigLIP or a sentence encoder the hierarchy of captions."


class Data(Settings, frozen=True):
    """What is learned from which captions, and scored on which tests."""

    MAIN: ClassVar[str] = "source"

    source: Path | None = None
    """Captions with negatives to learn from: .csv, .jsonl (also .gz) or .parquet."""
    test: Path | None = None
    """Chains to be scored on; captions of their images are left out of the training."""
    second: Path | None = None
    """Captions file whose other captions stand for the test images, where the model has no image side."""
    images: Path | None = None
    """Folder of the test images, where the test file does not hold them."""
    hyperlex: Path | None = None
    """HyperLex's archive (.zip or folder), to be scored on."""


class Config(Settings, frozen=True):
    """Model, captions, objective and training. The defaults are those of the authors' code."""

    EARLIER: ClassVar[dict[str, str]] = {"warmup": "optim.warmup_ratio"}

    data: Data = Data()
    model: Place = ""
    """Directory or hub name of a CLIP, SigLIP or sentence encoder, or open_clip:NAME@WEIGHTS."""
    objective: RadialConfig = RadialConfig()
    """The loss, its geometry and its weights."""
    train: Literal["full", "lora", "blocks"] = "full"
    """What learns: the whole text side, low-rank updates, or block-diagonal scalings of its projections."""
    rank: Count = 16
    """Rank of the low-rank updates."""
    block_size: Count = 32
    """Width of the blocks; must divide the width of the model."""
    validation: Rate | None = None
    """Share of the captions, by image, that is kept from training, watched and scored; None: 0.05 without a test file,
    nothing with one."""
    arms: Arms = Arms()
    loop: LoopConfig = LoopConfig(epochs=1.0, batch_size=8, keep_last=1)
    optim: OptimConfig = OptimConfig(
        lr=1e-7, betas=(0.9, 0.999), weight_decay=0.01, clip_norm=None, schedule="constant"
    )

    def conditions(self) -> None:
        loop = self.loop
        whole = "None, because the hardest pairs are those of the whole batch"
        need(loop.micro_batch is None, "loop.micro_batch", whole, loop.micro_batch)
        saved = "auto or ddp, because each rank scores and saves the whole model"
        need(loop.strategy != "fsdp", "loop.strategy", saved, loop.strategy)
        watched = "None where validation keeps no captions from training"
        need(loop.patience is None or self.held_out > 0, "loop.patience", watched, loop.patience)

    @property
    def held_out(self) -> float:
        """The share of the captions that is kept from training: a run without a test has something to be scored on."""
        if self.validation is not None:
            return self.validation
        return 0.05 if self.data.test is None else 0.0


def authors() -> Config:
    """The authors' settings for CLIP: the whole text side, AdamW at 1e-7, batches of 8, one epoch."""
    return Config()


def sentence() -> Config:
    """For small sentence encoders: larger batches, a larger rate with a warm-up, clipped gradients."""
    return replace(Config(), batch_size=64, lr=1e-5, warmup_ratio=0.1, schedule="cosine", clip_norm=1.0)


def lora() -> Config:
    """Low-rank updates of the text side, for large models."""
    return replace(sentence(), train="lora", lr=1e-4)


PRESETS: dict[str, Callable[[], Config]] = {"authors": authors, "sentence": sentence, "lora": lora}


ABLATIONS: dict[str, dict[str, dict[str, Any]]] = {
    "geometry": {name: {"objective.geometry": name} for name in ("euclidean", "lorentz")},
    "loss": {name: {"objective.loss": name} for name in ("radial", "cone")},
    "root": {name: {"objective.root": name} for name in ("text", "learned")},
    "terms": {
        "all": {},
        "without-pull": {"objective.pull": 0.0},
        "without-contrast": {"objective.contrast": 0.0},
        "without-hardest": {"objective.hardest": 0.0},
    },
}
"""Name -> its variants; the terms are those of the radial loss."""


def check(config: Config) -> None:
    """Refuse what is missing, before anything heavy is imported."""
    if not config.model or config.data.source is None:
        raise UsageError("--model and --data must say which encoder learns from which captions")
