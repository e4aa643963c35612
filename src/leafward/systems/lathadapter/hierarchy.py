"""The settings of the latent hierarchy. Imports no torch."""

from __future__ import annotations

from typing import Literal

from leafward.config import Count, Natural, NonNegative, Positive, Settings, Some

Term = Literal["cross_entropy", "distance_entropy", "image_attribute", "attribute_class"]
TERMS: tuple[Term, ...] = ("cross_entropy", "distance_entropy", "image_attribute", "attribute_class")
"""L_ecls, L_hcls, L_va and L_at."""


class HierarchyConfig(Settings, frozen=True):
    """How attributes refine classes and what the hierarchy losses ask; the defaults are the paper's where it gives
    any."""

    c: Positive = 0.1
    """Curvature −c."""
    learn_c: bool = False
    """Learn c from there, within a factor of 100; the twin has none."""
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
    terms: Some[Term] = TERMS
    """Losses that are used."""
    degree: Literal["all", "classes"] = "all"
    """Degrees of the refinement: over classes and attributes, or as the paper prints them, over the classes alone."""
    choice: Literal["tempered", "printed"] = "tempered"
    """Common ancestors by a Gumbel-softmax over −max(d)/temperature, HIER's, or over exp(−max(d)), as printed."""
    exact: Count = 2048
    """Up to so many classes everything is computed between all of them."""
    groups: Count = 8
    """Of more classes: groups through whose means the refinement lets classes see each other."""
    ancestors: Count = 256
    """Of more classes: those that the hierarchy loss draws as possible ancestors of attributes, anew in each step."""
