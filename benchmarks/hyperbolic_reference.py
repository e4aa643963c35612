"""Hyperbolic geometry at 50 digits with mpmath, written from the definitions, to compare float32 code against."""

from __future__ import annotations

from typing import Any

import mpmath as mp
import torch
from torch import Tensor

mp.mp.dps = 50
Number = Any  # mpmath has no types; an mpf


def _numbers(row: Tensor) -> list[Number]:
    return [mp.mpf(float(value)) for value in row]


def _lift(tangent: Tensor, c: Number) -> list[Number]:
    """exp₀ of a tangent row as the full point [t, s...]."""
    v = _numbers(tangent)
    root = mp.sqrt(c)
    r = mp.sqrt(mp.fsum(a * a for a in v))
    factor = mp.sinh(root * r) / (root * r) if r else mp.mpf(1)
    return [mp.cosh(root * r) / root, *(factor * a for a in v)]


def minkowski(x: list[Number], y: list[Number]) -> Number:
    return -x[0] * y[0] + mp.fsum(a * b for a, b in zip(x[1:], y[1:], strict=True))


def distance(u: Tensor, v: Tensor, c: float = 1.0) -> list[Number]:
    """Row by row, the distance between exp₀(u) and exp₀(v), by the arcosh definition."""
    curvature = mp.mpf(c)
    pairs = ((_lift(a, curvature), _lift(b, curvature)) for a, b in zip(u, v, strict=True))
    return [mp.acosh(max(-curvature * minkowski(x, y), mp.mpf(1))) / mp.sqrt(curvature) for x, y in pairs]


def centroid(tangents: Tensor, weights: Tensor, c: float) -> list[Number]:
    """Space part of the Lorentzian centroid of exp₀(rows)."""
    curvature = mp.mpf(c)
    points = [_lift(row, curvature) for row in tangents]
    w = _numbers(weights)
    total = [mp.fsum(wi * p[k] for wi, p in zip(w, points, strict=True)) for k in range(len(points[0]))]
    scale = mp.sqrt(-curvature * minkowski(total, total))
    return [value / scale for value in total[1:]]


def exterior_angle(u: Tensor, v: Tensor, c: float) -> Number:
    """π minus the angle at exp₀(u) of the triangle (origin, exp₀(u), exp₀(v)), by the law of cosines."""
    root = mp.sqrt(mp.mpf(c))
    side_x = root * mp.sqrt(mp.fsum(a * a for a in _numbers(u)))
    side_y = root * mp.sqrt(mp.fsum(a * a for a in _numbers(v)))
    between = root * distance(u[None], v[None], c)[0]
    cosine = (mp.cosh(side_x) * mp.cosh(between) - mp.cosh(side_y)) / (mp.sinh(side_x) * mp.sinh(between))
    return mp.pi - mp.acos(max(min(cosine, mp.mpf(1)), mp.mpf(-1)))


def worst(got: Tensor, expected: list[Number]) -> float:
    """Largest relative error."""
    return max(float(abs(mp.mpf(float(g)) - e) / e) for g, e in zip(got.flatten(), expected, strict=True))


def directions(rows: int, n: int, seed: int) -> Tensor:
    """Seeded float32 unit vectors."""
    x = torch.randn(rows, n, generator=torch.Generator().manual_seed(seed))
    return x / x.norm(dim=-1, keepdim=True)
