"""HoPE: rotary positions on the space part. A rotation keeps the norm, hence the time coordinate."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from leafward.errors import UsageError, nearest, need
from leafward.nn.space import positive

KINDS = ("linear", "yarn")
Table = tuple[Tensor, Tensor]
"""cos and sin of the angles, each (..., T, dim/2)."""


@dataclass(frozen=True)
class Stretch:
    """How to reach beyond the trained context: `factor` times the `trained` length.

    "linear" divides all positions by the factor (position interpolation). "yarn" (Peng et al. 2023) leaves pairs
    that turn more than `fast` times within the trained length alone, divides those below `slow` turns, blends
    between, and sharpens attention by `sharpness`. That factor goes onto the score: on the rotated vectors,
    where YaRN puts it, it would move points off their radius.
    """

    factor: float
    trained: int
    kind: str = "yarn"
    fast: float = 32.0
    slow: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(f"kind is {self.kind!r}; {nearest(self.kind, KINDS)}")
        need(1.0 <= self.factor < math.inf, "factor", "at least 1 and finite", self.factor)
        positive(trained=self.trained)
        need(self.fast > self.slow > 0.0, "fast and slow", "numbers with fast > slow > 0", (self.fast, self.slow))

    @property
    def sharpness(self) -> float:
        """Factor on attention scores: (0.1 ln factor + 1)² for YaRN, else 1."""
        return (0.1 * math.log(self.factor) + 1.0) ** 2 if self.kind == "yarn" else 1.0


@dataclass(frozen=True)
class HoPE:
    """Angles of a rotary encoding over the first `dim` space coordinates (HELM's HoPE), in pairs (0,1), (2,3), ...

    Equation 6 of docs/helm.md. It has no buffers, so no cast of the model can damage it: angles are worked out in
    float64 from whole positions.
    """

    dim: int
    theta: float = 10_000.0
    stretch: Stretch | None = None

    def __post_init__(self) -> None:
        if self.dim < 2 or self.dim % 2:
            raise UsageError(f"dim must be even and at least 2, got {self.dim}")
        need(1.0 < self.theta < math.inf, "theta", "above 1 and finite", self.theta)

    @property
    def sharpness(self) -> float:
        return 1.0 if self.stretch is None else self.stretch.sharpness

    def frequencies(self, device: torch.device | None = None) -> Tensor:
        """Radians per position of each pair: (dim/2,) float64."""
        pair = torch.arange(0, self.dim, 2, dtype=torch.float64, device=device)
        frequency = torch.exp(pair * (-math.log(self.theta) / self.dim))
        if self.stretch is None:
            return frequency
        if self.stretch.kind == "linear":
            return frequency / self.stretch.factor
        low, high = self._pair_at(self.stretch.fast), self._pair_at(self.stretch.slow)
        low, high = max(math.floor(low), 0), min(math.ceil(high), self.dim - 1)
        blend = ((pair / 2 - low) / max(high - low, 1e-3)).clamp(0.0, 1.0)
        return frequency * (1.0 - blend + blend / self.stretch.factor)

    def _pair_at(self, turns: float) -> float:
        """The (fractional) pair that turns that many times within the trained length."""
        assert self.stretch is not None
        return self.dim * math.log(self.stretch.trained / (turns * 2.0 * math.pi)) / (2.0 * math.log(self.theta))

    def table(self, positions: Tensor, dtype: torch.dtype = torch.float32) -> Table:
        """Positions (..., T) -> cos, sin (..., T, dim/2); once for all layers."""
        angles = positions.to(torch.float64).unsqueeze(-1) * self.frequencies(positions.device)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return angles.cos().to(wide), angles.sin().to(wide)


def rotate(x: Tensor, table: Table) -> Tensor:
    """Rotate the first coordinates of x (..., T, n) by a table over dim <= n; the rest stays (partial HoPE).

    Tables with a batch dimension, (B, T, dim/2), meet x (B, H, T, n).
    """
    cos, sin = table
    dim = 2 * cos.shape[-1]
    if dim > x.shape[-1]:
        raise UsageError(f"the table rotates {dim} coordinates, but x has only {x.shape[-1]}")
    if cos.ndim == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    even, odd = x[..., :dim].unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2).to(x.dtype)
    return turned if dim == x.shape[-1] else torch.cat([turned, x[..., dim:]], dim=-1)
