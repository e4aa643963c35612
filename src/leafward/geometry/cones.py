"""Entailment cones (Ganea et al. 2018, "Hyperbolic Entailment Cones"): their half-aperture, and the exterior angle.

The cone of a point opens away from the origin; y lies in the cone of x where the exterior angle at x is at most the
half-aperture of x. Points are given by their space parts (..., n), as in `leafward.geometry.lorentz`, and the curvature
c comes last: a number, a tensor that broadcasts against (..., 1), or None for flat space. Angles of all pairs of two
sets: `leafward.geometry.pairs.exterior_angles`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from leafward.geometry.lorentz import _cosh, _radial_chord
from leafward.geometry.scalars import Curv, angle, atan2, norm, polar, tame, tiny, unit


def half_aperture(x: Tensor, c: Curv | None, k: float = 0.1) -> Tensor:
    """Half-aperture of the cone at x, π/2 near the origin: (..., n) -> (...).

    asin(2k / sinh ρ) with ρ = √c · radius (Ganea et al. 2018, eq. 25); in flat space asin(k / |x|) (eq. 12).
    """
    length = polar(x)[1]
    sine = k / length.clamp_min(tiny(length.dtype)) if c is None else _curved_sine(length, c, k)
    highest = 1.0 - torch.finfo(sine.dtype).eps  # keeps the gradient of asin finite
    return torch.asin(sine.clamp(max=highest)).squeeze(-1).to(x.dtype)


def _curved_sine(length: Tensor, c: Curv, k: float) -> Tensor:
    a = c**0.5 * length
    return 2.0 * k / a.clamp_min(tiny(a.dtype))


def exterior_angle(x: Tensor, y: Tensor, c: Curv | None) -> Tensor:
    """Angle at x between the ray from the origin through x, going on, and the geodesic to y: -> (...) in [0, π].

    Zero where y lies straight behind x, and by convention where x is the origin of a curved space. It is
    atan2(sinh ρ_y sin θ, sinh(ρ_y − ρ_x) − 2 cosh ρ_x sinh ρ_y sin²(θ/2)).
    """
    if c is None:
        return flat_exterior_angle(x, y)
    (p, r), (q, s) = polar(x), polar(y)
    a, b = c**0.5 * r, c**0.5 * s
    ray, way = unit(p, r), unit(q, s)
    sine, cosine = 0.5 * norm(ray - way), 0.5 * norm(ray + way)  # of θ/2
    gap = _radial_chord(b, a)
    outward = gap * torch.sqrt(1.0 + 0.25 * gap * gap) - 2.0 * _cosh(a) * b * sine * sine
    found = atan2(2.0 * b * sine * cosine, outward)
    return torch.where(a > tiny(p.dtype), found, 0.0).squeeze(-1).to(x.dtype)


def flat_exterior_angle(x: Tensor, y: Tensor, root: Tensor | None = None) -> Tensor:
    """Angle at x between the ray from `root` (default: the origin) through x, going on, and y − x: -> (...).

    The entailment score of Radial Embedding (Alper & Averbuch-Elor 2024): zero where y lies straight behind x as
    seen from the root. Gradients are finite also at x = root and y = x.
    """
    z = tame(x)
    ray = z if root is None else z - tame(root)
    return angle(ray, tame(y) - z).to(x.dtype)
