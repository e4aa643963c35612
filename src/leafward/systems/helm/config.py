"""HELM language models ("HELM: Hyperbolic Large Language Models", 2505.24722) and their Euclidean twins, on your text.

A tokenizer is trained on the data (or given), the data are tokenised once, and HELM-D (dense) or HELM-MiCE (mixture of
curvature experts) is trained on packed windows. `--twin` trains both geometries on the same data in the same order.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from leafward.config import Part, Place, Rate, Settings, Several, replace
from leafward.engine.config import Arms, LoopConfig, OptimConfig
from leafward.errors import UsageError

SUMMARY = "HELM language models and their Euclidean twins on your text: train, score, sample."
MAY_CHANGE = ("data.cache",)
"""Fields that a resumed run may change, beside those of every training."""


class Data(Settings, frozen=True):
    """The text, and what makes tokens of it."""

    MAIN: ClassVar[str] = "source"
    RARE: ClassVar[frozenset[str]] = frozenset({"eval_tokens", "cache"})

    source: Path | None = None
    """Text, JSONL, Parquet (also .txt.gz, .jsonl.gz), a folder of them, or a Hugging Face data set on disk."""
    field: str = "text"
    """Field of JSONL, Parquet and data sets that holds the text."""
    tokenizer: Place | None = None
    """A tokenizer.json, a folder with one, or the name of a Hugging Face tokenizer; None: train one on the data."""
    vocab_size: Annotated[int, Meta(ge=2, le=1 << 24)] | None = None
    """Tokens of the model. None: of a tokenizer that is given, as many as it has; else as the model's preset says."""
    validation: Part = 0.05
    """Part of the documents that is held out (of a single document: its last part)."""
    eval_tokens: Several = 1_000_000
    """Held-out tokens that evaluations during training read; the last one reads all."""
    cache: Path | None = None
    """Where tokens are kept; None: in the run directory."""


class Config(Settings, frozen=True):
    """The data, the model and the training. The defaults are the preset `helm-d-tiny`."""

    data: Data = Data()
    context: Several = 256
    """Tokens of a training window, and the model's context."""
    model: Literal["helm-d-tiny", "helm-mice-tiny", "helm-d-115m", "helm-mice-120m", "helm-mice-1b"] = "helm-d-tiny"
    """Shape of the model."""
    geometry: Literal["lorentz", "euclidean"] = "lorentz"
    """Hyperbolic, or its flat twin of equal size."""
    learn_curvatures: bool = False
    """Learn the experts' curvatures within their bounds in place of a fixed spread."""
    balance_rate: Rate = 1e-3
    """Step by which the experts' biases move towards even loads after each update."""
    prompt: str = ""
    """What the samples in the report go on from."""
    arms: Arms = Arms()
    loop: LoopConfig = LoopConfig(steps=500, batch_size=16, eval_every=100, checkpoint_every=250)
    optim: OptimConfig = OptimConfig(lr=1e-2, weight_decay=0.01, warmup_steps=20)


def helm_d_tiny() -> Config:
    """HELM-D with 0.16 million weights: minutes on a laptop."""
    return Config()


def helm_mice_tiny() -> Config:
    """HELM-MiCE with 0.27 million weights."""
    return replace(Config(), model="helm-mice-tiny")


def helm_d_115m() -> Config:
    """HELM-D at the published shape and training settings."""
    return _published("helm-d-115m", micro_batch=16)


def helm_mice_120m() -> Config:
    """HELM-MiCE at the published shape and training settings."""
    return _published("helm-mice-120m", micro_batch=16)


def helm_mice_1b() -> Config:
    """HELM-MiCE of about a billion weights at the published shape and training settings."""
    return _published("helm-mice-1b", micro_batch=4)


def _published(model: Any, micro_batch: int) -> Config:
    """About 5 billion tokens in 2400 updates of 1024 windows of 2048 tokens."""
    return Config(
        model=model,
        context=2048,
        loop=LoopConfig(
            steps=2400,
            batch_size=1024,
            micro_batch=micro_batch,
            precision="bfloat16",
            compile=True,
            eval_every=200,
            checkpoint_every=200,
        ),
        optim=OptimConfig(lr=4e-4, betas=(0.9, 0.999), weight_decay=0.01, warmup_steps=72),
    )


PRESETS: dict[str, Callable[[], Config]] = {
    "helm-d-tiny": helm_d_tiny,
    "helm-mice-tiny": helm_mice_tiny,
    "helm-d-115m": helm_d_115m,
    "helm-mice-120m": helm_mice_120m,
    "helm-mice-1b": helm_mice_1b,
}


def check(config: Config) -> None:
    """Refuse what is missing, before anything heavy is imported."""
    if config.data.source is None:
        raise UsageError("--data must name the text to train on: a file, a folder or a data set on disk")
    if os.environ.get("RANK", "0") == "0":  # before heavy imports; the first rank alone reads the text
        from leafward.data.text.documents import find_files

        find_files(config.data.source)
