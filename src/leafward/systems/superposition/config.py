"""The superposition experiment: how the loss of toy models falls with their width, and why.

A grid of models y = ReLU(W Wᵀx + b) over widths m, decays γ and frequency laws ("Superposition Yields Robust Neural
Scaling", 2505.10465) is trained in packs; the claims of the paper that the grid can test are then tested.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from leafward.config import Count, Natural, Positive, Seeds, Settings, Several, Share, Some, Workers
from leafward.errors import need

SUMMARY = "Toy models of superposition: loss against width, geometry, and the claims of the paper with intervals."
MAY_CHANGE = ("workers", "executor", "device")
"""Fields that a resumed run may change."""


class Config(Settings, frozen=True):
    """The grid, the training and the machine. The defaults are the preset `quick`."""

    features: Several = 200
    """Number of features n."""
    widths: Some[Count] = (6, 8, 12, 16, 23, 32)
    """Widths m of the models."""
    decays: Some[float] = (-1.0, -5 / 9, 1 / 3, 5 / 9)
    """Weight decays γ; below 0 they pull the rows of W to unit norm (strong superposition)."""
    laws: Some[str] = ("power:0", "power:1", "power:1.5", "power:2")
    """Frequency laws: power:α (or only α), exponential:SCALE, linear, uniform, counts:FILE."""
    density: Positive = 1.0
    """Mean number of active features E."""
    batch: Count = 256
    """Rows of a batch."""
    steps: Count = 5000
    """Training steps."""
    warmup: Share = 0.1
    """Fraction of the steps in which the learning rate rises."""
    seeds: Seeds = 1
    """Replicates of the whole grid; three or more give intervals over seeds."""
    seed: Natural = 0
    """Seed of the first replicate; the others follow it."""
    lr: Positive = 0.01
    """Peak learning rate of W."""
    bias_lr: Positive | None = None
    """Peak learning rate of b; None: as lr."""
    width_rates: bool = False
    """Learning rates that depend on the width, 0.02 (8/m)^¼ for W and 2/m for b, in place of lr and bias_lr."""
    optim: Literal["adamw", "adam", "sgd", "muon"] = "adamw"
    """Optimiser; adam has no decay, so that it trains one model with γ = 0 in place of the list of decays."""
    loss: Literal["mse", "ce"] = "mse"
    """Squared error, or cross-entropy (scaling is then that of the loss above the entropy of the targets)."""
    loss_scale: Positive = 1.0
    """Factor on the training loss; Adam's ε makes it matter."""
    constraint: Literal["none", "sphere"] = "none"
    """sphere keeps the rows of W on the unit sphere; γ is then 0 in place of the list of decays."""
    corr: str | None = None
    """Correlated features, as block:SIZE:RHO; None: independent."""
    axis: tuple[Literal["steps", "data"], ...] = ()
    """Further axes of scaling: steps (snapshots while training), data (fixed data sets of several sizes)."""
    snapshots: Several = 12
    """Snapshots for the axis steps, evenly spaced in the logarithm from the end of the warm-up."""
    data_rows: tuple[Count, ...] = (1000, 4000, 16_000, 64_000)
    """Sizes of the data sets for the axis data."""
    eval_rows: Count | None = None
    """Fresh rows on which losses are measured; None: 100 batches."""
    paper_ranges: bool = False
    """Fit also over the ranges of widths that the paper chose by eye for its large models."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto takes cuda if there is one."""
    precision: Literal["float32", "tf32", "float64"] = "float32"
    """Precision of training; tf32 needs cuda."""
    workers: Workers | None = None
    """Processes on a CPU, one thread each; None: one for each core; 0: train in this process."""
    executor: Literal["local", "ray"] = "local"
    """Where those processes run: on this machine, or on a Ray cluster that sees the run directory."""
    pack: Count | None = None
    """Models trained together; None: 15 on a CPU, all that share their data on a GPU."""
    checkpoint_every: Count = 2000
    """Steps between checkpoints."""

    def conditions(self) -> None:
        for name in ("widths", "decays", "laws", *(("data_rows",) if "data" in self.axis else ())):
            values = getattr(self, name)
            need(0 < len(values) == len(set(values)), name, "a list of at least one, without repeats", values)
        for width in self.widths:
            need(width <= self.features, "widths", f"in 1…{self.features} (the features)", width)
        need(self.workers != 0 or self.executor == "local", "workers", "an integer ≥ 1 on Ray", self.workers)
        rate = 0.02 if self.width_rates else self.lr
        for decay in self.decays:
            # A step that decays by more than the whole weight overshoots zero (γ > 0) or the sphere (γ < 0).
            need(abs(decay) * rate < 1, "decays", f"numbers with |γ| below 1/lr = {1 / rate:g}", decay)


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
