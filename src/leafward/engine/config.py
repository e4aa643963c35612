"""Settings that every training has: the loop, the optimiser, what is compared. Imports no torch."""

from __future__ import annotations

import math
from functools import partial
from typing import ClassVar, Literal

from leafward._moved import moved_name
from leafward.config import (
    Count,
    Natural,
    NonNegative,
    Positive,
    Rate,
    Samples,
    Seeds,
    Settings,
    Share,
    Workers,
    replace,
)

TIMEOUT = 1800.0
"""Seconds that a rank waits for the others, where nothing else is said."""


class OptimConfig(Settings, frozen=True):
    """AdamW and its learning-rate schedule."""

    RARE: ClassVar[frozenset[str]] = frozenset({"betas", "eps", "schedule", "warmup_ratio", "final_ratio"})

    lr: Positive = 3e-4
    """Peak learning rate."""
    betas: tuple[Rate, Rate] = (0.9, 0.95)
    """Decay rates of the first and second moment."""
    eps: Positive = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NonNegative = 0.1
    """Decoupled weight decay; never applied to norms, biases, scalars and curvature."""
    clip_norm: Positive | None = 1.0
    """Largest global gradient norm; None leaves gradients as they are."""
    schedule: Literal["cosine", "linear", "poly", "step", "constant"] = "cosine"
    """Shape of the decay after the warm-up; poly falls as the power .9 of what is left, step to a tenth after 8/12 and
    again after 11/12 of all steps."""
    warmup_steps: Natural | None = None
    """Steps of linear warm-up; None: as warmup_ratio says, or none."""
    warmup_ratio: Share | None = None
    """Warm-up as a part of all steps; where warmup_steps says otherwise, the shorter of the two."""
    final_ratio: Share = 0.1
    """Learning rate at the end, as a part of the peak."""

    def warmup(self, steps: int) -> int:
        """Steps of warm-up of so many in all."""
        lengths = [] if self.warmup_ratio is None else [round(self.warmup_ratio * steps)]
        return min(lengths if self.warmup_steps is None else [*lengths, self.warmup_steps], default=0)


class LoopConfig(Settings, frozen=True):
    """How long, how much at once, on what, and how often to look and to save."""

    ALTERNATIVES: ClassVar[tuple[tuple[str, str], ...]] = (("steps", "epochs"),)
    RARE: ClassVar[frozenset[str]] = frozenset(
        {
            "checkpoint_activations",
            "checkpoint_every",
            "log_every",
            "keep_last",
            "ema",
            "patience",
            "strategy",
            "timeout",
        }
    )

    steps: Count = 1000
    """Optimiser updates in all."""
    epochs: Positive | None = None
    """Passes over the data, in place of steps."""
    batch_size: Samples = 32
    """Samples per update, over all ranks and micro-batches together."""
    micro_batch: Samples | None = None
    """Samples per forward pass on one rank, at most; None means no gradient accumulation."""
    seed: Natural = 0
    """Initialisation, data order and sampling follow from it."""
    precision: Literal["float32", "bfloat16", "float64"] = "float32"
    """bfloat16 is autocast of the forward pass over float32 parameters; float64 computes all in float64, for proofs."""
    compile: bool = False
    """Compile the model with torch.compile."""
    checkpoint_activations: bool = False
    """Recompute the blocks' activations in the backward pass to save memory."""
    eval_every: Count | None = None
    """Steps between evaluations; None evaluates after the last step only."""
    checkpoint_every: Count = 500
    """Steps between checkpoints; there is always one after the last step."""
    log_every: Count = 10
    """Steps that one line of training metrics averages over."""
    keep_last: Count = 2
    """Newest checkpoints kept, beside the best of each."""
    ema: Rate | None = None
    """Decay of the average of the weights that is evaluated and published; None for none."""
    patience: Count | None = None
    """Stop after this many evaluations without improvement; None never stops early."""
    workers: Workers = 0
    """Processes that load data; 0 loads in the training process."""
    strategy: Literal["auto", "ddp", "fsdp"] = "auto"
    """How several ranks share the work; auto means ddp."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto takes cuda if there is one."""
    timeout: Positive = TIMEOUT
    """Seconds that a rank waits for the others before it stops: one of them is lost."""

    def over(self, samples: int) -> LoopConfig:
        """The same loop in steps, over a data set of so many samples."""
        if self.epochs is None:
            return self
        return replace(self, steps=max(1, math.ceil(self.epochs * samples / self.batch_size)))

    @property
    def length(self) -> str:
        """In words."""
        count, unit = (self.steps, "step") if self.epochs is None else (self.epochs, "epoch")
        return f"{int(count) if count == int(count) else count:,} {unit}{'s' * (count != 1)}"


class Arms(Settings, frozen=True):
    """What is trained beside one model: its twin, more seeds, and variants of the settings, each a run of its own."""

    RARE: ClassVar[frozenset[str]] = frozenset({"jobs", "executor"})

    seeds: Seeds = 1
    """Replicates with neighbouring seeds; two or more give intervals over seeds."""
    twin: bool = False
    """Train the other geometry as well, on the same data in the same order, and report the paired difference."""
    ablate: str | None = None
    """An ablation of the paper: its variants are trained beside each other."""
    grid: tuple[str, ...] = ()
    """Values to try, as optim.lr=1e-3,3e-3,1e-2; of several settings, all combinations."""
    jobs: Count = 1
    """Variants trained at once, each in a process of its own; 1: one after the other, in this process."""
    executor: Literal["local", "ray"] = "local"
    """Where those processes run: on this machine, or on a Ray cluster that sees the run directory."""


ONE_ARM = Arms()
"""One model."""


CHANGEABLE_LOOP = frozenset(
    {
        "steps",
        "micro_batch",
        "compile",
        "checkpoint_activations",
        "checkpoint_every",
        "keep_last",
        "workers",
        "strategy",
        "device",
    }
)
"""Fields of `LoopConfig` that a resumed run may change: they move work about or set how far it goes."""
MAY_CHANGE = (*(f"loop.{name}" for name in sorted(CHANGEABLE_LOOP - {"steps"})), "arms.jobs", "arms.executor")
"""Settings that a resumed run of any training may change. Not the steps: the learning rate's schedule ends there."""

__getattr__ = partial(moved_name, __name__)
