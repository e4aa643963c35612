"""Flat space with the functions of the curved ones, so that every method has a Euclidean twin."""

from __future__ import annotations

from torch import Tensor

from leafward.geometry.scalars import norm, polar, some, tame, tiny, wide


def dist(x: Tensor, y: Tensor) -> Tensor:
    """|x − y|: (..., n), (..., n) -> (...)."""
    return norm(tame(x) - tame(y)).squeeze(-1).to(x.dtype)


def dist0(x: Tensor) -> Tensor:
    """|x|: (..., n) -> (...)."""
    return polar(x)[1].squeeze(-1).to(x.dtype)


def centroid(x: Tensor, weights: Tensor | None = None) -> Tensor:
    """Weighted mean of (..., k, n) with non-negative weights (..., k) -> (..., n)."""
    some(x)
    if weights is None:
        return wide(x).mean(dim=-2).to(x.dtype)
    w = wide(weights).to(wide(x).dtype).unsqueeze(-1)
    return ((w * wide(x)).sum(dim=-2) / w.sum(dim=-2).clamp_min(tiny(w.dtype))).to(x.dtype)
