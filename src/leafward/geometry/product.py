"""Products of manifolds."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from leafward.geometry.manifolds import Manifold
from leafward.geometry.scalars import Curv, bounded, norm, wide


class Product(Manifold):
    """The product M₁ × M₂ × …: coordinates side by side, squared distances and inner products added up.

    ``Product((Lorentz(1.0), 8), (Euclidean(), 4))`` has dimension n = 12 and points of 9 + 4 coordinates.
    """

    def __init__(self, *factors: tuple[Manifold, int]) -> None:
        super().__init__()
        if not factors:
            raise ValueError("Product needs at least one (manifold, dimension) pair")
        for manifold, n in factors:
            if not isinstance(manifold, Manifold) or not isinstance(n, int) or n < 1:
                raise ValueError(f"each factor must be (Manifold, positive int), got ({manifold!r}, {n!r})")
        self.factors = nn.ModuleList(manifold for manifold, _ in factors)
        self.dims = tuple(n for _, n in factors)
        self.widths = tuple(manifold.ambient(n) for manifold, n in factors)

    def ambient(self, n: int) -> int:
        if n != sum(self.dims):
            raise ValueError(f"this product has dimension {sum(self.dims)}, got n={n}")
        return sum(self.widths)

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """Points (..., m) or origin tangents (..., n) as one tensor for each factor."""
        width = x.shape[-1]
        for sizes in (self.widths, self.dims):
            if width == sum(sizes):
                return x.split(sizes, dim=-1)
        raise ValueError(
            f"last dimension must be {sum(self.widths)} (points) or {sum(self.dims)} (tangents at the origin), "
            f"got {width}"
        )

    def _each(self, call: Callable[..., Tensor], *tensors: Tensor) -> list[Tensor]:
        parts = zip(*(self.split(t) for t in tensors), strict=True)
        return [call(manifold, *part) for manifold, part in zip(self.factors, parts, strict=True)]

    def _join(self, call: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        return torch.cat(self._each(call, *tensors), dim=-1)

    def _hypot(self, call: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        lengths = torch.stack([wide(d) for d in self._each(call, *tensors)], dim=-1)
        return norm(lengths).squeeze(-1).to(tensors[0].dtype)

    def project(self, x: Tensor) -> Tensor:
        return self._join(lambda m, x: m.project(x), x)

    def inner(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        parts = self._each(lambda m, x, u, v: wide(m.inner(x, u, v)), x, u, v)
        return bounded(torch.stack(parts).sum(dim=0), u.dtype)

    def expmap0(self, v: Tensor) -> Tensor:
        return self._join(lambda m, v: m.expmap0(v), v)

    def logmap0(self, x: Tensor) -> Tensor:
        return self._join(lambda m, x: m.logmap0(x), x)

    def expmap(self, x: Tensor, u: Tensor) -> Tensor:
        return self._join(lambda m, x, u: m.expmap(x, u), x, u)

    def logmap(self, x: Tensor, y: Tensor) -> Tensor:
        return self._join(lambda m, x, y: m.logmap(x, y), x, y)

    def norm(self, x: Tensor, u: Tensor) -> Tensor:
        return self._hypot(lambda m, x, u: m.norm(x, u), x, u)

    def dist(self, x: Tensor, y: Tensor, precise: bool = False) -> Tensor:
        return self._hypot(lambda m, x, y: m.dist(x, y, precise), x, y)

    def dist0(self, x: Tensor) -> Tensor:
        return self._hypot(lambda m, x: m.dist0(x), x)

    def cdist(self, x: Tensor, y: Tensor, precise: bool = True) -> Tensor:
        return self._hypot(lambda m, x, y: m.cdist(x, y, precise), x, y)

    def geodesic(self, x: Tensor, y: Tensor, fraction: Curv) -> Tensor:
        return self._join(lambda m, x, y: m.geodesic(x, y, fraction), x, y)

    def transport(self, x: Tensor, y: Tensor, u: Tensor) -> Tensor:
        return self._join(lambda m, x, y, u: m.transport(x, y, u), x, y, u)

    def transport0(self, y: Tensor, v: Tensor) -> Tensor:
        return self._join(lambda m, y, v: m.transport0(y, v), y, v)

    def centroid(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        return self._join(lambda m, x: m.centroid(x, weights), x)

    def random_normal(
        self, *shape: int, mean: Tensor | None = None, std: float = 1.0, generator: torch.Generator | None = None
    ) -> Tensor:
        means = self.split(mean) if mean is not None else [None] * len(self.dims)
        draws = []
        for manifold, n, at in zip(self.factors, self.dims, means, strict=True):
            assert isinstance(manifold, Manifold)
            draws.append(manifold.random_normal(*shape[:-1], n, mean=at, std=std, generator=generator))
        return torch.cat(draws, dim=-1)
