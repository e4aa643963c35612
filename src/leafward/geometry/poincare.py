"""The Poincaré ball as pure functions: points p (..., n) with |p| < 1/√c, sectional curvature -c.

The metric is λ_p² times the Euclidean one, λ_p = 2/(1 − c|p|²), so a tangent vector v at the origin has length
2|v| and ``dist0(expmap0(v)) = 2|v|``. Points at or outside the edge are taken at the outermost radius that
their type can tell from the edge (see `edge`). Formulas: Ungar's gyrovector spaces, as in Ganea et al.
2018, "Hyperbolic Neural Networks", sec. 2; legend and conventions as in `leafward.geometry.lorentz`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from leafward.geometry.scalars import (
    Curv,
    asinh,
    atanhc,
    bounded,
    dot,
    double,
    narrow,
    norm,
    polar,
    some,
    sqrt,
    tame,
    tanhc,
    tiny,
    wide,
)


def edge(dtype: torch.dtype) -> float:
    """Largest √c|p| for a type: four units of rounding inside the ball, so that 1 − c|p|² is never zero."""
    return 1.0 - 4.0 * torch.finfo(dtype).eps


def _polar(p: Tensor, c: Curv) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of p (..., n), their lengths a = √c|p| inside the edge, and the factors that took them there (..., 1)."""
    z, length = polar(p)
    a, shrink = _within(c**0.5 * length, p.dtype)
    return z, a, shrink


def _within(a: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Length a inside the edge of a type, and the factor that took it there."""
    limit = edge(dtype)
    shrink = limit / a.clamp_min(limit)
    return a * shrink, shrink


def _room(a: Tensor) -> Tensor:
    """1 − a², as a product so that nothing is lost near the edge."""
    return (1.0 - a) * (1.0 + a)


def project(p: Tensor, c: Curv) -> Tensor:
    """`p` (..., n), pulled back along its ray where it is beyond the edge; else unchanged."""
    return _inside(p, c, p.dtype)


def _inside(p: Tensor, c: Curv, dtype: torch.dtype) -> Tensor:
    z, length = polar(p)
    return (_within(c**0.5 * length, dtype)[1] * z).to(dtype)


def conformal(p: Tensor, c: Curv) -> Tensor:
    """Conformal factor λ_p = 2 / (1 − c|p|²): (..., n) -> (..., 1)."""
    _, a, _ = _polar(p, c)
    return (2.0 / _room(a)).to(p.dtype)


def expmap0(v: Tensor, c: Curv) -> Tensor:
    """Exponential map at the origin, tanh(√c|v|)/(√c|v|) · v: (..., n) -> (..., n)."""
    z, length = polar(v)
    rho = c**0.5 * length
    ratio = tanhc(rho)
    _, shrink = _within(ratio * rho, v.dtype)
    return (ratio * shrink * z).to(v.dtype)


def logmap0(p: Tensor, c: Curv) -> Tensor:
    """Logarithm at the origin, atanh(√c|p|)/(√c|p|) · p: (..., n) -> (..., n)."""
    z, a, shrink = _polar(p, c)
    return (atanhc(a) * shrink * z).to(p.dtype)


def dist0(p: Tensor, c: Curv) -> Tensor:
    """Distance to the origin, 2/√c · atanh(√c|p|): (..., n) -> (...)."""
    _, a, _ = _polar(p, c)
    return (2.0 / c**0.5 * atanhc(a) * a).squeeze(-1).to(p.dtype)


def dist(p: Tensor, q: Tensor, c: Curv, precise: bool = False) -> Tensor:
    """Distance 2/√c · asinh(√c|p−q| / √((1−c|p|²)(1−c|q|²))): (..., n), (..., n) -> (...).

    ``precise=True`` takes it in float64; what the points themselves have lost near the edge does not come back.
    """
    dtype = p.dtype
    if precise:
        p, q = (double(project(z, c)) for z in (p, q))
    (x, a, s), (y, b, r) = _polar(p, c), _polar(q, c)
    half = c**0.5 * norm(s * x - r * y) * (torch.rsqrt(_room(a)) * torch.rsqrt(_room(b)))
    return (2.0 / c**0.5 * asinh(half)).squeeze(-1).to(dtype)


def inner(p: Tensor, u: Tensor, v: Tensor, c: Curv) -> Tensor:
    """Riemannian inner product λ_p² u·v of tangent vectors at p: three (..., n) -> (...)."""
    factor = conformal(wide(p), c)
    return bounded(dot(tame(factor * tame(u)), tame(factor * tame(v))).squeeze(-1), u.dtype)


def length(p: Tensor, u: Tensor, c: Curv) -> Tensor:
    """Riemannian length λ_p|u| of a tangent vector at p: (..., n), (..., n) -> (...)."""
    return bounded(norm(tame(conformal(wide(p), c) * tame(u))).squeeze(-1), u.dtype)


def _gyro_denominator(x: Tensor, y: Tensor, c: Curv) -> Tensor:
    """1 + 2c x·y + c²|x|²|y|² = (1 − c|x||y|)² + c|λx + y/λ|² with λ² = |y|/|x|: positive also at the edge."""
    r, q = norm(x).clamp_min(tiny(x.dtype)), norm(y).clamp_min(tiny(x.dtype))
    balance = torch.sqrt(q) / torch.sqrt(r)
    gap = 1.0 - (c * r * q).clamp(max=edge(x.dtype))
    return gap**2 + c * norm(balance * x + y / balance) ** 2


def mobius_add(p: Tensor, q: Tensor, c: Curv) -> Tensor:
    """Möbius addition p ⊕ q: (..., n), (..., n) -> (..., n)."""
    x, y = project(wide(p), c), project(wide(q), c)
    xy, xx, yy = c * dot(x, y), c * dot(x, x), c * dot(y, y)
    top = (1.0 + 2.0 * xy + yy) * x + (1.0 - xx) * y
    return _inside(top / _gyro_denominator(x, y, c), c, p.dtype)


def mobius_scale(r: Curv, p: Tensor, c: Curv) -> Tensor:
    """Möbius scalar multiple r ⊗ p, the point at r times the radius: (..., n) -> (..., n)."""
    return expmap0(r * logmap0(p, c), c)


def mobius_matvec(matrix: Tensor, p: Tensor, c: Curv) -> Tensor:
    """Möbius matrix multiple M ⊗ p = exp₀(M log₀ p): (m, n), (..., n) -> (..., m)."""
    with torch.autocast(p.device.type, enabled=False):
        tangent = logmap0(wide(project(p, c)), c)
        return _inside(expmap0(tangent @ tame(matrix).to(tangent.dtype).mT, c), c, p.dtype)


def gyration(p: Tensor, q: Tensor, w: Tensor, c: Curv) -> Tensor:
    """The rotation gyr[p, q] w that makes Möbius addition associative: three (..., n) -> (..., n)."""
    return narrow(_gyration(project(wide(p), c), project(wide(q), c), tame(w), c), w.dtype)


def _gyration(p: Tensor, q: Tensor, w: Tensor, c: Curv) -> Tensor:
    pq, pw, qw = c * dot(p, q), c * dot(p, w), c * dot(q, w)
    pp, qq = c * dot(p, p), c * dot(q, q)
    along_p = -pw * qq + qw + 2.0 * pq * qw
    along_q = -qw * pp - pw
    return w + 2.0 * (along_p * p + along_q * q) / _gyro_denominator(p, q, c)


def expmap(p: Tensor, u: Tensor, c: Curv) -> Tensor:
    """Exponential map at p, p ⊕ tanh(√c λ_p|u|/2)/(√c|u|) u: (..., n), (..., n) -> (..., n)."""
    half = 0.5 * conformal(wide(p), c)
    return mobius_add(p, expmap0(half * tame(u), c).to(p.dtype), c)


def logmap(p: Tensor, q: Tensor, c: Curv) -> Tensor:
    """Logarithm at p, 2/λ_p · log₀(−p ⊕ q): (..., n), (..., n) -> (..., n)."""
    return (logmap0(mobius_add(-wide(p), wide(q), c), c) * 2.0 / conformal(wide(p), c)).to(p.dtype)


def geodesic(p: Tensor, q: Tensor, fraction: Curv, c: Curv) -> Tensor:
    """The point a given fraction of the way from p to q, p ⊕ (f ⊗ (−p ⊕ q)): (..., n), (..., n) -> (..., n)."""
    x, y = wide(p), wide(q)
    return mobius_add(x, mobius_scale(fraction, mobius_add(-x, y, c), c), c).to(p.dtype)


def transport(p: Tensor, q: Tensor, u: Tensor, c: Curv) -> Tensor:
    """Parallel transport of a tangent vector from p to q, (λ_p/λ_q) gyr[q, −p] u: three (..., n) -> (..., n)."""
    x, y = project(wide(p), c), project(wide(q), c)
    return narrow(_gyration(y, -x, tame(u), c) * (conformal(x, c) / conformal(y, c)), u.dtype)


def transport0(q: Tensor, u: Tensor, c: Curv) -> Tensor:
    """Parallel transport from the origin to q, (2/λ_q) u: (..., n), (..., n) -> (..., n)."""
    return (tame(u) * (2.0 / conformal(wide(q), c))).to(u.dtype)


def centroid(p: Tensor, weights: Tensor | None, c: Curv) -> Tensor:
    """Gyro-midpoint of (..., k, n) with non-negative weights (..., k) -> (..., n).

    ½ ⊗ Σ wᵢλᵢpᵢ / Σ wᵢ(λᵢ − 1), which is the image of the Lorentzian centroid under the isometry.
    """
    some(p)
    z, a, shrink = _polar(p, c)
    factor = 2.0 / _room(a)
    share = torch.ones_like(factor) if weights is None else wide(weights).to(z.dtype).unsqueeze(-1)
    top = (share * factor * shrink * z).sum(dim=-2)
    mean = top / (share * (factor - 1.0)).sum(dim=-2).clamp_min(tiny(z.dtype))
    return _inside(mean / (1.0 + sqrt(1.0 - c * dot(mean, mean))), c, p.dtype)


def to_lorentz(p: Tensor, c: Curv) -> Tensor:
    """Isometry to the Lorentz model (space part), x = 2p / (1 − c|p|²): (..., n) -> (..., n)."""
    z, a, shrink = _polar(p, c)
    return (2.0 / _room(a) * shrink * z).to(p.dtype)
