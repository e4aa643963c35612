"""Open-vocabulary segmentation with HyperCLIP's adapter: dense CLIP features, a cost volume, CAT-Seg's aggregation.

leafward train segmenter --data street --model openai/clip-vit-base-patch16
leafward explain runs/segmenter-quick photo.jpg --words cat grass sky
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

SUMMARY = "Open-vocabulary segmentation: a CLIP model with block-diagonal adapters and cost aggregation."
MAY_CHANGE = ("check", "device", "workers")
"""Fields that a resumed run may change."""


@dataclass(frozen=True)
class Config:
    """Data, model, adapter and training."""

    data: Path | None = None
    """Scenes: images/ and masks/ with classes.txt, ADE20K's layout, or VOC's (see leafward.tasks.segmentation)."""
    ignore: int | None = 255
    """Number of mask pixels that do not count; 0 for ADE20K-150, whose classes begin at 1; 65535 for ADE20K-847."""
    model: str | None = None
    """A directory or hub name of a Hugging Face CLIP model."""
    method: Literal["block-scale", "orthogonal", "lora", "attention", "full", "frozen"] = "block-scale"
    """What is trained in CLIP beside the decoder; orthogonal is OFT, attention trains q, k and v themselves."""
    compare: bool = False
    """Train every method under the same budget; what the one named by method learned is kept."""
    block_size: int = 128
    """Width of the blocks."""
    constraint: Literal["free", "diagonal", "orthogonal", "orthogonal_diagonal"] = "free"
    """Constraint on the blocks of block-scale."""
    encoder: Literal["both", "image", "text"] = "both"
    """Which encoder is adapted."""
    rank: int | None = None
    """Rank of LoRA; None: the one with about as many parameters as the blocks."""
    score: Literal["cosine", "lorentz", "cosine+radius"] = "cosine"
    """What the cost volume holds: the paper's cosine, or an extension in which the radius counts."""
    c: float = 0.1
    """Curvature −c of the Lorentz score."""
    radius_weight: float = 0.1
    """Weight of the radius term."""
    size: int = 384
    """Side of crops and windows in pixels, a multiple of the patch size."""
    channels: int = 128
    """Channels of the decoder."""
    window: int = 12
    """Side of the windows of spatial attention, in patches."""
    templates: tuple[str, ...] = ("a photo of a {} in the scene.",)
    """Texts of a class; their features are averaged."""
    steps: int = 2000
    """Training steps."""
    batch: int = 4
    """Crops of a batch."""
    lr: float = 2e-4
    """Peak learning rate of the decoder."""
    clip_lr_ratio: float = 0.075
    """Learning rate of what is trained in CLIP, as a part of lr; the default is the authors'."""
    weight_decay: float = 1e-4
    """Weight decay; of an adapter it pulls to the identity."""
    most_scored: int | None = None
    """Score only so many held-out scenes; None: all."""
    check: bool = True
    """A look at every image and mask before training; --no-check goes without."""
    seed: int = 0
    """Seed of crops, data order and beginnings."""
    workers: int = 0
    """Processes that load images."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train."""

    def __post_init__(self) -> None:
        for name in ("block_size", "size", "window", "steps", "batch"):
            need(getattr(self, name) >= 1, name, "an integer ≥ 1", getattr(self, name))
        need(self.channels >= 16 and self.channels % 16 == 0, "channels", "a multiple of 16", self.channels)
        for name in ("rank", "most_scored"):
            value = getattr(self, name)
            need(value is None or value >= 1, name, "an integer ≥ 1, or None", value)
        for name in ("lr", "clip_lr_ratio", "c"):
            value = getattr(self, name)
            need(math.isfinite(value) and value > 0, name, "a positive number", value)
        for name in ("weight_decay", "radius_weight", "seed", "workers"):
            need(getattr(self, name) >= 0, name, "a number ≥ 0", getattr(self, name))


def quick() -> Config:
    """2,000 steps of 4 crops."""
    return Config()


def paper() -> Config:
    """The paper's length: 80,000 steps."""
    return Config(steps=80_000)


PRESETS: dict[str, Callable[[], Config]] = {"quick": quick, "paper": paper}


def run(config: Config, out: Path, *, resume: bool = False, overwrite: bool = False) -> dict[str, Any]:
    """Train in the run directory `out`; returns what result.json holds.

    decoder/ and adapter/ hold what was learned; where weights of CLIP itself were trained, model/ does.
    """
    from leafward.adapters.surface import lasting
    from leafward.engine import RunDirectory
    from leafward.recipes import _segmenter as parts
    from leafward.recipes import _segmenter_training as training
    from leafward.recipes._devices import device_of
    from leafward.tasks.segmentation import load_scenes

    if config.data is None or config.model is None:
        missing = "data" if config.data is None else "model"
        raise UsageError(f"{missing} is missing: the recipe needs --data FOLDER and --model NAME")
    data = config.data.resolve()  # the run is opened from anywhere
    config = replace(config, data=data, model=lasting(config.model))
    scenes = load_scenes(data, config.ignore, seed=config.seed)
    model = parts.build(config)
    if config.check:
        training.task(config, scenes, model).check()
    directory = RunDirectory.create(
        out, config, resume=resume, overwrite=overwrite, may_change=MAY_CHANGE, recipe="segmenter"
    )
    if overwrite:  # an adapter that another method left here
        shutil.rmtree(directory.path / parts.ADAPTER, ignore_errors=True)
    if config.compare:
        del model  # every method begins with a fresh one
        rows = training.compare(config, scenes, directory)
        model = parts.open_model(config, directory.path).to(device_of(config.device))
    else:
        rows = [training.train(config, scenes, model, directory)]
        parts.save(config, model, directory.path)
    result = parts.summarise(config, scenes, rows)
    directory.finish(result)
    environment = read_record(directory.path / "env.json")
    parts.page(config, result, environment, parts.drawn(model, scenes, config.size)).write(directory.report)
    return result
