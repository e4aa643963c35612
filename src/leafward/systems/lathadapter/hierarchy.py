"""The settings of the latent hierarchy. Imports no torch."""

from __future__ import annotations

from leafward.config import Count, Natural, NonNegative, Positive, Settings


class HierarchyConfig(Settings, frozen=True):
    """How attributes refine classes and what the hierarchy losses ask; the defaults are the paper's where it gives
    any."""

    c: Positive = 0.1
    """Curvature −c."""
    refinement: NonNegative = 0.1
    """Strength β of the refinement of the classes by the attributes; 0 leaves it out."""
    margin: NonNegative = 0.1
    """Margin σ of the hierarchy loss."""
    temperature: Positive = 0.1
    """Temperature of the choice of the lowest common ancestor."""
    neighbours: Count = 3
    """k of the reciprocal k-nearest neighbours that count as positives."""
    triplets: Count = 10
    """Triplets sampled for each anchor."""
    queue: Natural = 256
    """Features of earlier batches that serve as further candidates; 0 for none."""
    normalise: bool = True
    """Unit features before the exponential map: the distance is then a function of the cosine. Without it the norm is
    the radius and can carry generality."""
    hierarchy_weight: NonNegative = 1.0
    """Weight of the two hierarchy losses; 0 leaves them out."""
