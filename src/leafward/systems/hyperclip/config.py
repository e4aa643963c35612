"""HyperCLIP's block-diagonal adapter on a folder of labelled images, beside LoRA, OFT, attention-only and full
fine-tuning under the same budget, with the radius of the features before and after.

    leafward train hyperclip --images photos --model openai/clip-vit-base-patch16 --compare --seeds 3
    leafward export runs/hyperclip-quick --to adapted --merged

The loss is the cross-entropy of the images over the class texts; the score may be the cosine of the paper, the Lorentz
distance, or the cosine with a radius term (see `leafward.adapters.scores`).
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from leafward.errors import UsageError, need
from leafward.files import read_record

SUMMARY = (
    "Block-diagonal adapters in a CLIP model, on labelled images; beside LoRA, OFT and fine-tuning with --compare."
)
MAY_CHANGE = ("device", "workers")
"""Fields that a resumed run may change."""

MethodName = Literal["block-scale", "orthogonal", "lora", "attention", "full", "frozen"]


@dataclass(frozen=True)
class Config:
    """Data, model, adapter and training."""

    images: Path | None = None
    """A folder of class folders, or one of the usual data sets (see leafward data features)."""
    model: str | None = None
    """A directory or hub name of CLIP or SigLIP, or open_clip:NAME@WEIGHTS."""
    method: MethodName = "block-scale"
    """What is trained; orthogonal is OFT, attention trains q, k and v themselves, frozen nothing."""
    compare: bool = False
    """Train every method under the same budget."""
    block_size: int = 128
    """Width of the blocks."""
    constraint: Literal["free", "diagonal", "orthogonal", "orthogonal_diagonal"] = "free"
    """Constraint on the blocks of block-scale."""
    encoder: Literal["both", "image", "text"] = "both"
    """Which encoder is adapted."""
    rank: int | None = None
    """Rank of LoRA; None: the one with about as many parameters as the blocks."""
    score: Literal["cosine", "lorentz", "cosine+radius"] = "cosine"
    """How images and texts are compared: the paper's cosine, or an extension in which the radius counts."""
    twin: bool = False
    """Train also with the cosine, where score is another: the twin without hyperbolic geometry."""
    c: float = 0.1
    """Curvature −c of the Lorentz score."""
    radius_weight: float = 0.1
    """Weight of the radius term."""
    scale: float = 100.0
    """1/τ of the logits."""
    template: str = "a photo of a {}."
    """The text of a class; {} is its name."""
    shots: int | None = None
    """Training images for each class; None: all of the training part."""
    steps: int = 200
    """Training steps."""
    batch: int = 32
    """Images of a batch."""
    lr: float = 1e-4
    """Peak learning rate of adapters; attention and full have a tenth of it."""
    weight_decay: float = 1e-4
    """Weight decay; of an adapter it pulls to the identity."""
    seeds: int = 1
    """Trainings of each method with other shots, data order and beginnings; two or more give intervals."""
    seed: int = 0
    """The first of the seeds; the adapter that is kept is of this one."""
    workers: int = 0
    """Processes that load images."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train."""

    def __post_init__(self) -> None:
        for name in ("block_size", "steps", "batch", "seeds"):
            need(getattr(self, name) >= 1, name, "an integer ≥ 1", getattr(self, name))
        for name in ("seed", "workers"):
            need(getattr(self, name) >= 0, name, "an integer ≥ 0", getattr(self, name))
        for name in ("rank", "shots"):
            value = getattr(self, name)
            need(value is None or value >= 1, name, "an integer ≥ 1, or None", value)
        for name in ("lr", "scale", "c"):
            value = getattr(self, name)
            need(math.isfinite(value) and value > 0, name, "a positive number", value)
        for name in ("weight_decay", "radius_weight"):
            value = getattr(self, name)
            need(math.isfinite(value) and value >= 0, name, "a number ≥ 0", value)
        need(self.template.count("{}") == 1, "template", "a text with {} once, for the class name", self.template)


def quick() -> Config:
    """16 shots, 200 steps."""
    return Config(shots=16)


def full_data() -> Config:
    """All training images, 2,000 steps."""
    return Config(steps=2000)


PRESETS: dict[str, Callable[[], Config]] = {"quick": quick, "full-data": full_data}


def run(config: Config, out: Path, *, resume: bool = False, overwrite: bool = False) -> dict[str, Any]:
    """Train one method, or all of them, with every seed in the run directory `out`.

    What the chosen method learned with the first seed goes to `out`/adapter, or, where weights of the model itself
    were trained, to `out`/model. Trainings that are done are kept: a run that was stopped continues with `resume`.
    """
    from leafward.adapters.surface import lasting
    from leafward.engine import RunDirectory
    from leafward.recipes import _hyperclip_training as training
    from leafward.recipes._hyperclip_report import page, summarise

    if config.images is None or config.model is None:
        missing = "images" if config.images is None else "model"
        raise UsageError(f"{missing} is missing: the recipe needs --images FOLDER and --model NAME")
    config = replace(config, images=config.images.resolve(), model=lasting(config.model))
    trials = [replace(config, seed=config.seed + place) for place in range(config.seeds)]
    data = [training.read(trial) for trial in trials]
    directory = RunDirectory.create(
        out, config, resume=resume, overwrite=overwrite, may_change=MAY_CHANGE, recipe="hyperclip"
    )
    if overwrite:  # an adapter that another method left here
        shutil.rmtree(directory.path / "adapter", ignore_errors=True)
    rows = [
        training.train(trial, each, images, directory, keep=trial.seed == config.seed)
        for each in training.methods(config)
        for trial, images in zip(trials, data, strict=True)
    ]
    result = summarise(config, data[0], rows)
    directory.finish(result)
    environment = read_record(directory.path / "env.json")
    page(config, result, environment).write(directory.report)
    return result
