"""Flat space with the functions of the curved ones, so that every method has a Euclidean twin."""

from __future__ import annotations

import torch
from torch import Tensor

from leafward.geometry.scalars import angle, dot, norm, polar, sqrt, tame, tiny, wide


def dist(x: Tensor, y: Tensor) -> Tensor:
    """|x − y|: (..., n), (..., n) -> (...)."""
    return norm(tame(x) - tame(y)).squeeze(-1).to(x.dtype)


def dist0(x: Tensor) -> Tensor:
    """|x|: (..., n) -> (...)."""
    return polar(x)[1].squeeze(-1).to(x.dtype)


def cdist(x: Tensor, y: Tensor, precise: bool = True) -> Tensor:
    """All distances between two sets by one matrix product: (..., N, n), (..., M, n) -> (..., N, M).

    The product is taken in float64 unless ``precise=False``.
    """
    dtype = torch.float64 if precise else wide(x).dtype
    with torch.autocast(x.device.type, enabled=False):
        p, q = x.to(dtype), y.to(dtype)
        squared = dot(p, p) + dot(q, q).mT - 2.0 * (p @ q.mT)
    return sqrt(squared).to(x.dtype)


def centroid(x: Tensor, weights: Tensor | None = None) -> Tensor:
    """Weighted mean of (..., k, n) with non-negative weights (..., k) -> (..., n)."""
    if weights is None:
        return wide(x).mean(dim=-2).to(x.dtype)
    w = wide(weights).to(wide(x).dtype).unsqueeze(-1)
    return ((w * wide(x)).sum(dim=-2) / w.sum(dim=-2).clamp_min(tiny(w.dtype))).to(x.dtype)


def exterior_angle(x: Tensor, y: Tensor, root: Tensor | None = None) -> Tensor:
    """Angle at x between the ray from `root` (default: the origin) through x, going on, and y − x: -> (...).

    The entailment score of Radial Embedding (Alper & Averbuch-Elor 2024): zero where y lies straight behind x as
    seen from the root. Gradients are finite also at x = root and y = x.
    """
    z = tame(x)
    ray = z if root is None else z - tame(root)
    return angle(ray, tame(y) - z).to(x.dtype)


def half_aperture(x: Tensor, k: float = 0.1) -> Tensor:
    """Half-aperture asin(k/|x|) of a Euclidean cone at x, π/2 near the origin (Ganea et al. 2018, eq. 12)."""
    _, length = polar(x)
    highest = 1.0 - torch.finfo(length.dtype).eps
    return torch.asin((k / length.clamp_min(tiny(length.dtype))).clamp(max=highest)).squeeze(-1).to(x.dtype)
