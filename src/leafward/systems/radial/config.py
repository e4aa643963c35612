"""Radial Embedding: a pretrained text encoder learns the hierarchy of captions (Alper & Averbuch-Elor, ECCV 2024).

Chains of captions, general to specific, teach the text side that the specific lies behind the general as seen from a
root; the image side and a pull towards the frozen model keep everything else where it was. Before and after, the
model is scored on test chains and on HyperLex, and on a standard retrieval task beside them; without those, on captions
that were kept from training.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from leafward.config import Count, Natural, NonNegative, Place, Positive, Rate, Samples, Settings, Share, Workers
from leafward.errors import UsageError
from leafward.systems.radial.objective import RadialConfig

SUMMARY = "Radial Embedding: teach the text side of CLIP, SigLIP or a sentence encoder the hierarchy of captions."
MAY_CHANGE = ("device", "workers", "checkpoint_every")
"""Fields that a resumed run may change."""


class Config(Settings, frozen=True):
    """Model, captions, objective and training. The defaults are those of the authors' code."""

    model: Place = ""
    """Directory or hub name of a CLIP, SigLIP or sentence encoder, or open_clip:NAME@WEIGHTS."""
    data: Path | None = None
    """Captions with negatives to learn from: .csv, .jsonl (also .gz) or .parquet."""
    test: Path | None = None
    """Chains to be scored on; captions of their images are left out of the training."""
    second: Path | None = None
    """Captions file whose other captions stand for the test images, where the model has no image side."""
    images: Path | None = None
    """Folder of the test images, where the test file does not hold them."""
    hyperlex: Path | None = None
    """HyperLex's archive (.zip or folder), to be scored on."""
    objective: RadialConfig = RadialConfig()
    """The loss, its geometry and its weights."""
    twin: bool = False
    """Train the same model in the other geometry as well, and compare."""
    train: Literal["full", "lora", "blocks"] = "full"
    """What learns: the whole text side, low-rank updates, or block-diagonal scalings of its projections."""
    rank: Count = 16
    """Rank of the low-rank updates."""
    block_size: Count = 32
    """Width of the blocks; must divide the width of the model."""
    epochs: Positive = 1.0
    """Passes over the captions."""
    batch_size: Samples = 8
    """Caption chains or trees of a step."""
    lr: Positive = 1e-7
    """Learning rate of AdamW."""
    weight_decay: NonNegative = 0.01
    """Weight decay; never applied to norms, biases and roots."""
    warmup: Share = 0.0
    """Fraction of the steps in which the learning rate rises."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Shape of the learning rate after the warm-up."""
    clip_norm: Positive | None = None
    """Largest gradient norm; None: as it is."""
    validation: Rate | None = None
    """Share of the captions, by image, that is kept from training, watched and scored; None: 0.05 without a test file,
    nothing with one."""
    eval_every: Count | None = None
    """Steps between looks at the validation captions; None: at the end."""
    precision: Literal["float32", "bfloat16", "float64"] = "float32"
    """bfloat16 is autocast of the encoder over float32 parameters, with angles in float32; float64 computes all in
    float64, for proofs."""
    log_every: Count = 10
    """Steps that one line of training metrics averages over."""
    seed: Natural = 0
    """Initialisation, data order and validation split follow from it."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto takes cuda if there is one."""
    workers: Workers = 0
    """Processes that load data."""
    checkpoint_every: Count = 500
    """Steps between checkpoints."""

    @property
    def held_out(self) -> float:
        """The share of the captions that is kept from training: a run without a test has something to be scored on."""
        if self.validation is not None:
            return self.validation
        return 0.05 if self.test is None else 0.0


def authors() -> Config:
    """The authors' settings for CLIP: the whole text side, AdamW at 1e-7, batches of 8, one epoch."""
    return Config()


def sentence() -> Config:
    """For small sentence encoders: larger batches, a larger rate with a warm-up, clipped gradients."""
    return Config(batch_size=64, lr=1e-5, warmup=0.1, schedule="cosine", clip_norm=1.0)


def lora() -> Config:
    """Low-rank updates of the text side, for large models."""
    return Config(train="lora", batch_size=64, lr=1e-4, warmup=0.1, schedule="cosine", clip_norm=1.0)


PRESETS: dict[str, Callable[[], Config]] = {"authors": authors, "sentence": sentence, "lora": lora}


def check(config: Config) -> None:
    """Refuse what is missing, before anything heavy is imported."""
    if not config.model or config.data is None:
        raise UsageError("--model and --data must say which encoder learns from which captions")
