"""How image and text features are compared, and what their radius can and cannot do there.

The hyperbolic radius of a feature z is Rad(exp₀(z)) = 2‖z‖ on the Poincaré ball, for every curvature. A cosine score
divides by ‖z‖ and so cannot see it. Two scores beside the paper's form let it matter: the Lorentz distance, and the
cosine with a term for the difference of radii.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import normalize

from leafward.errors import UsageError, need
from leafward.geometry import pairs
from leafward.geometry.scalars import Curv, wide

Score = Literal["cosine", "lorentz", "cosine+radius"]


def similarity(image: Tensor, text: Tensor, score: Score = "cosine", *, c: float = 0.1, weight: float = 0.1) -> Tensor:
    """Scores of every image for every text, greater is nearer: (B, d), (C, d) -> (B, C), in float32 or better.

    "cosine": the paper's. "lorentz": minus the geodesic distance of exp₀(z) at curvature −c. "cosine+radius": the
    cosine minus `weight` times the difference of the radii.
    """
    if score not in get_args(Score):
        raise UsageError(f"score must be one of {', '.join(get_args(Score))}, got {score!r}")
    if score == "lorentz":
        need(c > 0, "c", "a positive number", c)
        return -distances(image, text, c)
    cosine = normalize(wide(image), dim=-1) @ normalize(wide(text), dim=-1).mT
    if score == "cosine":
        return cosine
    return cosine - weight * (hyperbolic_radius(image)[:, None] - hyperbolic_radius(text)).abs()


def distances(x: Tensor, y: Tensor, c: Curv | None) -> Tensor:
    """Distances of exp₀(x) and exp₀(y) on the Poincaré ball, from the features: (N, d), (M, d) -> (N, M), in float32
    or better; without a curvature (None) the Euclidean ones of 2x and 2y, which are the limit c -> 0.

    `leafward.geometry.pairs.tangent_distances`, in whose unit of length a tangent of the ball is twice as long.
    """
    return pairs.tangent_distances(2.0 * wide(x), 2.0 * wide(y), c)


def hyperbolic_radius(features: Tensor) -> Tensor:
    """Rad(exp₀(z)) = 2‖z‖, whatever the curvature: (..., d) -> (...)."""
    return 2.0 * torch.linalg.vector_norm(wide(features), dim=-1)


@dataclass(frozen=True)
class Radii:
    """Hyperbolic radii of a set of features."""

    count: int
    mean: float
    deviation: float
    low: float
    """5 % quantile."""
    median: float
    high: float
    """95 % quantile."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def radii(features: Tensor) -> Radii:
    """Summary of the hyperbolic radii of features (N, d): before and after an adapter, of images and of texts."""
    if features.ndim != 2 or not len(features):
        raise UsageError(f"features must be (N, d) with N ≥ 1, got shape {tuple(features.shape)}")
    radius = hyperbolic_radius(features).double()
    low, median, high = torch.quantile(radius, radius.new_tensor([0.05, 0.5, 0.95])).tolist()
    deviation = float(radius.std()) if len(radius) > 1 else 0.0
    return Radii(len(radius), float(radius.mean()), deviation, low, median, high)


def radius_sweep(
    image: Tensor, text: Tensor, labels: Tensor, radii: Sequence[float], score: Score = "cosine", **options: float
) -> list[dict[str, float]]:
    """Top-1 accuracy with the texts brought to each mean radius (the paper's Fig. 5, as an experiment on the score).

    Images (B, d), texts (C, d), labels (B). With the cosine the curve is flat by construction.
    """
    mean = hyperbolic_radius(text).mean()
    rows = []
    for radius in radii:
        found = similarity(image, text * (radius / mean), score, **options).argmax(dim=1)
        rows.append({"radius": float(radius), "accuracy": float((found == labels).float().mean())})
    return rows
