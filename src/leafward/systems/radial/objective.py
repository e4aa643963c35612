"""The settings of Radial Embedding. Imports no torch."""

from __future__ import annotations

from typing import Literal

from leafward.config import NonNegative, Positive, Settings

Geometry = Literal["euclidean", "lorentz"]


class RadialConfig(Settings, frozen=True):
    """The loss and its weights; the defaults are those of the authors' code."""

    loss: Literal["radial", "cone"] = "radial"
    """radial: exterior angles of positives against negatives; cone: the entailment-cone loss."""
    geometry: Geometry = "euclidean"
    """Space of the angles and cones: flat about the root, or hyperbolic with the root as its origin."""
    root: Literal["text", "learned"] = "text"
    """The root: the embedding of the root's text, with its gradient, or a free vector that starts there."""
    pull: NonNegative = 10.0
    """Weight of the distance to the frozen model."""
    contrast: NonNegative = 1.0
    """Weight of the mean angles (radial), or of the cone loss (cone)."""
    hardest: NonNegative = 1.0
    """Weight of the hardest pairs of the batch (radial only)."""
    c: Positive = 1.0
    """Curvature −c of the hyperbolic space."""
    aperture: Positive = 0.1
    """Constant k of the cones; their half-aperture is asin(k/radius) in flat space."""
    margin: NonNegative = 0.01
    """How far outside a cone a negative should lie, in radians (cone only)."""
