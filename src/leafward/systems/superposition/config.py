"""The superposition experiment: how the loss of toy models falls with their width, and why.

A grid of models y = ReLU(W Wᵀx + b) over widths m, decays γ and frequency laws ("Superposition Yields Robust Neural
Scaling", 2505.10465) is trained in packs; the claims of the paper that the grid can test are then tested.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from leafward.errors import UsageError, need
from leafward.files import read_record

SUMMARY = "Toy models of superposition: loss against width, geometry, and the claims of the paper with intervals."
MAY_CHANGE = ("workers", "executor", "device")
"""Fields that a resumed run may change."""


@dataclass(frozen=True)
class Config:
    """The grid, the training and the machine. The defaults are the preset `quick`."""

    features: int = 200
    """Number of features n."""
    widths: tuple[int, ...] = (6, 8, 12, 16, 23, 32)
    """Widths m of the models."""
    decays: tuple[float, ...] = (-1.0, -5 / 9, 1 / 3, 5 / 9)
    """Weight decays γ; below 0 they pull the rows of W to unit norm (strong superposition)."""
    laws: tuple[str, ...] = ("power:0", "power:1", "power:1.5", "power:2")
    """Frequency laws: power:α (or only α), exponential:SCALE, linear, uniform, counts:FILE."""
    density: float = 1.0
    """Mean number of active features E."""
    batch: int = 256
    """Rows of a batch."""
    steps: int = 5000
    """Training steps."""
    warmup: float = 0.1
    """Fraction of the steps in which the learning rate rises."""
    seeds: int = 1
    """Replicates of the whole grid; three or more give intervals over seeds."""
    seed: int = 0
    """Seed of the first replicate; the others follow it."""
    lr: float = 0.01
    """Peak learning rate of W."""
    bias_lr: float | None = None
    """Peak learning rate of b; None: as lr."""
    width_rates: bool = False
    """Learning rates that depend on the width, 0.02 (8/m)^¼ for W and 2/m for b, in place of lr and bias_lr."""
    optim: Literal["adamw", "adam", "sgd", "muon"] = "adamw"
    """Optimiser; adam has no decay, so that it trains one model with γ = 0 in place of the list of decays."""
    loss: Literal["mse", "ce"] = "mse"
    """Squared error, or cross-entropy (scaling is then that of the loss above the entropy of the targets)."""
    loss_scale: float = 1.0
    """Factor on the training loss; Adam's ε makes it matter."""
    constraint: Literal["none", "sphere"] = "none"
    """sphere keeps the rows of W on the unit sphere; γ is then 0 in place of the list of decays."""
    corr: str | None = None
    """Correlated features, as block:SIZE:RHO; None: independent."""
    axis: tuple[Literal["steps", "data"], ...] = ()
    """Further axes of scaling: steps (snapshots while training), data (fixed data sets of several sizes)."""
    snapshots: int = 12
    """Snapshots for the axis steps, evenly spaced in the logarithm from the end of the warm-up."""
    data_rows: tuple[int, ...] = (1000, 4000, 16_000, 64_000)
    """Sizes of the data sets for the axis data."""
    eval_rows: int | None = None
    """Fresh rows on which losses are measured; None: 100 batches."""
    paper_ranges: bool = False
    """Fit also over the ranges of widths that the paper chose by eye for its large models."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto takes cuda if there is one."""
    precision: Literal["float32", "tf32", "float64"] = "float32"
    """Precision of training; tf32 needs cuda."""
    workers: int | None = None
    """Processes on a CPU, one thread each; None: one for each core; 0: train in this process."""
    executor: Literal["local", "ray"] = "local"
    """Where those processes run: on this machine, or on a Ray cluster that sees the run directory."""
    pack: int | None = None
    """Models trained together; None: 15 on a CPU, all that share their data on a GPU."""
    checkpoint_every: int = 2000
    """Steps between checkpoints."""

    def __post_init__(self) -> None:
        from leafward.engine.config import check_types

        check_types(self)
        for name in ("widths", "decays", "laws", *(("data_rows",) if "data" in self.axis else ())):
            values = getattr(self, name)
            need(len(values) > 0, name, "a list with at least one entry", values)
            need(len(set(values)) == len(values), name, "a list without repeats", values)
        need(self.features >= 2, "features", "an integer ≥ 2", self.features)
        for width in self.widths:
            need(1 <= width <= self.features, "widths", f"in 1…{self.features} (the features)", width)
        for name in ("batch", "steps", "seeds", "checkpoint_every", "eval_rows", "pack"):
            value = getattr(self, name)
            need(value is None or value >= 1, name, "an integer ≥ 1", value)
        for rows in self.data_rows:
            need(rows >= 1, "data_rows", "integers ≥ 1", rows)
        need(self.snapshots >= 2, "snapshots", "an integer ≥ 2", self.snapshots)
        need(self.seed >= 0, "seed", "an integer ≥ 0", self.seed)
        need(self.workers is None or self.workers >= 0, "workers", "an integer ≥ 0, or None", self.workers)
        need(self.workers != 0 or self.executor == "local", "workers", "an integer ≥ 1 on Ray", self.workers)
        need(0 <= self.warmup <= 1, "warmup", "a fraction of the steps, 0 to 1", self.warmup)
        for name in ("lr", "bias_lr", "density", "loss_scale"):
            value = getattr(self, name)
            need(value is None or (math.isfinite(value) and value > 0), name, "a positive number", value)
        rate = 0.02 if self.width_rates else self.lr
        for decay in self.decays:
            # A step that decays by more than the whole weight overshoots zero (γ > 0) or the sphere (γ < 0).
            fits = math.isfinite(decay) and abs(decay) * rate < 1
            need(fits, "decays", f"finite, with |γ| below 1/lr = {1 / rate:g}", decay)


def quick() -> Config:
    """Two cores, about two minutes: the signs of the paper."""
    return Config()


def paper_small() -> Config:
    """The small models of the paper: 6 widths × 10 decays × 17 exponents, 20,000 steps."""
    return Config(
        features=1000,
        widths=(10, 15, 25, 39, 63, 100),
        decays=tuple(-1 + 2 * k / 9 for k in range(10)),
        laws=tuple(f"power:{k / 8:g}" for k in range(17)),
        batch=2048,
        steps=20_000,
    )


def paper_large() -> Config:
    """The large models of the paper: n = 10,240, widths to 1024, three laws, strong and weak."""
    return Config(
        features=10_240,
        widths=(8, 16, 32, 64, 128, 256, 512, 1024),
        decays=(-1.0, 0.1),
        laws=("power:1.2", "exponential:400", "linear"),
        batch=2048,
        steps=20_000,
        warmup=0.05,
        width_rates=True,
        loss_scale=100.0,
        paper_ranges=True,
    )


PRESETS: dict[str, Callable[[], Config]] = {
    "quick": quick,
    "paper-small": paper_small,
    "paper-large": paper_large,
}


def run(config: Config, out: Path, *, resume: bool = False, overwrite: bool = False) -> dict[str, Any]:
    """Train the grid of `config` in the run directory `out`, test the claims, write figures and report.

    Finished packs and tables are kept: a run that was stopped continues with `resume`. Returns what result.json
    holds. Raises `engine.Interrupted` after SIGTERM or SIGINT, once everything is saved.
    """
    from leafward.engine import RunDirectory
    from leafward.recipes import _superposition_analysis as analysis
    from leafward.recipes import _superposition_packs as packs

    device = _device(config.device)
    if device == "cuda" and config.executor == "ray":
        raise UsageError("executor must be local where cuda trains, in this process; for ray use --device cpu")
    jobs = packs.plan(config, device)
    directory = RunDirectory.create(
        out, config, resume=resume, overwrite=overwrite, may_change=MAY_CHANGE, recipe="superposition"
    )
    trained = packs.train(jobs, directory.path, workers=_workers(config, device), executor=config.executor)
    result = analysis.analyse(config, trained)
    directory.rewind(0)  # an earlier attempt may have come this far
    for record in analysis.curves(config, trained["rows"]):
        directory.log(record.pop("step"), record)
    directory.finish(result)  # before the figures, so that nothing they need can lose it
    missing = _show(config, result, directory.path)
    if missing is not None:
        result["notes"].append(missing)
        directory.finish(result)
    return result


def _show(config: Config, result: dict[str, Any], out: Path) -> str | None:
    """Write figures and report; a note where a package for them is missing."""
    try:
        from leafward.recipes import _superposition_report as report

        report.write(config, result, read_record(out / "env.json"), out)
    except ImportError as error:
        return f"There are no figures and no report.html: the package {error.name!r} is missing."
    return None


def _device(name: str) -> str:
    if name == "cpu":
        return "cpu"
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if name == "cuda":
        raise UsageError("device is cuda, but torch finds no CUDA device here; use cpu or auto")
    return "cpu"


def _workers(config: Config, device: str) -> int:
    """Processes that train; 0: this one."""
    if device == "cuda":
        return 0
    return (os.cpu_count() or 1) if config.workers is None else config.workers
