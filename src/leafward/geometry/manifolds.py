"""Thin classes over the pure functions: one interface for Lorentz, Poincaré ball, Euclidean and products.

Shapes: n is the dimension of the space; a point has ``ambient(n)`` coordinates (n + 1 for Lorentz, time first).
``expmap0`` and ``logmap0`` speak of tangent vectors at the origin by their n free coordinates; all other tangent
vectors have as many coordinates as a point.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from leafward.geometry import cones, euclidean, lorentz, pairs, poincare
from leafward.geometry.curvature import Curvature, checked
from leafward.geometry.sampling import ball_radius, directions
from leafward.geometry.scalars import Curv, bounded, dot, tame, wide


class Manifold(nn.Module, ABC):
    """A complete Riemannian manifold with an origin."""

    #: length of a unit coordinate vector at the origin (2 on the Poincaré ball, where λ₀ = 2)
    origin_scale = 1.0

    @abstractmethod
    def ambient(self, n: int) -> int:
        """How many coordinates a point of the n-dimensional space has."""

    @abstractmethod
    def project(self, x: Tensor) -> Tensor:
        """The nearest sensible point to coordinates that drifted off: (..., m) -> (..., m)."""

    @abstractmethod
    def inner(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        """Riemannian inner product of tangent vectors at x: three (..., m) -> (...)."""

    @abstractmethod
    def expmap0(self, v: Tensor) -> Tensor:
        """Exponential map at the origin: (..., n) -> (..., m)."""

    @abstractmethod
    def logmap0(self, x: Tensor) -> Tensor:
        """Inverse of `expmap0`: (..., m) -> (..., n)."""

    @abstractmethod
    def expmap(self, x: Tensor, u: Tensor) -> Tensor:
        """Exponential map at x: (..., m), (..., m) -> (..., m)."""

    @abstractmethod
    def logmap(self, x: Tensor, y: Tensor) -> Tensor:
        """Inverse of `expmap` in its second argument: (..., m), (..., m) -> (..., m)."""

    @abstractmethod
    def norm(self, x: Tensor, u: Tensor) -> Tensor:
        """Riemannian length of a tangent vector at x: (..., m), (..., m) -> (...)."""

    @abstractmethod
    def dist(self, x: Tensor, y: Tensor, precise: bool = False) -> Tensor:
        """Geodesic distance, in float64 inside if `precise`: (..., m), (..., m) -> (...)."""

    @abstractmethod
    def dist0(self, x: Tensor) -> Tensor:
        """Distance to the origin, the radius: (..., m) -> (...)."""

    @abstractmethod
    def cdist(self, x: Tensor, y: Tensor, precise: bool = True) -> Tensor:
        """All distances between two sets: (..., N, m), (..., M, m) -> (..., N, M)."""

    @abstractmethod
    def geodesic(self, x: Tensor, y: Tensor, fraction: Curv) -> Tensor:
        """The point a given fraction of the way from x to y; `fraction` broadcasts against (..., 1)."""

    @abstractmethod
    def transport(self, x: Tensor, y: Tensor, u: Tensor) -> Tensor:
        """Parallel transport of u from x to y: three (..., m) -> (..., m)."""

    @abstractmethod
    def transport0(self, y: Tensor, v: Tensor) -> Tensor:
        """Parallel transport of v (..., n) from the origin to y: -> (..., m)."""

    @abstractmethod
    def centroid(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """Weighted centre of (..., k, m), weights (..., k) non-negative -> (..., m)."""

    def random_normal(
        self,
        *shape: int,
        mean: Tensor | None = None,
        std: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Wrapped normal: a Gaussian of width `std` at the origin, carried to `mean`: -> (*shape[:-1], m).

        `shape` ends in n. dtype and device follow `mean`, else the generator and torch's default.
        """
        like = _like(mean, generator)
        v = std / self.origin_scale * torch.randn(shape, generator=generator, **like)
        return self.expmap0(v) if mean is None else self.expmap(mean, self.transport0(mean, v))


def _like(x: Tensor | None, generator: torch.Generator | None) -> dict:
    if x is not None:
        return {"dtype": x.dtype, "device": x.device}
    return {"dtype": torch.get_default_dtype(), "device": generator.device if generator is not None else None}


class SpaceForm(Manifold):
    """A space of constant curvature −c, c ≥ 0: what such a one has beyond the interface of all manifolds."""

    @property
    @abstractmethod
    def c(self) -> Curv | None:
        """The curvature constant: sectional curvature is -c. None in flat space."""

    @abstractmethod
    def _space_part(self, x: Tensor) -> Tensor:
        """What the functions of `cones` and `pairs` take for points: (..., m) -> (..., n)."""

    def half_aperture(self, x: Tensor, k: float = 0.1) -> Tensor:
        """`cones.half_aperture` of the entailment cone at x: (..., m) -> (...)."""
        return cones.half_aperture(self._space_part(x), self.c, k).to(x.dtype)

    def exterior_angle(self, x: Tensor, y: Tensor) -> Tensor:
        """Angle at x between the ray from the origin, going on, and the way to y: -> (...) in [0, π]."""
        return cones.exterior_angle(self._space_part(x), self._space_part(y), self.c).to(x.dtype)

    def exterior_angles(self, lower: Tensor, upper: Tensor) -> Tensor:
        """`exterior_angle(upper, lower)` of all pairs: (..., N, m), (..., M, m) -> (..., N, M)."""
        return pairs.exterior_angles(self._space_part(lower), self._space_part(upper), self.c).to(lower.dtype)

    def tangent_dist(self, u: Tensor, v: Tensor) -> Tensor:
        """`dist(expmap0(u), expmap0(v))` without the points, which round what lies far out: (..., n) twice -> (...)."""
        s = self.origin_scale
        return euclidean.dist(u, v) if self.c is None else lorentz.tangent_dist(s * u, s * v, self.c)

    def tangent_cdist(self, u: Tensor, v: Tensor, precise: bool = True) -> Tensor:
        """The same for all pairs of two sets, `pairs.tangent_distances`: (..., N, n), (..., M, n) -> (..., N, M)."""
        s = self.origin_scale
        return pairs.tangent_distances(s * u, s * v, self.c, precise)

    def random_uniform(self, *shape: int, radius: float, generator: torch.Generator | None = None) -> Tensor:
        """Uniform in volume over the ball of given radius about the origin: -> (*shape[:-1], m); `shape` ends in n."""
        if not shape:
            raise ValueError("shape must end in the dimension n, got no numbers")
        if not radius > 0.0:
            raise ValueError(f"radius must be positive, got {radius}")
        like = _like(None, generator)
        root = 0.0 if self.c is None else float(self.c) ** 0.5
        lengths = ball_radius(shape[:-1], shape[-1], radius, root, generator, **like)
        return self.expmap0(lengths / self.origin_scale * directions(shape, generator, **like))


class _Curved(SpaceForm):
    """What the two hyperbolic models share: the curvature, a number or a learned `Curvature`."""

    def __init__(self, c: float | Curvature = 1.0) -> None:
        super().__init__()
        self._c = checked(c)

    @property
    def c(self) -> Curv:
        """The curvature constant: sectional curvature is -c."""
        return self._c() if isinstance(self._c, Curvature) else self._c

    def extra_repr(self) -> str:
        return "" if isinstance(self._c, Curvature) else f"c={self._c}"


class Lorentz(_Curved):
    """The hyperboloid -t² + |s|² = -1/c; points [t; s] (..., n+1), time first.

    Only space coordinates are read, the time coordinate is implied by them, so points never leave the manifold.
    """

    def ambient(self, n: int) -> int:
        return n + 1

    def lift(self, space: Tensor) -> Tensor:
        """The point with a given space part: (..., n) -> (..., n+1)."""
        return lorentz.lift(space, self.c)

    def time(self, space: Tensor) -> Tensor:
        """The time coordinate that belongs to a space part: (..., n) -> (..., 1)."""
        return lorentz.time(space, self.c)

    def project(self, x: Tensor) -> Tensor:
        return self.lift(x[..., 1:])

    def minkowski(self, x: Tensor, y: Tensor) -> Tensor:
        """The ambient product ⟨x,y⟩_L = -x_t y_t + x_s·y_s: (..., n+1), (..., n+1) -> (...)."""
        p, q = tame(x), tame(y)
        return (dot(p[..., 1:], q[..., 1:]) - p[..., :1] * q[..., :1]).squeeze(-1).to(x.dtype)

    def inner(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        return lorentz.inner(x[..., 1:], u[..., 1:], v[..., 1:], self.c)

    def norm(self, x: Tensor, u: Tensor) -> Tensor:
        return lorentz.length(x[..., 1:], u[..., 1:], self.c)

    def _tangent(self, x: Tensor, space: Tensor) -> Tensor:
        """Complete a tangent vector at x from its space part: u_t = x_s·u_s / t."""
        point, u = self.lift(wide(x[..., 1:])), wide(space)
        return torch.cat([dot(point[..., 1:], u) / point[..., :1], u], dim=-1).to(space.dtype)

    def expmap0(self, v: Tensor) -> Tensor:
        return lorentz.expmap0_lifted(v, self.c)

    def logmap0(self, x: Tensor) -> Tensor:
        return lorentz.logmap0(x[..., 1:], self.c)

    def expmap(self, x: Tensor, u: Tensor) -> Tensor:
        return lorentz.lift(lorentz.expmap(x[..., 1:], u[..., 1:], self.c), self.c)

    def logmap(self, x: Tensor, y: Tensor) -> Tensor:
        return self._tangent(x, lorentz.logmap(x[..., 1:], y[..., 1:], self.c))

    def dist(self, x: Tensor, y: Tensor, precise: bool = False) -> Tensor:
        return lorentz.dist(x[..., 1:], y[..., 1:], self.c, precise)

    def dist0(self, x: Tensor) -> Tensor:
        return lorentz.dist0(x[..., 1:], self.c)

    def cdist(self, x: Tensor, y: Tensor, precise: bool = True) -> Tensor:
        return pairs.distances(x[..., 1:], y[..., 1:], self.c, precise)

    def geodesic(self, x: Tensor, y: Tensor, fraction: Curv) -> Tensor:
        return lorentz.lift(lorentz.geodesic(x[..., 1:], y[..., 1:], fraction, self.c), self.c)

    def transport(self, x: Tensor, y: Tensor, u: Tensor) -> Tensor:
        return self._tangent(y, lorentz.transport(x[..., 1:], y[..., 1:], u[..., 1:], self.c))

    def transport0(self, y: Tensor, v: Tensor) -> Tensor:
        return self._tangent(y, lorentz.transport0(y[..., 1:], v, self.c))

    def centroid(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        return lorentz.lift(lorentz.centroid(x[..., 1:], weights, self.c), self.c)

    def residual(self, x: Tensor, y: Tensor, weight: Curv = 1.0) -> Tensor:
        """The normalised Lorentzian sum of x and weight · y: (..., n+1), (..., n+1) -> (..., n+1)."""
        return lorentz.lift(lorentz.residual(x[..., 1:], y[..., 1:], weight, self.c), self.c)

    def rescale(self, x: Tensor, c: Curv) -> Tensor:
        """The homothetic point of the Lorentz model with curvature constant `c`."""
        return lorentz.lift(lorentz.rescale(x[..., 1:], self.c, c), c)

    def to_poincare(self, x: Tensor) -> Tensor:
        """Isometry to the Poincaré ball of equal curvature: (..., n+1) -> (..., n)."""
        return lorentz.to_poincare(x[..., 1:], self.c)

    def from_poincare(self, p: Tensor) -> Tensor:
        """Isometry from the Poincaré ball of equal curvature: (..., n) -> (..., n+1)."""
        return lorentz.lift(poincare.to_lorentz(p, self.c), self.c)

    def _space_part(self, x: Tensor) -> Tensor:
        return x[..., 1:]


class PoincareBall(_Curved):
    """The open ball |p| < 1/√c with the metric λ_p² |dp|²."""

    origin_scale = 2.0

    def ambient(self, n: int) -> int:
        return n

    def project(self, x: Tensor) -> Tensor:
        return poincare.project(x, self.c)

    def conformal(self, x: Tensor) -> Tensor:
        """Conformal factor λ_x = 2/(1 − c|x|²): (..., n) -> (..., 1)."""
        return poincare.conformal(x, self.c)

    def inner(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        return poincare.inner(x, u, v, self.c)

    def expmap0(self, v: Tensor) -> Tensor:
        return poincare.expmap0(v, self.c)

    def logmap0(self, x: Tensor) -> Tensor:
        return poincare.logmap0(x, self.c)

    def expmap(self, x: Tensor, u: Tensor) -> Tensor:
        return poincare.expmap(x, u, self.c)

    def logmap(self, x: Tensor, y: Tensor) -> Tensor:
        return poincare.logmap(x, y, self.c)

    def norm(self, x: Tensor, u: Tensor) -> Tensor:
        return poincare.length(x, u, self.c)

    def dist(self, x: Tensor, y: Tensor, precise: bool = False) -> Tensor:
        return poincare.dist(x, y, self.c, precise)

    def dist0(self, x: Tensor) -> Tensor:
        return poincare.dist0(x, self.c)

    def cdist(self, x: Tensor, y: Tensor, precise: bool = True) -> Tensor:
        return pairs.ball_distances(x, y, self.c, precise)

    def geodesic(self, x: Tensor, y: Tensor, fraction: Curv) -> Tensor:
        return poincare.geodesic(x, y, fraction, self.c)

    def transport(self, x: Tensor, y: Tensor, u: Tensor) -> Tensor:
        return poincare.transport(x, y, u, self.c)

    def transport0(self, y: Tensor, v: Tensor) -> Tensor:
        return poincare.transport0(y, v, self.c)

    def centroid(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        return poincare.centroid(x, weights, self.c)

    def mobius_add(self, x: Tensor, y: Tensor) -> Tensor:
        """Möbius addition x ⊕ y: (..., n), (..., n) -> (..., n)."""
        return poincare.mobius_add(x, y, self.c)

    def mobius_scale(self, r: Curv, x: Tensor) -> Tensor:
        """Möbius scalar multiple r ⊗ x: (..., n) -> (..., n)."""
        return poincare.mobius_scale(r, x, self.c)

    def mobius_matvec(self, matrix: Tensor, x: Tensor) -> Tensor:
        """Möbius matrix multiple M ⊗ x: (m, n), (..., n) -> (..., m)."""
        return poincare.mobius_matvec(matrix, x, self.c)

    def rescale(self, x: Tensor, c: Curv) -> Tensor:
        """The homothetic point of the ball with curvature constant `c`."""
        return lorentz.rescale(x, self.c, c)

    def to_lorentz(self, x: Tensor) -> Tensor:
        """Isometry to the Lorentz model of equal curvature: (..., n) -> (..., n+1)."""
        return lorentz.lift(poincare.to_lorentz(x, self.c), self.c)

    def _space_part(self, x: Tensor) -> Tensor:
        return poincare.to_lorentz(wide(x), self.c)


class Euclidean(SpaceForm):
    """Flat space R^n, the twin of the curved ones."""

    @property
    def c(self) -> None:
        return None

    def ambient(self, n: int) -> int:
        return n

    def project(self, x: Tensor) -> Tensor:
        return x

    def inner(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        return bounded(dot(tame(u), tame(v)).squeeze(-1), u.dtype)

    def expmap0(self, v: Tensor) -> Tensor:
        return v

    def logmap0(self, x: Tensor) -> Tensor:
        return x

    def expmap(self, x: Tensor, u: Tensor) -> Tensor:
        return x + u

    def logmap(self, x: Tensor, y: Tensor) -> Tensor:
        return y - x

    def norm(self, x: Tensor, u: Tensor) -> Tensor:
        return euclidean.dist0(u)

    def dist(self, x: Tensor, y: Tensor, precise: bool = False) -> Tensor:
        return euclidean.dist(x, y)

    def dist0(self, x: Tensor) -> Tensor:
        return euclidean.dist0(x)

    def cdist(self, x: Tensor, y: Tensor, precise: bool = True) -> Tensor:
        return pairs.distances(x, y, None, precise)

    def geodesic(self, x: Tensor, y: Tensor, fraction: Curv) -> Tensor:
        return x + fraction * (y - x)

    def transport(self, x: Tensor, y: Tensor, u: Tensor) -> Tensor:
        return u

    def transport0(self, y: Tensor, v: Tensor) -> Tensor:
        return v

    def centroid(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        return euclidean.centroid(x, weights)

    def _space_part(self, x: Tensor) -> Tensor:
        return x

    def exterior_angle(self, x: Tensor, y: Tensor, root: Tensor | None = None) -> Tensor:
        """As in every space form; `root` (..., n) replaces the origin, as Radial Embedding does."""
        return cones.flat_exterior_angle(x, y, root)


#: The spaces that are chosen by name; each is made with its curvature but for flat space, which has none.
SPACES: dict[str, type[SpaceForm]] = {"lorentz": Lorentz, "poincare": PoincareBall, "euclidean": Euclidean}


def space_of(geometry: str, c: float | Curvature = 1.0) -> SpaceForm:
    """The space that a name of `SPACES` stands for; flat space has no curvature and takes no notice of c."""
    if geometry not in SPACES:
        raise ValueError(f"geometry must be one of {', '.join(SPACES)}, got {geometry!r}")
    return Euclidean() if geometry == "euclidean" else SPACES[geometry](c)
