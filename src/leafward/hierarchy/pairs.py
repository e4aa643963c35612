"""Distances and angles of all pairs of two sets by one matrix product, cheap enough for a training loop.

Shapes: `lower` (B, m) and `upper` (C, m) are points of a manifold; results are (B, C). The values are those of
`leafward.geometry.Manifold`, pair by pair; what is different is the cost.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from leafward.geometry import Lorentz, Manifold, PoincareBall
from leafward.geometry.scalars import asinh, atan2, sqrt, tiny


def distances(manifold: Manifold, lower: Tensor, upper: Tensor) -> Tensor:
    """All distances, as ``manifold.cdist`` has them; in the hyperbolic models with a gradient of few passes."""
    if isinstance(manifold, PoincareBall):
        lower, upper = manifold.to_lorentz(lower), manifold.to_lorentz(upper)
    elif not isinstance(manifold, Lorentz):
        return manifold.cdist(lower, upper)
    return _LorentzDistances.apply(lower[:, 1:], upper[:, 1:], float(manifold.c))  # type: ignore[return-value]


class _LorentzDistances(torch.autograd.Function):
    """d of cosh(√c d) = c·g, g = x_t y_t − x·y, for space parts (B, n) and (C, n).

    As in `leafward.geometry.lorentz.cdist`, g is taken in float64 and d = 2/√c · asinh(√(c·g − 1) / √2). What
    goes back is ∂d/∂g = √c / sinh(√c d), from the half chord that is kept: a few passes over (B, C) where
    automatic differentiation takes thirty. At d = 0 the gradient is zero.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, c: float) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        p, q = x.double(), y.double()
        t, u = ((1.0 / c + z.square().sum(dim=1, keepdim=True)).sqrt() for z in (p, q))
        excess = torch.cat([t, -p], dim=1) @ torch.cat([u, q], dim=1).T
        excess = excess.mul_(0.5 * c).sub_(0.5).clamp_min_(0.0).to(x.dtype)
        half = excess.sqrt_()  # sinh(√c d / 2)
        ctx.save_for_backward(p, q, t, u, half)
        ctx.c = c
        return asinh(half).mul_(2.0 / c**0.5)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        p, q, t, u, half = ctx.saved_tensors
        double_sinh = half.square().add_(1.0).sqrt_().mul_(half).mul_(2.0)
        # Two large terms nearly cancel for near pairs, hence float64 here too.
        slope = (grad * ctx.c**0.5).div_(double_sinh).masked_fill_(half < tiny(half.dtype), 0.0).double()
        x, y = (slope @ u) * p / t - slope @ q, (slope.T @ t) * q / u - slope.T @ p
        return x.to(half.dtype), y.to(half.dtype), None


def exterior_angles(manifold: Manifold, lower: Tensor, upper: Tensor) -> Tensor:
    """All exterior angles at `upper` between the ray from the origin, going on, and the way to `lower`.

    From distances alone: in the triangle of sides a = |o,lower|, b = |o,upper|, d and half perimeter s, the half-angle
    theorem gives tan²(Ξ/2) = f(s) f(s−a) / (f(s−b) f(s−d)) for the exterior angle, with f = sinh(√c ·), in flat space
    f = identity. Differences of lengths cancel near the ray, hence float64. The angle at the origin is zero.
    """
    p, q = lower.double(), upper.double()
    a, b, d = manifold.dist0(p)[:, None], manifold.dist0(q)[None], distances(manifold, p, q)
    half = 0.5 * (a + b + d)
    root = float(manifold.c) ** 0.5 if isinstance(manifold, Lorentz | PoincareBall) else None

    def f(length: Tensor) -> Tensor:
        length = length.clamp_min(0.0)
        return length if root is None else torch.sinh(root * length)

    above, below = sqrt(f(half) * f(half - a)), sqrt(f(half - b) * f(half - d))
    return torch.where(b > tiny(b.dtype), 2.0 * atan2(above, below), 0.0).to(lower.dtype)
