"""The loop's small helpers: running sums, the best evaluation, timing, signals, and the non-finite guard."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from leafward.errors import UsageError, nearest


@dataclass
class Loss:
    """What `Task.loss` returns: sums, so that micro-batches and ranks with unequal counts add up exactly.

    The loss that is minimised is Σ total / Σ count over the whole batch. Each of `metrics` is a sum over the same
    `count` terms as well and is reported as its mean. A count of dimension one is that of each sample.
    """

    total: Tensor
    count: Tensor | int
    metrics: Mapping[str, Tensor] = field(default_factory=dict)

    def counts(self, samples: int) -> Tensor:
        """Terms of each of so many samples (samples): as they are given, else in even parts.

        What is added to the loss for each sample must weigh it by these, or the sum depends on the split of the batch.
        """
        count = torch.as_tensor(self.count, device=self.total.device)
        return count if count.ndim else (count / samples).expand(samples)


class Window:
    """Sums of loss, count, metrics and gradient norm since the last log line, kept on the device."""

    def __init__(self, device: torch.device):
        self.device = device
        self.names: list[str] | None = None
        self.sums: Tensor | None = None
        self.steps = 0

    def vector(self, loss: Loss) -> Tensor:
        """(total, count, *metrics) of one micro-batch in float64; the names must be the same every time."""
        names = list(loss.metrics)
        if self.names is None:
            self.names = names
        elif names != self.names:
            raise UsageError(f"the metrics of the loss changed from {self.names} to {names}; keep the same names")
        count = loss.count.sum() if isinstance(loss.count, Tensor) else loss.count
        return torch.stack([self._scalar(value) for value in (loss.total, count, *loss.metrics.values())])

    def add(self, sums: Tensor, norm: Tensor) -> None:
        """Add the sums (2 + metrics) of one update over all ranks, and its gradient norm."""
        row = torch.cat([sums, norm.double().view(1)])
        self.sums = row if self.sums is None else self.sums + row
        self.steps += 1

    def take(self) -> dict[str, float]:
        """The means since the last call; this is where the host waits for the device."""
        assert self.sums is not None
        assert self.names is not None
        total, count, *metrics, norm = self.sums.tolist()
        count = max(count, 1.0)
        means = {name: value / count for name, value in zip(self.names, metrics, strict=True)}
        values = {"loss": total / count, **means, "grad_norm": norm / self.steps}
        self.sums, self.steps = None, 0
        return values

    def state(self) -> dict[str, Any]:
        return {"names": self.names, "sums": None if self.sums is None else self.sums.tolist(), "steps": self.steps}

    def restore(self, state: Mapping[str, Any]) -> None:
        if state["sums"] is not None:
            values = [math.nan if value is None else value for value in state["sums"]]
            self.sums = torch.tensor(values, dtype=torch.float64, device=self.device)
        self.names, self.steps = state["names"], state["steps"]

    def _scalar(self, value: Tensor | float) -> Tensor:
        if isinstance(value, Tensor):
            return value.detach().to(self.device, torch.float64).view(())
        # Filling on the device needs no copy from the host, and so no waiting.
        return torch.full((), float(value), dtype=torch.float64, device=self.device)


class Best:
    """The best value so far of the monitored number, and for how many evaluations it has stood."""

    def __init__(self, monitor: str | None, mode: str, patience: int | None):
        if mode not in ("min", "max"):
            raise UsageError(f"mode of the monitored number must be min or max, not {mode!r}")
        if patience is not None and monitor is None:
            raise UsageError("patience needs a task with a monitored number; leave it None")
        self.monitor, self.sign, self.patience = monitor, 1.0 if mode == "max" else -1.0, patience
        self.value: float | None = None
        self.step: int | None = None
        self.stale = 0

    @property
    def exhausted(self) -> bool:
        return self.patience is not None and self.stale >= self.patience

    def update(self, step: int, values: Mapping[str, float]) -> bool:
        """Take in an evaluation; True if it is the best so far, which a NaN or an infinity never is."""
        if self.monitor is None:
            return False
        if self.monitor not in values:
            raise UsageError(f"the evaluation gave no {self.monitor!r} to monitor; {nearest(self.monitor, values)}")
        value = values[self.monitor]
        better = math.isfinite(value) and (self.value is None or self.sign * value > self.sign * self.value)
        if better:
            self.value, self.step, self.stale = value, step, 0
        else:
            self.stale += 1
        return better

    def forget(self) -> None:
        """The weights of the best are lost: the best is that of the evaluations to come."""
        self.value, self.step = None, None

    def state(self) -> dict[str, Any]:
        return {"value": self.value, "step": self.step, "stale": self.stale}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.value, self.step, self.stale = state["value"], state["step"], state["stale"]


class Clock:
    """Training time between log lines, without evaluations and checkpoints."""

    def __init__(self, step: int):
        self.step, self.since = step, time.perf_counter()

    def lap(self, step: int) -> tuple[float, int]:
        """Seconds and steps since the last lap."""
        now = time.perf_counter()
        lap = max(now - self.since, 1e-9), step - self.step
        self.step, self.since = step, now
        return lap

    @contextmanager
    def paused(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.since += time.perf_counter() - began


class Signals:
    """While active, SIGTERM and SIGINT are remembered in `number`; a second SIGINT stops at once."""

    def __init__(self) -> None:
        self.number = 0

    def __enter__(self) -> Signals:
        # Python allows handlers in the main thread only; elsewhere the program keeps its own.
        main = threading.current_thread() is threading.main_thread()
        handled = (signal.SIGTERM, signal.SIGINT) if main else ()
        self.before = {number: signal.signal(number, self._remember) for number in handled}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.number == signal.SIGINT == number:
            raise KeyboardInterrupt
        self.number = number


class Guard:
    """Reads each step's (bad, stop) flags `lag` steps late, so that a GPU with lag 1 never waits for the host."""

    def __init__(self, lag: int):
        self.lag = lag
        self.bad: tuple[int, list[Any]] | None = None
        self.stop = False
        self._unread: deque[tuple[int, list[Any], Tensor, torch.cuda.Event | None]] = deque()

    def watch(self, step: int, micro_batches: list[Any], status: Tensor) -> None:
        event = None
        if status.is_cuda:
            status = status.to("cpu", non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self._unread.append((step, micro_batches, status, event))
        self.settle(self.lag)

    def settle(self, leave: int = 0) -> None:
        """Wait until at most `leave` steps are unread; `bad` is then the first bad step and its batch."""
        while len(self._unread) > leave:
            step, micro_batches, status, event = self._unread.popleft()
            if event is not None:
                event.synchronize()
            bad, stop = status.tolist()
            if bad and self.bad is None:
                self.bad = (step, micro_batches)
            self.stop = self.stop or bool(stop)
