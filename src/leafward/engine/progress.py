"""Progress for people: a bar on a terminal, now and then a line elsewhere, silence where nobody looks."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, TextIO

LINE_SECONDS = 10.0


class Progress:
    """Context manager around long work of `total` units, with throughput and time left, on stderr.

    >>> with Progress(100, "training") as progress:
    ...     progress.update(10, {"loss": 2.31})
    """

    def __init__(self, total: int, title: str, *, unit: str = "step", start: int = 0, show: bool = True):
        self.total, self.title, self.unit = total, title, unit
        self.start = self.done = start
        self.show = show
        self._stream: TextIO = sys.stderr
        self._bar: Any = None
        self._task: Any = None
        self._began = self._spoke = 0.0

    def __enter__(self) -> Progress:
        self._began = time.monotonic()
        self._spoke = -LINE_SECONDS + self._began
        if self.show and self._stream.isatty():
            self._open_bar()
        return self

    def update(self, done: int, values: Mapping[str, float | str] | None = None) -> None:
        """`done` units are complete in all; `values` are shown beside."""
        self.done, values = done, values or {}
        if not self.show:
            return
        if self._bar is not None:
            self._bar.update(self._task, completed=done, values=describe(values), rate=f"{self.rate:.3g} {self.unit}/s")
        elif time.monotonic() - self._spoke >= LINE_SECONDS or (done >= self.total):
            self._spoke = time.monotonic()
            self._stream.write(self.line(values) + "\n")
            self._stream.flush()

    def line(self, values: Mapping[str, float | str]) -> str:
        """The plain line, for example `training 40/100 step · loss 2.31 · 12.5 step/s · 0:00:05 left`."""
        left = (self.total - self.done) / self.rate if self.rate > 0.0 else None
        parts = [
            f"{self.title} {self.done}/{self.total} {self.unit}",
            describe(values),
            f"{self.rate:.3g} {self.unit}/s",
        ]
        parts.append(f"{duration(left)} left" if left is not None else "")
        return " · ".join(part for part in parts if part)

    @property
    def rate(self) -> float:
        """Units per second since the start."""
        return (self.done - self.start) / max(time.monotonic() - self._began, 1e-9)

    def _open_bar(self) -> None:
        try:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar
        except ImportError:
            return
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[values]}"),
            console=Console(file=self._stream),
        )
        self._task = self._bar.add_task(self.title, total=self.total, completed=self.start, values="", rate="")
        self._bar.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


def describe(values: Mapping[str, float | str]) -> str:
    """`name value` pairs, numbers with four digits."""
    return " · ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in values.items()
    )


def duration(seconds: float) -> str:
    """h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
