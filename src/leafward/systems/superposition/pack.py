"""A pack: models that share their data, in one packed matrix with one optimiser."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from leafward.systems.superposition.optim import Optimiser, rates
from leafward.systems.superposition.sampler import INITIAL, Batch, Stream, generator
from leafward.systems.superposition.step import Layout, Objective

RECENT = 100  # training losses averaged into `train_loss`
EAGER_STEPS = 3  # before a CUDA graph is recorded, so that libraries have set themselves up


@dataclass(frozen=True, slots=True)
class Scores:
    """Losses on fresh data, one entry per model."""

    loss: list[float]
    error: list[float]  # standard error of the loss over batches
    floor: float  # entropy of the targets, below which no cross-entropy goes; 0 for the squared error


class Pack:
    """The packed parameters of several models (in order of width), and how to train and score them."""

    def __init__(
        self,
        stream: Stream,
        widths: Sequence[int],
        *,
        steps: int,
        warmup: int,
        loss: str,
        loss_scale: float,
        optimiser: str,
        lr: Sequence[float],
        bias_lr: Sequence[float],
        decay: Sequence[float],
        sphere: bool,
    ):
        self.stream = stream
        features = len(stream.p)
        self.layout = Layout(widths, stream.device)
        self.columns = self.layout.model_columns()
        packed = torch.zeros(features, self.layout.columns, dtype=stream.dtype)
        for width, columns in zip(widths, self.columns, strict=True):
            packed[:, columns] = _initial(features, width, stream.seed).to(stream.dtype)
        self.packed = packed.to(stream.device)
        self.objective = Objective(self.layout, features, loss, loss_scale)
        self.optimiser = Optimiser(
            self.packed, self.layout, kind=optimiser, lr=lr, bias_lr=bias_lr, decay=decay, sphere=sphere
        )
        self.recent = self.packed.new_zeros(RECENT, len(widths))  # the last training losses, a ring by step
        self._rates = rates(steps, warmup).to(self.packed)
        self._clock = torch.zeros(1, dtype=torch.int64, device=stream.device)  # the step, known to the device
        self._replay: _Replay | None = None

    @property
    def slots(self) -> dict[str, torch.Tensor]:
        """The tensors shaped like the packed parameters that training changes."""
        return {"parameters": self.packed, **self.optimiser.state}

    def train(self, start: int, stop: int) -> None:
        """The steps start…stop−1; on a GPU nothing here waits for the device, but for recording the step once."""
        self._clock.fill_(start)
        for done, batch in enumerate(self.stream.training(start, stop)):
            if self._replay is None and done >= EAGER_STEPS and self._recordable(batch):
                self._replay = _Replay(self._step, batch)
            if self._replay is not None and self._replay.fits(batch):
                self._replay(batch)
            else:
                self._step(batch)

    def _recordable(self, batch: Batch) -> bool:
        # Several tiles would cut the cells at places that differ from batch to batch.
        return self.packed.is_cuda and self.objective.tile_count(batch, self.packed) == 1

    def _step(self, batch: Batch) -> None:
        grad, loss = self.objective.gradient(self.packed, batch)
        self.optimiser.update(self.packed, grad, self._rates.index_select(0, self._clock)[0])
        self.recent.index_copy_(0, self._clock % RECENT, loss[None])
        self._clock += 1

    def evaluate(self, batches: int) -> Scores:
        """The loss of every model on fresh batches."""
        losses, floors = [], []
        for batch in self.stream.fresh(batches):
            losses.append(self.objective.evaluate(self.packed, batch))
            floors.append(-torch.special.xlogy(batch.shares, batch.shares * batch.active).sum().double())
        table = torch.stack(losses)
        error = table.std(0) / math.sqrt(batches) if batches > 1 else torch.full_like(table[0], math.nan)
        floor = float(torch.stack(floors).mean()) if self.objective.loss == "ce" else 0.0
        return Scores(table.mean(0).tolist(), error.tolist(), floor)

    def train_loss(self, step: int) -> list[float]:
        """Mean of the last training losses of each model after `step` steps; NaN before the first."""
        return self.recent[: min(step, RECENT)].double().mean(0).tolist()


class _Replay:
    """A training step as a CUDA graph: one launch in place of some two hundred."""

    def __init__(self, step: Callable[[Batch], None], example: Batch):
        self.batch = example.clone()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            step(self.batch)

    def fits(self, batch: Batch) -> bool:
        """Whether the batch has the recorded shape."""
        return self.batch.like(batch)

    def __call__(self, batch: Batch) -> None:
        self.batch.whole.copy_(batch.whole)
        self.batch.real.copy_(batch.real)
        self.graph.replay()


def _initial(features: int, width: int, seed: int) -> torch.Tensor:
    """[W|b] (n, m+1) with W ~ N(0, 1/m) and b ~ N(0, 1)."""
    rng = generator(seed, INITIAL, width)
    weights = rng.standard_normal((features, width)) / math.sqrt(width)
    return torch.from_numpy(np.column_stack([weights, rng.standard_normal(features)]))
