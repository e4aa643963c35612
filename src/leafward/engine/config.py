"""Settings of the training loop and of the optimiser. Imports no torch."""

from __future__ import annotations

from functools import partial
from typing import Literal

from leafward._moved import moved_name
from leafward.config import (
    Count,
    Natural,
    NonNegative,
    Positive,
    Rate,
    Samples,
    Settings,
    Share,
    Workers,
)

TIMEOUT = 1800.0
"""Seconds that a rank waits for the others, where nothing else is said."""


class OptimConfig(Settings, frozen=True):
    """AdamW and its learning-rate schedule."""

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
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the decay after the warm-up."""
    warmup_steps: Natural = 0
    """Steps of linear warm-up."""
    final_ratio: Share = 0.1
    """Learning rate at the end, as a part of the peak."""


class LoopConfig(Settings, frozen=True):
    """How long, how much at once, on what, and how often to look and to save."""

    steps: Count = 1000
    """Optimiser updates in all."""
    batch_size: Samples = 32
    """Samples per update, over all ranks and micro-batches together."""
    micro_batch: Samples | None = None
    """Samples per forward pass on one rank; None means no gradient accumulation."""
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

__getattr__ = partial(moved_name, __name__)
