"""Curved spaces for PyTorch, right in float32. Needs torch and nothing more.

    from leafward.geometry import Lorentz
    H = Lorentz(c=1.0)
    x = H.expmap0(v)          # (..., n) -> (..., n+1)
    d = H.dist(x, y)

Pure functions live in `leafward.geometry.lorentz` (on space parts), `leafward.geometry.poincare` and
`leafward.geometry.euclidean`; the classes here are thin.
"""

from leafward.geometry.curvature import Curvature
from leafward.geometry.manifolds import Euclidean, Lorentz, Manifold, PoincareBall
from leafward.geometry.product import Product

__all__ = ["Curvature", "Euclidean", "Lorentz", "Manifold", "PoincareBall", "Product"]
