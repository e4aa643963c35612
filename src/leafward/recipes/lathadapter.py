"""LatHAdapter (arXiv 2508.11176) on cached CLIP features: prompt-learning hosts alone, with the latent hierarchy, and
with its Euclidean twin, under the usual few-shot protocols, beside zero-shot CLIP, CLIP-Adapter and Tip-Adapter.

    leafward train lathadapter --features pets.npz --protocol base-to-new

The feature file is described in `leafward.tasks.fewshot`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from leafward.errors import UsageError, need

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
    targets: tuple[Path, ...] = ()
    """Feature files of other data sets, for the protocols cross-dataset and domain."""
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
    """Train also the Euclidean twin of LatHAdapter, with the same parameters, data order and seeds."""
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
    """Unit features before the exponential map; without it the norm is the radius."""
    hierarchy_weight: float = 1.0
    """Weight of the hierarchy losses."""
    tokens: int = 4
    """Context tokens of the prompts."""
    depth: int = 1
    """Depth of the prompts; MaPLe has two more."""
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
    """Taxonomy over the class names (.csv, .json or .txt): adds hierarchical metrics."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train."""

    def __post_init__(self) -> None:
        for name in ("seeds", "tokens", "depth", "epochs", "max_steps", "batch", "neighbours"):
            need(getattr(self, name) >= 1, name, "an integer ≥ 1", getattr(self, name))
        for name in ("lr", "scale", "c"):
            value = getattr(self, name)
            need(math.isfinite(value) and value > 0, name, "a positive number", value)
        need(self.seed >= 0, "seed", "an integer ≥ 0", self.seed)
        for name in ("shots", "attributes"):
            values = getattr(self, name)
            least = 1 if name == "shots" else 2
            fits = len(values) > 0 and len(set(values)) == len(values) and min(values) >= least
            need(fits, name, f"different integers ≥ {least}", values)
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
    from leafward.tasks import fewshot

    if config.features is None:
        raise UsageError("features is missing: a .npz or .safetensors file with image and text features")
    data = fewshot.read_features(config.features)
    targets = [fewshot.read_features(path) for path in config.targets]
    seeds = range(config.seed, config.seed + config.seeds)
    episodes = fewshot.episodes(config.protocol, data, targets, config.shots, seeds)
    taxonomy = results.read_taxonomy(config.taxonomy, data.class_names)
    directory = RunDirectory.create(
        out, config, resume=resume, overwrite=overwrite, may_change=MAY_CHANGE, recipe="lathadapter"
    )
    rows = training.train_all(config, episodes, directory.checkpoints / "cells", taxonomy)
    result = results.summarise(config, data, rows)
    directory.finish(result)
    environment = json.loads((directory.path / "env.json").read_text(encoding="utf-8"))
    results.page(config, data, result, environment).write(directory.report)
    return result
