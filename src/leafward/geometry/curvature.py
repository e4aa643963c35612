"""Curvature as a parameter that is learned safely."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn


class Curvature(nn.Module):
    """A learned curvature c = low · (high/low)^sigmoid(θ): log space, never outside its bounds, never stuck.

    A hard clamp has no gradient outside its range, so a curvature that ran into it could not come back. θ stays
    in float32 (or better) when the module around it is cast to a half-precision type, and it has no dimensions, so the
    usual rule "no weight decay below two dimensions" leaves it alone.
    """

    def __init__(self, value: float = 1.0, low: float = 0.1, high: float = 10.0, trainable: bool = True) -> None:
        super().__init__()
        if not (0.0 < low < high < math.inf):
            raise ValueError(f"bounds must satisfy 0 < low < high < inf, got low={low}, high={high}")
        if not low < value < high:
            raise ValueError(f"value must lie strictly between low={low} and high={high}, got {value}")
        self.low, self.high = float(low), float(high)
        share = math.log(value / low) / math.log(high / low)
        self.theta = nn.Parameter(torch.tensor(math.log(share / (1.0 - share))), requires_grad=trainable)

    def forward(self) -> Tensor:
        """The current c, a tensor without dimensions."""
        return self.low * torch.exp(math.log(self.high / self.low) * torch.sigmoid(self.theta))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Curvature:
        def keep_wide(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype.itemsize >= 4 else tensor.to(moved.device)

        super()._apply(keep_wide, recurse)
        return self

    def extra_repr(self) -> str:
        return f"c={self().item():.4g}, low={self.low:g}, high={self.high:g}"


def checked(c: float | Curvature) -> float | Curvature:
    """`c` as a manifold keeps it; what is not a curvature is refused. (The pure functions also take tensors.)"""
    if isinstance(c, Curvature):
        return c
    if isinstance(c, bool) or not isinstance(c, (int, float)) or not 0.0 < c < math.inf:
        raise ValueError(f"c must be a positive finite number or a Curvature, got {c!r}")
    return float(c)
