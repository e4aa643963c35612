"""Distances and angles of all pairs of two sets, by one matrix product; the one home of their equations.

Shapes: two sets (..., N, n) and (..., M, n) give (..., N, M). The curvature c comes last: a number, a tensor that
broadcasts against (..., 1, 1), or None for flat space. Input in half precision gives its own type back.

In curved space every distance here is d = 2/√c · asinh √S of S = sinh²(√c d/2) = (cosh √c d − 1)/2, from

    points       S = ½ [(h + 1) k + h − c x·y],   h = √(1 + c|x|²) − 1 = cosh ρ_x − 1, k for y likewise,
    tangents     S = sinh²((ρ_u − ρ_v)/2) + sinh ρ_u sinh ρ_v sin²(θ/2),   ρ = √c · length, θ the angle between.

The second is the hyperbolic law of cosines in half angles; the first is −½ (1 + c⟨x,y⟩_L) with the ones taken out of
the product, where near the origin they would hide everything else.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from leafward.geometry import lorentz, poincare
from leafward.geometry.scalars import (
    Curv,
    asinh,
    atan2,
    bounded,
    dot,
    double,
    largest,
    norm,
    sqrt,
    tame,
    tiny,
    unit,
    wide,
)

#: In float64: ρ beyond which sinh ρ_u sinh ρ_v might overflow.
_FARTHEST = 350.0


def distances(x: Tensor, y: Tensor, c: Curv | None, precise: bool = True) -> Tensor:
    """All distances between two sets of points: space parts (..., N, n), (..., M, n) -> (..., N, M).

    Points of the hyperboloid by their space parts, as in `leafward.geometry.lorentz`; of flat space where c is None.
    S cancels for near pairs far from the origin, so the product is taken in float64 unless ``precise=False``, which
    uses the input's own precision: faster, for far pairs only (absolute error of cosh √c d about 1e-7 · cosh² ρ).
    """
    p, q = (_for_product(tame(z), precise) for z in (x, y))
    return (_flat if c is None else _curved)(p, q, c, x.dtype)  # pyright: ignore[reportArgumentType]


def ball_distances(p: Tensor, q: Tensor, c: Curv, precise: bool = True) -> Tensor:
    """`distances` between points of the Poincaré ball: (..., N, n), (..., M, n) -> (..., N, M).

    They are taken to the hyperboloid in the type of the product, so that they are not rounded on the way.
    """
    x, y = (poincare.to_lorentz(_for_product(poincare.project(z, c), precise), c) for z in (p, q))
    return _curved(x, y, c, p.dtype)


def tangent_distances(u: Tensor, v: Tensor, c: Curv | None, precise: bool = True) -> Tensor:
    """d(exp₀(u), exp₀(v)) of all pairs, from tangent vectors at the origin: (..., N, n), (..., M, n) -> (..., N, M).

    Lengths are those of the Lorentz model; vectors of the Poincaré ball, where λ₀ = 2, are to be doubled first. No
    point is computed, which takes fewer operations than `distances` of the points and rounds nothing on the way.
    Directions are always compared in float64, since 2 sin²(θ/2) = 1 − cos θ cancels; with ``precise=False`` all that
    follows is in the type of the input (float32 for half precision), which is cheap enough for attention: its error
    is that of radii in this type. Radii saturate where sinh ρ is `scalars.largest`, in float64 at ρ = 350.
    """
    (a, r), (b, s) = (_ray(z, c, torch.float64 if precise else wide(z).dtype) for z in (u, v))
    return _between((0.5 - 0.5 * (a @ b.mT)).to(r.dtype), r, s, c).to(u.dtype)


def distances_of_cosines(cosines: Tensor, u: Tensor, v: Tensor, c: Curv | None) -> Tensor:
    """`tangent_distances` where the cosines (N, M) are known, with the lengths of the tangents, (N, 1) and (M, 1).

    As exact as 1 − cos is: in float32, distances below a thousandth of the radii are lost.
    """
    dtype, (cosines, u, v) = cosines.dtype, map(wide, (cosines, u, v))
    farthest = largest(cosines.dtype)
    if c is not None:
        farthest = _FARTHEST if cosines.dtype == torch.float64 else math.asinh(farthest)
    u, v = (((1.0 if c is None else c**0.5) * length).clamp_max(farthest) for length in (u, v))
    return bounded(_between((0.5 - 0.5 * cosines).clamp_min(0.0), u, v, c), dtype)


def _between(lateral: Tensor, r: Tensor, s: Tensor, c: Curv | None) -> Tensor:
    """Distances (..., N, M) from sin²(θ/2) and the radii (..., N, 1) and (..., M, 1)."""
    gap = r - s.mT
    if c is None:
        return sqrt(gap.square() + 4.0 * r * s.mT * lateral)
    square = torch.sinh(0.5 * gap).square() + torch.sinh(r) * torch.sinh(s).mT * lateral
    return _length(square, c)


def exterior_angles(lower: Tensor, upper: Tensor, c: Curv | None) -> Tensor:
    """All exterior angles at `upper` between the ray from the origin, going on, and the way to `lower`: space parts
    (..., N, n), (..., M, n) -> (..., N, M) in [0, π]. Pair by pair: `leafward.geometry.cones.exterior_angle`.

    From distances alone: in the triangle of sides a = |o,lower|, b = |o,upper|, d and half perimeter s, the half-angle
    theorem gives tan²(Ξ/2) = f(s) f(s−a) / (f(s−b) f(s−d)) for the exterior angle, with f = sinh(√c ·), in flat space
    f = identity. Differences of lengths cancel near the ray, hence float64. The angle at the origin is zero.
    """
    p, q = double(tame(lower)), double(tame(upper))
    a, b = (norm(z) if c is None else lorentz.dist0(z, c).unsqueeze(-1) for z in (p, q))
    b, d = b.mT, distances(p, q, c)
    half = 0.5 * (a + b + d)

    def f(side: Tensor) -> Tensor:
        side = side.clamp_min(0.0)
        return side if c is None else torch.sinh(c**0.5 * side)

    above, below = sqrt(f(half) * f(half - a)), sqrt(f(half - b) * f(half - d))
    return torch.where(b > tiny(lower.dtype), 2.0 * atan2(above, below), 0.0).to(lower.dtype)


def _for_product(x: Tensor, precise: bool) -> Tensor:
    return double(x) if precise else wide(x)


def _flat(p: Tensor, q: Tensor, _c: None, dtype: torch.dtype) -> Tensor:
    with torch.autocast(p.device.type, enabled=False):
        squared = dot(p, p) + dot(q, q).mT - 2.0 * (p @ q.mT)
    return sqrt(squared).to(dtype)


def _curved(x: Tensor, y: Tensor, c: Curv, dtype: torch.dtype) -> Tensor:
    """`distances` in `dtype` from space parts in the type of the product, which S is rounded from."""
    with torch.autocast(x.device.type, enabled=False):
        (p, h), (q, k) = (_scaled(z, c) for z in (x, y))
        left = torch.cat([0.5 * h + 0.5, 0.5 * h, -0.5 * p], dim=-1)
        square = left @ torch.cat([k, torch.ones_like(k), q], dim=-1).mT
    return _length(square.to(torch.float32 if dtype.itemsize < 4 else dtype), c).to(dtype)


def _scaled(x: Tensor, c: Curv) -> tuple[Tensor, Tensor]:
    """√c x and cosh ρ − 1 = c|x|² / (1 + √(1 + c|x|²)), which does not cancel: (..., n) -> (..., n), (..., 1)."""
    p = c**0.5 * x
    square = dot(p, p)
    return p, square / (1.0 + torch.sqrt(1.0 + square))


def _ray(z: Tensor, c: Curv | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Direction in float64 (..., n) and ρ, in flat space the length, in `dtype` (..., 1) of tangents (..., n)."""
    exact = double(z)
    length = norm(exact)
    if c is None:
        return unit(exact, length), length.clamp_max(largest(z.dtype)).to(dtype)
    farthest = _FARTHEST if dtype == torch.float64 else math.asinh(largest(dtype))
    return unit(exact, length), (c**0.5 * length).clamp_max(farthest).to(dtype)


def _length(square: Tensor, c: Curv) -> Tensor:
    """2/√c · asinh √S from S; what rounding made negative counts as zero."""
    if torch.compiler.is_compiling():  # fused there anyway
        return 2.0 / c**0.5 * asinh(sqrt(square))
    return 2.0 / c**0.5 * _AsinhOfRoot.apply(square)  # pyright: ignore[reportOperatorIssue]


class _AsinhOfRoot(torch.autograd.Function):
    """asinh √S for S >= 0, with derivative 1 / (2 √S √(1 + S)), zero at S = 0.

    Of all that a set of pairs needs, S alone is kept for the backward pass, where automatic differentiation keeps five
    tensors of its size.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(square: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        # torch.asinh is as accurate here, and one pass; compiled and exported it is not, hence `scalars.asinh` there.
        return square.clamp_min(0.0).sqrt_().asinh_()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        if torch.is_grad_enabled():  # a second derivative is wanted
            return grad * _slope(*ctx.saved_tensors)
        return _slope_in_place(*ctx.saved_tensors).mul_(grad)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return tangent * _slope(*ctx.saved_tensors)


def _slope(square: Tensor) -> Tensor:
    apart = square > tiny(square.dtype) ** 2
    kept = torch.where(apart, square, 1.0)
    return torch.where(apart, 0.5 * torch.rsqrt(kept) * torch.rsqrt(1.0 + kept), 0.0)


def _slope_in_place(square: Tensor) -> Tensor:
    """`_slope` in half its passes over the pairs, which take longer than the matrix products where n is small."""
    slope = square.rsqrt().mul_(square.add(1.0).rsqrt_()).mul_(0.5)
    return slope.masked_fill_(square <= tiny(square.dtype) ** 2, 0.0)
