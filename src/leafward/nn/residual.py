"""The hyperbolic residual connection."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from leafward.errors import UsageError
from leafward.geometry.lorentz import time_of_norm
from leafward.geometry.scalars import norm, tiny, wide
from leafward.nn import kernels
from leafward.nn.norm import RMSNorm
from leafward.nn.space import LORENTZ, Space, working_dtype


def weighted_sum(x: Tensor, y: Tensor, weight: float | Tensor, c: float) -> Tensor:
    """(x + w y) / (√c|x + w y|_L) for w >= 0: (..., n), (..., n) -> (..., n), in float32 or better.

    With a = √c|x|, b = √c|y| and A, B = √(1+a²), √(1+b²) the squared length is 1 + w² + 2w cosh d, where

        cosh d = AB − ab + (ab − c x·y) = (1 + a² + b²)/(AB + ab) + c|λx − y/λ|²/2,   λ² = |y|/|x|

    adds positive numbers only. t² − |s|², which cancels, loses 5 % in float32 at |x| = 400. The same number as
    `leafward.geometry.lorentz.residual`, in one pass fewer over x and y (no rows to tame, no difference of
    radii: it would be exact for a tiny distance, but here the distance is added to one).
    """
    p, q = wide(x), wide(y)
    least, root = tiny(p.dtype), c**0.5
    r, u = norm(p).clamp_min(least), norm(q).clamp_min(least)
    balance = torch.sqrt(u) / torch.sqrt(r)
    lateral = norm(balance * p - q / balance)
    a, b = root * r, root * u
    big = root * time_of_norm(r, c) * (root * time_of_norm(u, c))
    cosh = (1.0 + a * a + b * b) / (big + a * b) + 0.5 * c * lateral * lateral
    return (p + weight * q) * torch.rsqrt(1.0 + weight * weight + 2.0 * weight * cosh)


class Residual(nn.Module):
    """x ⊕ w·y, the normalised Lorentzian sum with a learned weight w > 0, its space part times a scale.

    HELM's residual (docs/helm.md, eq. 4): (..., n), (..., n) -> (..., n).

    w = exp(log_weight) stays positive, so the sum stays timelike and the bound
    −c⟨a,a⟩_L >= (1 + w)² holds by itself. `scale` is a constant, or learned (in log space) with `learn_scale`.
    In the Euclidean twin the sum x + w y is plain and the scale is not used.
    """

    def __init__(self, scale: float = 1.0, learn_scale: bool = False, space: Space = LORENTZ) -> None:
        super().__init__()
        if not 0.0 < scale < math.inf:
            raise UsageError(f"scale must be a positive finite number, got {scale!r}")
        self.space, self.scale = space, float(scale)
        # One element, not none: fully_shard refuses parameters without dimensions.
        self.log_weight = nn.Parameter(torch.empty(1))
        self.log_scale = nn.Parameter(torch.empty(1)) if learn_scale else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.log_weight)
        if self.log_scale is not None:
            nn.init.constant_(self.log_scale, math.log(self.scale))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        weight = torch.exp(self.log_weight)
        if not self.space.curved:
            return x + weight.to(x.dtype) * y
        total = weighted_sum(x, y, weight, self.space.c)
        scale = torch.exp(self.log_scale) if self.log_scale is not None else self.scale
        return (scale * total).to(x.dtype)

    def normed(self, x: Tensor, y: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor, Tensor | None]:
        """x ⊕ w·y, its norm, and the time of that: what every sub-layer but the first begins with."""
        if self.space.curved and self.log_scale is None and kernels.serve_rows(x):
            at = self.log_weight, norm.weight, self.scale, norm.eps, self.space.c
            return kernels.residual_norm(x, y, *at, working_dtype(x))
        x = self(x, y)
        return x, *norm.lifted(x, self.space)

    def extra_repr(self) -> str:
        return f"scale={self.scale:g}, {self.space}"
