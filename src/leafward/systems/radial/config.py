"""Radial Embedding: a pretrained text encoder learns the hierarchy of captions (Alper & Averbuch-Elor, ECCV 2024).

Chains of captions, general to specific, teach the text side that the specific lies behind the general as seen from a
root; the image side and a pull towards the frozen model keep everything else where it was. Before and after, the
model is scored on test chains and on HyperLex, and on a standard retrieval task beside them; without those, on captions
that were kept from training.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from leafward.adapters.radial_config import Geometry, RadialConfig
from leafward.errors import UsageError, need
from leafward.files import read_record

if TYPE_CHECKING:
    from leafward.engine import Cluster, RunDirectory

SUMMARY = "Radial Embedding: teach the text side of CLIP, SigLIP or a sentence encoder the hierarchy of captions."
MAY_CHANGE = ("device", "workers", "checkpoint_every")
"""Fields that a resumed run may change."""


@dataclass(frozen=True)
class Config:
    """Model, captions, objective and training. The defaults are those of the authors' code."""

    model: str = ""
    """Directory or hub name of a CLIP, SigLIP or sentence encoder, or open_clip:NAME[@FILE or TAG]."""
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
    objective: RadialConfig = field(default_factory=RadialConfig)
    """The loss, its geometry and its weights."""
    twin: bool = False
    """Train the same model in the other geometry as well, in the folder twin of the run, and compare."""
    train: Literal["full", "lora", "blocks"] = "full"
    """What learns: the whole text side, low-rank updates, or block-diagonal scalings of its projections."""
    rank: int = 16
    """Rank of the low-rank updates."""
    block_size: int = 32
    """Width of the blocks; must divide the width of the model."""
    epochs: float = 1.0
    """Passes over the captions."""
    batch_size: int = 8
    """Caption chains or trees of a step."""
    lr: float = 1e-7
    """Learning rate of AdamW."""
    weight_decay: float = 0.01
    """Weight decay; never applied to norms, biases and roots."""
    warmup: float = 0.0
    """Fraction of the steps in which the learning rate rises."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Shape of the learning rate after the warm-up."""
    clip_norm: float | None = None
    """Largest gradient norm; None: as it is."""
    validation: float | None = None
    """Share of the captions, by image, that is kept from training, watched and scored; None: 0.05 without a test file,
    nothing with one."""
    eval_every: int | None = None
    """Steps between looks at the validation captions; None: at the end."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Autocast type of the encoder; angles are always computed in float32."""
    seed: int = 0
    """Initialisation, data order and validation split follow from it."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto takes cuda if there is one."""
    workers: int = 0
    """Processes that load data."""
    checkpoint_every: int = 500
    """Steps between checkpoints."""

    def __post_init__(self) -> None:
        for name in ("rank", "block_size", "batch_size", "checkpoint_every", "eval_every"):
            value = getattr(self, name)
            need(value is None or value >= 1, name, "an integer ≥ 1", value)
        for name in ("epochs", "lr", "clip_norm"):
            value = getattr(self, name)
            need(value is None or (math.isfinite(value) and value > 0), name, "a positive number", value)
        need(math.isfinite(self.weight_decay) and self.weight_decay >= 0, "weight_decay", "≥ 0", self.weight_decay)
        need(0 <= self.warmup <= 1, "warmup", "a fraction of the steps, 0 to 1", self.warmup)
        need(0 <= self.held_out < 1, "validation", "a share in [0, 1)", self.validation)
        need(self.seed >= 0 and self.workers >= 0, "seed and workers", "integers ≥ 0", (self.seed, self.workers))

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


def run(config: Config, out: Path, *, resume: bool = False, overwrite: bool = False) -> dict[str, Any]:
    """Train in the run directory `out`; the trained model, adapters merged, is then in `out`/model."""
    from leafward.engine import session
    from leafward.recipes import _radial_training as training

    if not config.model or config.data is None:
        raise UsageError("--model and --data must say which encoder learns from which captions")
    with session(config.device) as cluster:
        directory = _directory(config, out, cluster, resume, overwrite)
        result = training.train(config, directory, cluster)
        if config.twin:
            result = training.with_twin(result, _twin(config, out / "twin", cluster, resume, overwrite), config)
        _finish(config, result, directory)
    return result


def _directory(config: Config, out: Path, cluster: Cluster, resume: bool, overwrite: bool) -> RunDirectory:
    """The run directory, made by the first rank for all."""
    from leafward.engine import RunDirectory, to_dict

    def create() -> None:
        RunDirectory.create(out, config, resume=resume, overwrite=overwrite, may_change=MAY_CHANGE, recipe="radial")

    cluster.on_main(create)
    return RunDirectory(out, to_dict(config), MAY_CHANGE, writes=cluster.main)


def _twin(config: Config, out: Path, cluster: Cluster, resume: bool, overwrite: bool) -> dict[str, Any]:
    """The result of the same run in the other geometry; one that a stopped run had finished is taken as it is."""
    from leafward.engine import RunDirectory
    from leafward.recipes import _radial_training as training

    if resume and (out / "result.json").is_file():
        return RunDirectory.open(out).result()
    other: Geometry = "lorentz" if config.objective.geometry == "euclidean" else "euclidean"
    twin = replace(config, twin=False, objective=replace(config.objective, geometry=other))
    directory = _directory(twin, out, cluster, resume, overwrite)
    result = training.train(twin, directory, cluster)
    _finish(twin, result, directory)
    return result


def _finish(config: Config, result: dict[str, Any], directory: RunDirectory) -> None:
    """Write result.json and report.html, on the first rank."""
    from leafward.recipes import _radial_report

    if directory.writes:
        directory.finish(result)
        environment = read_record(directory.path / "env.json")
        _radial_report.write(config, result, environment, directory.path)
