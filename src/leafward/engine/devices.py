"""The device and the type that a recipe's settings mean, for work outside the engine's loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from leafward.engine.distributed import _TORCHRUN, _device, _integer


def device_of(name: str) -> torch.device:
    """The device of "auto", "cpu" or "cuda" for this rank; one that is not there is refused."""
    return _device(name, _integer("LOCAL_RANK", _TORCHRUN["LOCAL_RANK"]))


def type_of(precision: str) -> torch.dtype | None:
    """What weights and data are converted to: float64 where that is asked for; None leaves them as they are."""
    return torch.float64 if precision == "float64" else None


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Compute with so many threads on the CPU."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
