"""LatHAdapter (arXiv 2508.11176) on cached CLIP features: prompt-learning hosts alone, with the latent hierarchy, and
with its Euclidean twin, under the usual few-shot protocols, beside zero-shot CLIP, CLIP-Adapter and Tip-Adapter.

    leafward train lathadapter --features pets.npz --protocol base-to-new
    leafward train lathadapter --images pets --model openai/clip-vit-base-patch16 --depth 9

The feature file is described in `leafward.tasks.fewshot`. With images, prompts are tokens inside the encoders of the
model, as the papers have them; that takes a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from leafward.errors import UsageError, need
from leafward.files import read_record

SUMMARY = "Few-shot prompt learning on CLIP features: hosts alone, with LatHAdapter, and with its Euclidean twin."
MAY_CHANGE = ("device",)
"""Fields that a resumed run may change."""

HostName = Literal["coop", "maple", "promptsrc", "promptkd"]
Baseline = Literal["zero-shot", "clip-adapter", "tip-adapter"]


@dataclass(frozen=True)
class Config:
    """Data, protocol, methods and training."""

    features: Path | None = None
    """Feature file (.npz or .safetensors) of the data set that is trained on."""
    images: Path | None = None
    """In place of features: labelled images, a folder of class folders or one of the usual data sets."""
    model: str | None = None
    """With images: a directory or hub name of a Hugging Face CLIP model."""
    template: str = "a photo of a {}."
    """With images: the text of a class; its first words are where the tokens begin."""
    targets: tuple[Path, ...] = ()
    """Feature files (with images: folders) of other data sets, for the protocols cross-dataset and domain."""
    protocol: Literal["base-to-new", "few-shot", "cross-dataset", "domain"] = "base-to-new"
    """Which classes and images are trained and scored."""
    shots: tuple[int, ...] = (16,)
    """Training images for each class; several give one training each."""
    seeds: int = 3
    """Trainings with other shots and beginnings; three or more give intervals."""
    seed: int = 0
    """The first of the seeds."""
    hosts: tuple[HostName, ...] = ("coop", "promptsrc")
    """Prompt-learning hosts, each alone and with LatHAdapter on top."""
    baselines: tuple[Baseline, ...] = ("zero-shot", "clip-adapter", "tip-adapter")
    """Methods without prompts."""
    twin: bool = True
    """The Euclidean twin of LatHAdapter, with the same parameters, data order and seeds; --no-twin leaves it out."""
    attributes: tuple[int, ...] = (20,)
    """Number of attributes; of several, the one with the best validation accuracy is taken."""
    c: float = 0.1
    """Curvature −c."""
    refinement: float = 0.1
    """Strength β of the refinement of classes by attributes."""
    margin: float = 0.1
    """Margin of the hierarchy loss."""
    neighbours: int = 3
    """k of the reciprocal nearest neighbours."""
    queue: int = 256
    """Features of earlier batches that serve as negatives."""
    normalise: bool = True
    """Features of unit length before the exponential map; --no-normalise keeps their norms, which are the radii."""
    hierarchy_weight: float = 1.0
    """Weight of the hierarchy losses."""
    tokens: int = 4
    """Context tokens of the prompts."""
    depth: int = 1
    """Depth of the prompts; MaPLe has two more. In a model at most its layers; the papers have 9."""
    epochs: int = 30
    """Passes over the shots, at most `max_steps` steps."""
    max_steps: int = 2000
    """Upper end of the steps of one training."""
    batch: int = 32
    """Images of a batch."""
    lr: float = 1e-3
    """Peak learning rate of AdamW."""
    scale: float = 100.0
    """1/τ of the logits."""
    taxonomy: Path | None = None
    """Taxonomy over the class names (.csv, .json, .txt, wordnet or wordnet:NODE): adds hierarchical metrics."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train."""

    def __post_init__(self) -> None:
        for name in ("seeds", "tokens", "depth", "epochs", "max_steps", "batch", "neighbours"):
            need(getattr(self, name) >= 1, name, "an integer ≥ 1", getattr(self, name))
        for name in ("lr", "scale", "c"):
            value = getattr(self, name)
            need(math.isfinite(value) and value > 0, name, "a positive number", value)
        for name in ("refinement", "margin", "hierarchy_weight"):
            value = getattr(self, name)
            need(math.isfinite(value) and value >= 0, name, "a number ≥ 0", value)
        for name in ("seed", "queue"):
            need(getattr(self, name) >= 0, name, "an integer ≥ 0", getattr(self, name))
        for name in ("shots", "attributes"):
            values = getattr(self, name)
            least = 1 if name == "shots" else 2
            fits = len(values) > 0 and len(set(values)) == len(values) and min(values) >= least
            need(fits, name, f"different integers ≥ {least}", values)
        for name in ("hosts", "baselines"):
            named = getattr(self, name)
            need(len(set(named)) == len(named), name, "different ones", named)
        need(self.template.count("{}") == 1, "template", "a text with {} once, for the class name", self.template)
        need(bool(self.hosts or self.baselines), "hosts", "at least one, or a baseline", self.hosts)


def base_to_new() -> Config:
    """16 shots of the first half of the classes, scored on both halves."""
    return Config()


def few_shot() -> Config:
    """1, 2, 4, 8 and 16 shots of every class."""
    return Config(protocol="few-shot", shots=(1, 2, 4, 8, 16))


def all_hosts() -> Config:
    """Base to new with the four hosts."""
    return Config(hosts=("coop", "maple", "promptsrc", "promptkd"))


PRESETS: dict[str, Callable[[], Config]] = {
    "base-to-new": base_to_new,
    "few-shot": few_shot,
    "all-hosts": all_hosts,
}


def run(config: Config, out: Path, *, resume: bool = False, overwrite: bool = False) -> dict[str, Any]:
    """Train every method on every episode of the protocol in the run directory `out`; returns what result.json holds.

    Trainings that are done are kept: a run that was stopped continues with `resume`.
    """
    from leafward.engine import RunDirectory
    from leafward.recipes import _lathadapter_results as results
    from leafward.recipes import _lathadapter_training as training
    from leafward.recipes._class_taxonomy import class_taxonomy

    if (config.features is None) == (config.images is None):
        missing = "is missing" if config.features is None else "and images exclude each other"
        raise UsageError(
            f"features {missing}: give a .npz or .safetensors file with image and text features, or images and model"
        )
    if config.images is not None and config.model is None:
        raise UsageError("model is missing: images need a Hugging Face CLIP model")
    config = training.lasting_paths(config)  # the run is opened from anywhere
    sets = training.read_sets(config)
    data = sets[0]
    whole = training.episodes(config, sets)
    taxonomy = None if config.taxonomy is None else class_taxonomy(config.taxonomy, *(s.class_names for s in sets))
    directory = RunDirectory.create(
        out, config, resume=resume, overwrite=overwrite, may_change=MAY_CHANGE, recipe="lathadapter"
    )
    frozen = training.episodes(config, training.frozen_sets(sets)) if training.needs_frozen(config) else None
    rows = training.train_all(config, whole, directory.checkpoints / "cells", taxonomy, frozen)
    result = results.summarise(config, data, rows)
    directory.finish(result)
    environment = read_record(directory.path / "env.json")
    results.page(config, data, result, environment).write(directory.report)
    return result
