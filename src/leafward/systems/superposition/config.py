"""The superposition experiment: how the loss of toy models falls with their width, and why.

A grid of models y = ReLU(W Wᵀx + b) over widths m, decays γ and frequency laws ("Superposition Yields Robust Neural
Scaling", 2505.10465) is trained in packs; the claims of the paper that the grid can test are then tested.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal

from leafward.config import Count, Positive, Settings, Several, Share, Some, Workers
from leafward.engine.config import Arms, LoopConfig
from leafward.errors import need

SUMMARY = "Toy models of superposition: loss against width, geometry, and the claims of the paper with intervals."
MAY_CHANGE = ("processes", "executor")
"""Fields that a resumed run may change, beside those of every training."""
NOT_OF_A_FLEET = {
    "epochs": "None, as a fleet draws new data in every step",
    "micro_batch": "None, as the batch of a fleet is not split",
    "compile": "off, as the steps of a fleet are no graph that torch.compile could see",
    "checkpoint_activations": "off, as toy models have no blocks to recompute",
    "eval_every": "None, as a fleet is measured at its snapshots (--axis steps --snapshots N)",
    "log_every": "left out, as a fleet is logged at its snapshots (--axis steps --snapshots N)",
    "keep_last": "left out, as a pack keeps one checkpoint",
    "ema": "None, as a fleet keeps no average of its weights",
    "patience": "None, as all models of a fleet train for the same steps",
    "workers": "0, as the processes that train (--processes) draw their own data",
    "strategy": "auto, as a fleet is dealt to processes in packs and not to ranks",
}
"""Fields of every loop that a fleet's does not have -> what they must be, and why."""


class FleetLoop(LoopConfig, frozen=True):
    """How long, how much at once, on what, and how often to save."""

    RARE: ClassVar[frozenset[str]] = LoopConfig.RARE.union(NOT_OF_A_FLEET)

    precision: Literal["float32", "tf32", "float64"] = "float32"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Precision of training; tf32 needs cuda."""

    def conditions(self) -> None:
        for name, allowed in NOT_OF_A_FLEET.items():
            value = getattr(self, name)
            need(value == getattr(LoopConfig(), name), name, allowed, value)


class FleetOptim(Settings, frozen=True):
    """The optimiser of all models, and their learning rates; the decays are an axis of the grid."""

    MAIN: ClassVar[str] = "name"

    name: Literal["adamw", "adam", "sgd", "muon"] = "adamw"
    """Optimiser; adam has no decay, so that it trains one model with γ = 0 in place of the list of decays."""
    lr: Positive = 0.01
    """Peak learning rate of W."""
    bias_lr: Positive | None = None
    """Peak learning rate of b; None: as lr."""
    width_rates: bool = False
    """Learning rates that depend on the width, 0.02 (8/m)^¼ for W and 2/m for b, in place of lr and bias_lr."""
    warmup_ratio: Share = 0.1
    """Part of the steps in which the learning rate rises; it then falls along a cosine to 5 % of its peak."""


class Config(Settings, frozen=True):
    """The grid, the training and the machine. The defaults are the preset `quick`."""

    EARLIER: ClassVar[dict[str, str]] = {
        "batch": "loop.batch_size",
        "warmup": "optim.warmup_ratio",
        "workers": "processes",
    }

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
    processes: Workers | None = None
    """Processes that train on a CPU, one thread each; None: one for each core; 0: train in this process."""
    executor: Literal["local", "ray"] = "local"
    """Where those processes run: on this machine, or on a Ray cluster that sees the run directory."""
    pack: Count | None = None
    """Models trained together; None: 15 on a CPU, all that share their data on a GPU."""
    arms: Arms = Arms()
    """Seeds are replicates of the whole grid; three or more give intervals over seeds."""
    loop: FleetLoop = FleetLoop(steps=5000, batch_size=256, checkpoint_every=2000)
    optim: FleetOptim = FleetOptim()

    def conditions(self) -> None:
        for name in ("widths", "decays", "laws", *(("data_rows",) if "data" in self.axis else ())):
            values = getattr(self, name)
            need(0 < len(values) == len(set(values)), name, "a list of at least one, without repeats", values)
        for width in self.widths:
            need(width <= self.features, "widths", f"in 1…{self.features} (the features)", width)
        need(self.processes != 0 or self.executor == "local", "processes", "an integer ≥ 1 on Ray", self.processes)
        need(not self.arms.twin, "arms.twin", "off, as a fleet has no geometry and so no twin", self.arms.twin)
        rate = 0.02 if self.optim.width_rates else self.optim.lr
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
        loop=FleetLoop(steps=20_000, batch_size=2048, checkpoint_every=2000),
    )


def paper_large() -> Config:
    """The large models of the paper: n = 10,240, widths to 1024, three laws, strong and weak."""
    return Config(
        features=10_240,
        widths=(8, 16, 32, 64, 128, 256, 512, 1024),
        decays=(-1.0, 0.1),
        laws=("power:1.2", "exponential:400", "linear"),
        loop=FleetLoop(steps=20_000, batch_size=2048, checkpoint_every=2000),
        optim=FleetOptim(width_rates=True, warmup_ratio=0.05),
        loss_scale=100.0,
        paper_ranges=True,
    )


PRESETS: dict[str, Callable[[], Config]] = {
    "quick": quick,
    "paper-small": paper_small,
    "paper-large": paper_large,
}
ABLATIONS: dict[str, dict[str, dict[str, Any]]] = {
    "density": {f"E={density:g}": {"density": density} for density in (1.0, 2.0, 3.0, 4.5, 5.8)},
    "loss": {name: {"loss": name} for name in ("mse", "ce")},
    "optimiser": {name: {"optim.name": name} for name in ("adamw", "adam", "sgd", "muon")},
}
