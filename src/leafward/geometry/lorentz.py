"""The Lorentz (hyperboloid) model as pure functions on *space parts*.

A point of the hyperboloid ``-t² + |x|² = -1/c`` (sectional curvature ``-c``) is fixed by its space part
``x (..., n)``; the time coordinate ``t = √(1/c + |x|²)`` is derived where it is needed and never stored, so a
point cannot leave the manifold. A tangent vector at ``x`` is fixed by its space part ``u (..., n)`` too:
``⟨x, u⟩_L = 0`` gives ``u_t = x·u / t``. `leafward.geometry.Lorentz` offers the same functions on full
vectors ``[t; x]``.

Legend: ``ρ = √c · radius``, ``a = √c|x| = sinh ρ``, ``A = √(1 + a²) = cosh ρ`` (``b``, ``B`` for the second
point), all of shape (..., 1). The curvature ``c`` comes last: a number, or a tensor that broadcasts against
(..., 1). Half-precision input is computed in float32 and returned in its own type. Gradients are finite
everywhere; what lies beyond ``scalars.largest`` saturates along its ray instead of overflowing.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from leafward.geometry.scalars import (
    Curv,
    asinh,
    asinhc,
    bounded,
    dot,
    double,
    hypot,
    largest,
    narrow,
    norm,
    polar,
    sinhc,
    some,
    tame,
    tiny,
    unit,
    wide,
)


def _cosh(a: Tensor) -> Tensor:
    return torch.sqrt(1.0 + a * a)


def time(x: Tensor, c: Curv) -> Tensor:
    """Time coordinate t = √(1/c + |x|²): (..., n) -> (..., 1)."""
    return (_cosh(c**0.5 * polar(x)[1]) / c**0.5).to(x.dtype)


def time_of_norm(length: Tensor, c: Curv) -> Tensor:
    """`time` from |x|: (..., 1) -> (..., 1)."""
    return torch.sqrt(1.0 / c + length * length)


def lift(x: Tensor, c: Curv) -> Tensor:
    """The full point [t; x]: (..., n) -> (..., n+1)."""
    z, r = polar(x)
    t = _cosh(c**0.5 * r) / c**0.5
    return torch.cat([t, z.expand(*t.shape[:-1], z.shape[-1])], dim=-1).to(x.dtype)


def expmap0(v: Tensor, c: Curv) -> Tensor:
    """Exponential map at the origin, x = sinh(√c|v|)/(√c|v|) · v: tangent (..., n) -> space part (..., n)."""
    z, r = polar(v)
    rho, shrink = _saturate(c**0.5 * r, c, v.dtype)
    return (sinhc(rho) * shrink * z).to(v.dtype)


def expmap0_lifted(v: Tensor, c: Curv) -> Tensor:
    """`expmap0` as a full point, (..., n) -> (..., n+1); the time is cosh(ρ)/√c, with no second norm."""
    z, r = polar(v)
    rho, shrink = _saturate(c**0.5 * r, c, v.dtype)
    x = sinhc(rho) * shrink * z
    return torch.cat([(torch.cosh(rho) / c**0.5).expand(*x.shape[:-1], 1), x], dim=-1).to(v.dtype)


def _saturate(rho: Tensor, c: Curv, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """ρ, at most the value at which |x| reaches ``largest``, and the factor it shrank by."""
    end = c**0.5 * largest(dtype)
    limit = torch.asinh(end) if isinstance(end, Tensor) else math.asinh(end)
    shrink = limit / rho.clamp_min(limit)
    return rho * shrink, shrink


def logmap0(x: Tensor, c: Curv) -> Tensor:
    """Logarithm at the origin, v = asinh(√c|x|)/(√c|x|) · x: space part (..., n) -> tangent (..., n)."""
    z, r = polar(x)
    return (asinhc(c**0.5 * r) * z).to(x.dtype)


def dist0(x: Tensor, c: Curv) -> Tensor:
    """Distance to the origin (the radius), asinh(√c|x|)/√c: (..., n) -> (...)."""
    return (asinh(c**0.5 * polar(x)[1]) / c**0.5).squeeze(-1).to(x.dtype)


def _radial_chord(a: Tensor, b: Tensor) -> Tensor:
    """2 sinh((ρ_x − ρ_y)/2) from a = sinh ρ_x and b = sinh ρ_y, without a difference of large numbers.

    With e^ρ = a + A:  2 sinh(Δ/2) = (e^ρx − e^ρy)/√(e^ρx e^ρy)  and  A − B = (a−b)(a+b)/(A+B).
    """
    big_a, big_b = _cosh(a), _cosh(b)
    return (a - b) * (1.0 + (a + b) / (big_a + big_b)) * (torch.rsqrt(a + big_a) * torch.rsqrt(b + big_b))


Polar = tuple[Tensor, Tensor]


def _half_chord(x: Polar, y: Polar, c: Curv) -> Tensor:
    """sinh(√c d(x, y)/2) = √c|x−y|_L / 2, from vectors with their lengths: -> (..., 1).

    4 sinh²(√c d/2) = [2 sinh(Δρ/2)]² + 4 sinh ρ_x sinh ρ_y sin²(θ/2): a radial and a lateral square, neither of
    which cancels. The lateral one is c|λx − y/λ|² with λ² = |y|/|x|, which is exact at any radius and keeps the
    right gradient where one point is the origin. Nothing depends on which point comes first, not even the last digit:
    where distances are ranked, a pair and its mirror image are equal.
    """
    root = c**0.5
    least = tiny(x[1].dtype)
    r, q = x[1].clamp_min(least), y[1].clamp_min(least)
    p, s = torch.sqrt(r), torch.sqrt(q)
    lateral = root * norm(s / p * x[0] - p / s * y[0])
    return 0.5 * hypot(_radial_chord(root * r, root * q), lateral)


def dist(x: Tensor, y: Tensor, c: Curv, precise: bool = False) -> Tensor:
    """Geodesic distance d = 2/√c · asinh(√c|x−y|_L / 2): (..., n), (..., n) -> (...).

    In float32 the lateral square is known to (1e-7 · sinh ρ)²: beyond ρ of about 13 that shows between points that lie
    behind one another. ``precise=True`` takes it in float64 and gives the distance of the points as they are.
    """
    p, q = (_exact(z) if precise else polar(z) for z in (x, y))
    return (2.0 / c**0.5 * asinh(_half_chord(p, q, c))).squeeze(-1).to(x.dtype)


def _exact(x: Tensor) -> Polar:
    z = double(tame(x))
    return z, norm(z)


def tangent_dist(u: Tensor, v: Tensor, c: Curv) -> Tensor:
    """d(exp₀(u), exp₀(v)) from tangent vectors at the origin, pair by pair: (..., n), (..., n) -> (...).

    No point is rounded on the way, so that near pairs far from the origin keep their digits, which their points have
    lost: sinh²(√c d/2) = sinh²(δ/2) + sinh ρ_u sinh ρ_v sin²(θ/2), where the difference g = √c(u − v), exact for near
    vectors, gives both squares without cancelling:

        δ = ρ_u − ρ_v = g·√c(u + v) / (ρ_u + ρ_v),    2 ρ_u ρ_v (û − v̂) = (ρ_u + ρ_v) g − δ √c(u + v).

    Vectors of unequal length take λu − v/λ as in `dist`; the second form would lose the shorter one.
    """
    (p, a), (q, b) = (_scaled(z, c) for z in (u, v))
    gap, both, total = p - q, p + q, a + b
    radial = dot(gap, both) / total
    mean = torch.sqrt(a) * torch.sqrt(b)
    near = radial.abs() < 0.25 * total
    balance = torch.sqrt(b) / torch.sqrt(a)
    across = torch.where(near, (gap * total - both * radial) / (2.0 * mean), balance * p - q / balance)
    lateral = 0.5 * torch.sqrt(sinhc(a)) * torch.sqrt(sinhc(b)) * norm(across)
    return (2.0 / c**0.5 * asinh(hypot(torch.sinh(0.5 * radial), lateral))).squeeze(-1).to(u.dtype)


def _scaled(v: Tensor, c: Curv) -> Polar:
    """√c v and its length ρ, both saturated as in `expmap0`; the length is never zero, so that one can divide by it."""
    z, r = polar(v)
    rho, shrink = _saturate(c**0.5 * r, c, v.dtype)
    return c**0.5 * shrink * z, rho.clamp_min(tiny(rho.dtype))


def inner(x: Tensor, u: Tensor, v: Tensor, c: Curv) -> Tensor:
    """Riemannian inner product of tangent vectors at x: three (..., n) -> (...).

    ⟨u,v⟩_L = u·v − u_t v_t, written as the part across the ray plus the part along it divided by cosh²ρ.
    """
    (z, r), p, q = polar(x), tame(u), tame(v)
    a = c**0.5 * r
    ray = unit(z, r)
    up, vp = dot(p, ray), dot(q, ray)
    product = dot(p - up * ray, q - vp * ray) + up * vp / (1.0 + a * a)
    return bounded(product.squeeze(-1), u.dtype)


def length(x: Tensor, u: Tensor, c: Curv) -> Tensor:
    """Riemannian length of a tangent vector at x: (..., n), (..., n) -> (...)."""
    return _length(polar(x), tame(u), c).squeeze(-1).to(u.dtype)


def _length(x: Polar, u: Tensor, c: Curv) -> Tensor:
    ray = unit(*x)
    along = dot(u, ray)
    return hypot(norm(u - along * ray), along / _cosh(c**0.5 * x[1]))


def expmap(x: Tensor, u: Tensor, c: Curv) -> Tensor:
    """Exponential map at x, cosh(ν) x + sinh(ν)/ν u with ν = √c|u|_L: (..., n), (..., n) -> (..., n)."""
    z, p = polar(x), tame(u)
    nu, shrink = _saturate(c**0.5 * _length(z, p, c), c, x.dtype)
    return narrow(tame(torch.cosh(nu) * z[0] + sinhc(nu) * shrink * p), x.dtype)


def logmap(x: Tensor, y: Tensor, c: Curv) -> Tensor:
    """Logarithm at x: (..., n), (..., n) -> tangent (..., n).

    With δ = √c d the textbook form δ/sinh δ · (y − cosh δ · x) is (y − x)/sinhc δ − δ tanh(δ/2) x, which is
    exactly zero at y = x.
    """
    p, q = polar(x), polar(y)
    delta = 2.0 * asinh(_half_chord(p, q, c))
    return narrow((q[0] - p[0]) / sinhc(delta) - delta * torch.tanh(0.5 * delta) * p[0], x.dtype)


def geodesic(x: Tensor, y: Tensor, fraction: Curv, c: Curv) -> Tensor:
    """The point a given fraction of the way from x to y: (..., n), (..., n) -> (..., n).

    [sinh((1−f)δ) x + sinh(fδ) y] / sinh δ; `fraction` is a number or broadcasts against (..., 1).
    """
    p, q = polar(x), polar(y)
    delta = 2.0 * asinh(_half_chord(p, q, c))
    delta = delta.clamp_min(tiny(delta.dtype))

    def share(f: Curv) -> Tensor:  # sinh(f δ) / sinh δ without overflow
        return torch.exp((f - 1.0) * delta) * torch.expm1(-2.0 * f * delta) / torch.expm1(-2.0 * delta)

    return tame(share(1.0 - fraction) * p[0] + share(fraction) * q[0]).to(x.dtype)


def transport(x: Tensor, y: Tensor, u: Tensor, c: Curv) -> Tensor:
    """Parallel transport of a tangent vector from x to y along the geodesic: three (..., n) -> (..., n).

    u + c⟨y,u⟩_L / (1 + cosh δ) · (x + y), with ⟨y,u⟩_L = ⟨y−x,u⟩_L since u is tangent at x.
    """
    (p, r), (q, s), w = polar(x), polar(y), tame(u)
    tp, tq = _cosh(c**0.5 * r) / c**0.5, _cosh(c**0.5 * s) / c**0.5
    gap = q - p
    product = dot(gap, w) - dot(gap, q + p) / (tp + tq) * dot(p, w) / tp
    half = _half_chord((p, r), (q, s), c)
    return narrow(w + c * product / (2.0 + 2.0 * half * half) * (p + q), u.dtype)


def transport0(y: Tensor, u: Tensor, c: Curv) -> Tensor:
    """Parallel transport from the origin to y, u + c (y·u)/(1 + √c t) · y: (..., n), (..., n) -> (..., n)."""
    (q, r), w = polar(y), tame(u)
    return narrow(w + c * dot(q, w) / (1.0 + _cosh(c**0.5 * r)) * q, u.dtype)


def centroid(x: Tensor, weights: Tensor | None, c: Curv) -> Tensor:
    """Lorentzian centroid of (..., k, n) with non-negative weights (..., k): the sum o = Σ wᵢxᵢ, scaled back to
    the hyperboloid, -> (..., n).

    o_t² − |o_s|² = (o_t − |o_s|)(o_t + |o_s|) cancels at large radius. Its first factor is the sum over points of
    wᵢ(tᵢ − xᵢ·ô) = wᵢ[1/(c(tᵢ + |xᵢ|)) + |xᵢ − |xᵢ|ô|²/(2|xᵢ|)], all terms non-negative, so nothing is lost and the
    exact bound −⟨o,o⟩_L ≥ (Σwᵢ)²/c holds by itself.
    """
    some(x)
    root = c**0.5
    z, r = polar(x)
    a = root * r
    share = _shares(x, weights)
    total = (share * z).sum(dim=-2, keepdim=True)
    reach = norm(total)
    # Where the sum is zero any direction serves; the first axis is one.
    axis = torch.zeros_like(total)
    axis[..., 0] = 1.0
    ray = torch.where(reach > 0, unit(total, reach), axis)
    cosh = _cosh(a)
    astray = norm(torch.addcmul(z, r, ray, value=-1.0))
    bend = 0.5 * root * astray * (astray / r.clamp_min(tiny(r.dtype)))
    deficit = (share * (1.0 / (cosh + a) + bend)).sum(dim=-2, keepdim=True)
    squared = deficit * ((share * cosh).sum(dim=-2, keepdim=True) + root * reach)
    return (total * torch.rsqrt(squared.clamp_min(tiny(z.dtype)))).squeeze(-2).to(x.dtype)


def centroid_of_sum(total: Tensor, t: Tensor, c: Curv) -> tuple[Tensor, Tensor]:
    """`centroid` where only the weighted sum o = [t; total] of points is known, of weights that sum to one or more:
    (..., n), (..., 1) -> space part (..., n) and time (..., 1) of o / (√c |o|_L), the time in float32 or better.

    −⟨o,o⟩_L = (t − |total|)(t + |total|) cancels at large radius, and the sums may come rounded to half precision. The
    exact bound −⟨o,o⟩_L >= (Σwᵢ)²/c >= 1/c (equality where all points are one) takes the place of an arbitrary eps: in
    bfloat16 the sign itself can come out wrong. In float64 the difference holds up to √c · radius of about 17. A sum of
    nothing gives the origin.
    """
    o, t = wide(total), wide(t)
    reach = norm(o)
    squared = ((t - reach) * (t + reach)).clamp_min(1.0 / c)
    shrink = torch.rsqrt(c * squared)
    return (o * shrink).to(total.dtype), time_of_norm(reach * shrink, c)


def _shares(x: Tensor, weights: Tensor | None) -> Tensor:
    """Weights as shares of one, (..., k) -> (..., k, 1); equal shares where none are given."""
    if weights is None:
        return wide(x).new_full((x.shape[-2], 1), 1.0 / x.shape[-2])
    w = wide(weights).to(wide(x).dtype).unsqueeze(-1)
    return w / w.sum(dim=-2, keepdim=True).clamp_min(tiny(w.dtype))


def residual(x: Tensor, y: Tensor, weight: Curv, c: Curv) -> Tensor:
    """The normalised Lorentzian sum x ⊕ w·y (the hyperbolic residual): (..., n), (..., n) -> (..., n).

    (x + w y)/(√c|x + w y|_L) with c|x + w y|_L² = (1+w)² + w c|x−y|_L², which does not cancel for w ≥ 0.
    """
    p, q = polar(x), polar(y)
    half = _half_chord(p, q, c)
    return ((p[0] + weight * q[0]) * torch.rsqrt((1.0 + weight) ** 2 + 4.0 * weight * half * half)).to(x.dtype)


def rescale(x: Tensor, c: Curv, new_c: Curv) -> Tensor:
    """The homothety to another curvature: same direction, same √c · radius. Distances scale by √(c/new_c)."""
    return narrow(tame(x) * (c / new_c) ** 0.5, x.dtype)


def to_poincare(x: Tensor, c: Curv) -> Tensor:
    """Isometry to the Poincaré ball, p = x / (1 + √c t): (..., n) -> (..., n)."""
    z, r = polar(x)
    return (z / (1.0 + _cosh(c**0.5 * r))).to(x.dtype)
