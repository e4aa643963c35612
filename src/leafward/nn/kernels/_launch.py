"""How the kernels are launched."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from torch.library import CustomOpDef

ROWS_PER_UNIT = 8
"""Programs per multiprocessor in kernels that go over many rows each."""


def tile(*sizes: int, share: int = 512) -> tuple[list[int], int]:
    """Powers of two that hold `sizes`, and the warps to work on them, each with its `share`: few, because in every sum
    they wait for each other (on an H200 the residual's way back is a third faster with two than with eight)."""
    powers = [triton.next_power_of_2(size) for size in sizes]
    return powers, max(1, min(16, math.prod(powers) // share))


def programs(x: Tensor, rows: int) -> int:
    """How many programs share `rows`, each adding up its own part of a parameter's gradient."""
    units = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1
    return min(rows, ROWS_PER_UNIT * units)


def operator(name: str, schema: str) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Makes a function that launches kernels the operator leafward::NAME of PyTorch.

    It runs with the device of its first argument as the current one: Triton launches there, wherever the tensors lie.
    """

    def define(function: Callable[..., Any]) -> CustomOpDef:
        @functools.wraps(function)
        def there(x: Tensor, *others: Any) -> Any:
            with torch.cuda.device_of(x):
                return function(x, *others)

        return torch.library.custom_op(f"leafward::{name}", there, mutates_args=(), schema=schema)

    return define
