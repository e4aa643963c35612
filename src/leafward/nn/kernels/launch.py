"""How the kernels are launched."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import CustomOpDef

from leafward.nn.kernels import INTERPRETED

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


@triton.jit
def single(number):
    """A number that a kernel is given, in float32: from a compiled graph they come in float64."""
    return tl.cast(number, tl.float32)


def wrap_triton(kernel: Any) -> Any:
    """A kernel as an operator launches it: visible to the compiler, which then launches it from its own code.

    Of this name, and called with a kernel's own name, because that is how PyTorch finds the kernels of an operator:
    what it compiled is taken from its cache only as long as their sources are the same.
    """
    return kernel if INTERPRETED else torch.library.wrap_triton(kernel)


def operator(function: Callable[..., Any]) -> CustomOpDef:
    """Makes a function that launches kernels the operator of PyTorch that is called leafward:: and its name.

    In a compiled graph its code is taken apart, so that a launch costs the host no more than those of the compiler's
    own kernels; as one opaque piece it took the host a tenth of a millisecond. It runs with the device of its first
    argument as the current one: Triton launches there, wherever the tensors lie.
    """

    @functools.wraps(function)
    def there(x: Tensor, *others: Any) -> Any:
        with torch.cuda.device_of(x):
            return function(x, *others)

    name = f"leafward::{function.__name__}"
    if INTERPRETED:
        return torch.library.custom_op(name, there, mutates_args=())
    return cast(CustomOpDef, torch.library.triton_op(name, there, mutates_args=()))
