"""Curved spaces for PyTorch, right in float32. Needs torch and nothing more.

    from leafward.geometry import Lorentz
    H = Lorentz(c=1.0)
    x = H.expmap0(v)          # (..., n) -> (..., n+1)
    d = H.dist(x, y)

Pure functions live in `leafward.geometry.lorentz` (on space parts), `leafward.geometry.poincare` and
`leafward.geometry.euclidean`, those of all pairs of two sets in `leafward.geometry.pairs`, entailment cones in
`leafward.geometry.cones`; the classes here are thin. `SPACES` names those of constant curvature.
"""

from leafward.geometry.curvature import Curvature
from leafward.geometry.manifolds import SPACES, Euclidean, Lorentz, Manifold, PoincareBall, SpaceForm, space_of
from leafward.geometry.product import Product

__all__ = [
    "SPACES",
    "Curvature",
    "Euclidean",
    "Lorentz",
    "Manifold",
    "PoincareBall",
    "Product",
    "SpaceForm",
    "space_of",
]
