"""The settings of Radial Embedding. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from leafward.adapters._checks import check_numbers
from leafward.errors import UsageError

Geometry = Literal["euclidean", "lorentz"]


@dataclass(frozen=True)
class RadialConfig:
    """The loss and its weights; the defaults are those of the authors' code."""

    loss: Literal["radial", "cone"] = "radial"
    """radial: exterior angles of positives against negatives; cone: the entailment-cone loss."""
    geometry: Geometry = "euclidean"
    """Space of the angles and cones: flat about the root, or hyperbolic with the root as its origin."""
    root: Literal["text", "learned"] = "text"
    """The root: the embedding of the root's text, with its gradient, or a free vector that starts there."""
    pull: float = 10.0
    """Weight of the distance to the frozen model."""
    contrast: float = 1.0
    """Weight of the mean angles (radial), or of the cone loss (cone)."""
    hardest: float = 1.0
    """Weight of the hardest pairs of the batch (radial only)."""
    c: float = 1.0
    """Curvature −c of the hyperbolic space."""
    aperture: float = 0.1
    """Constant k of the cones; their half-aperture is asin(k/radius) in flat space."""
    margin: float = 0.01
    """How far outside a cone a negative should lie, in radians (cone only)."""

    def __post_init__(self) -> None:
        for name, allowed in (
            ("loss", ("radial", "cone")),
            ("geometry", ("euclidean", "lorentz")),
            ("root", ("text", "learned")),
        ):
            if getattr(self, name) not in allowed:
                raise UsageError(f"{name} must be {' or '.join(allowed)}, got {getattr(self, name)!r}")
        check_numbers(self, "pull", "contrast", "hardest", "margin")
        check_numbers(self, "c", "aperture", positive=True)
