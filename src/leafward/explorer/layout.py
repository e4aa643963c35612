"""From n dimensions to two, in hyperbolic and in flat space, and how much that bends the distances.

Shapes: N points, n the dimension. What comes out is (N, 2): coordinates in the unit Poincaré disk (the curvature is
scaled out) or in the plane.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from scipy.linalg import eigh
from torch import Tensor

from leafward.explorer.neighbours import Neighbours
from leafward.explorer.tsne import tsne
from leafward.geometry import Euclidean, Lorentz, Manifold, PoincareBall, poincare
from leafward.hierarchy.reconstruction import Distortion, distortion

#: Rows that the principal axes are taken from, at most; a random sample of more tells them as well.
AXIS_ROWS = 50_000
#: Numbers that are worked on at once in float64.
BLOCK = 1 << 23
#: Pairs on which distortion is measured.
PAIRS = 100_000
#: Points nearer than this share of the largest distance coincide, up to the rounding of float32.
COINCIDE = 1e-5
DISK = PoincareBall(1.0)


@dataclass(frozen=True)
class Layout:
    """Coordinates (N, 2), float64, in the `disk` or the plane, and one sentence on how they came about."""

    coordinates: np.ndarray
    disk: bool
    method: str

    @property
    def manifold(self) -> Manifold:
        """The space that the coordinates are points of."""
        return DISK if self.disk else Euclidean()


def principal_axes(vectors: Tensor, seed: int = 0) -> Tensor:
    """The two directions of largest mean square: (N, n) -> orthonormal columns (n, 2), the same for the same rows.

    One-dimensional vectors get a second axis of zeros.
    """
    if len(vectors) > AXIS_ROWS:
        rows = torch.randperm(len(vectors), generator=torch.Generator().manual_seed(seed))[:AXIS_ROWS]
        vectors = vectors[rows]
    if vectors.shape[1] == 1:
        return vectors.new_tensor([[1.0, 0.0]])
    gram = (vectors.T @ vectors).double().numpy()
    last = len(gram) - 1
    axes = torch.from_numpy(eigh(gram, subset_by_index=[last - 1, last])[1][:, ::-1].copy())
    largest = axes.gather(0, axes.abs().argmax(dim=0, keepdim=True))
    return (axes * torch.where(largest < 0, -1.0, 1.0)).to(vectors.dtype)


def disk_points(direction: Tensor, radius: Tensor) -> np.ndarray:
    """Points of the unit disk in given directions (N, 2) at given hyperbolic radii (N), c = 1: -> (N, 2)."""
    length = direction.norm(dim=1, keepdim=True)
    unit = torch.where(length > 0, direction / length, direction.new_tensor([1.0, 0.0]))
    reach = torch.tanh(0.5 * radius.double()).clamp(max=poincare.edge(torch.float64))
    return (reach[:, None] * unit.double()).numpy()


def hyperbolic_pca(manifold: Lorentz, points: Tensor, centre: Tensor | None = None) -> Layout:
    """Hyperbolic PCA about a point, default the origin, with the radius kept: points (N, n+1) -> the disk.

    The axes are those of tangent PCA, the principal directions of log_o(x) at the centre o (n+1); a point is drawn in
    the direction of its projection on them, at its own distance to o. The nearest point of the plane of the axes (the
    orthogonal projection) would instead pull everything to the centre, since in many dimensions most of a vector
    stands off any plane: it bends distances about twice as much (benchmarks/explorer.py), and it hides the level, which
    is what the radius tells. Two-dimensional points come back up to an isometry.
    """
    tangent = manifold.logmap0(points) if centre is None else _seen_from(manifold, centre, points)
    direction = tangent @ principal_axes(tangent)
    where = "the origin" if centre is None else "the points' centroid"
    return Layout(
        disk_points(direction, float(manifold.c) ** 0.5 * tangent.norm(dim=1)),
        True,
        f"hyperbolic PCA about {where}: direction from the two principal axes, distance to {where} kept",
    )


def _seen_from(manifold: Lorentz, centre: Tensor, points: Tensor) -> Tensor:
    """log at the centre (n+1), carried to the origin: points (N, n+1) -> tangent vectors there (N, n).

    In float64, block by block: the way from one far point to another is a difference of large numbers.
    """
    base = centre.double()
    origin = manifold.expmap0(torch.zeros_like(base[1:]))
    blocks = [
        manifold.transport(base, origin, manifold.logmap(base, block.double()))[:, 1:].to(points.dtype)
        for block in points.split(max(1, BLOCK // points.shape[1]))
    ]
    return torch.cat(blocks)


def flat_pca(points: Tensor) -> Layout:
    """Principal component analysis: (N, n) -> the plane."""
    centred = points - points.mean(dim=0)
    return Layout(scaled(centred @ principal_axes(centred)), False, "PCA to 2 dimensions")


def hyperbolic_tsne(near: Neighbours, start: Layout, progress: Callable[[float], None]) -> Layout:
    """A t-SNE-like layout of Lorentz points, from a layout in the disk, whose radii it holds."""
    plane = Lorentz(1.0)
    begin = plane.from_poincare(torch.from_numpy(start.coordinates))
    found = tsne(near, begin, plane, plane.dist0(begin), progress=progress)
    method = "t-SNE in the hyperbolic plane, begun with hyperbolic PCA: neighbours kept, radius held loosely"
    return Layout(plane.to_poincare(found).numpy(), True, method)


def flat_tsne(near: Neighbours, start: Layout, progress: Callable[[float], None]) -> Layout:
    """t-SNE of points of flat space, from a layout in the plane."""
    found = tsne(near, torch.from_numpy(start.coordinates), Euclidean(), None, progress=progress)
    return Layout(scaled(found), False, "t-SNE to 2 dimensions, begun with PCA: neighbours kept")


def scaled(flat: Tensor) -> np.ndarray:
    """Plane coordinates (N, 2) divided by the 99 % quantile of their norm: -> float64."""
    coordinates = flat.double().numpy()
    reach = float(np.quantile(np.linalg.norm(coordinates, axis=1), 0.99))
    return coordinates / (reach or 1.0)


def some_pairs(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """All pairs of different points where they are few, else a random sample of them."""
    if count * (count - 1) // 2 <= PAIRS:
        return np.triu_indices(count, 1)
    rng = np.random.default_rng(seed)
    first = rng.integers(0, count, PAIRS)
    return first, (first + rng.integers(1, count, PAIRS)) % count


def distances(manifold: Manifold, points: Tensor, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Distances in float64 of pairs of rows, block by block: points (N, m), rows (P), (P) -> (P)."""
    step = max(1, BLOCK // points.shape[1])
    blocks = [
        manifold.dist(points[first[start : start + step]].double(), points[second[start : start + step]].double())
        for start in range(0, len(first), step)
    ]
    return torch.cat(blocks).numpy()


def bent(layout: Layout, true: np.ndarray, first: np.ndarray, second: np.ndarray) -> tuple[Distortion, int] | None:
    """Distortion of the layout's distances against the true ones (P) of the pairs `first`, `second` (P).

    Pairs at distance zero, or at what float32 leaves of it, have no ratio and are left out; None where no other is
    there.
    """
    apart = true > COINCIDE * true.max(initial=0.0)
    if not apart.any():
        return None
    shown = distances(layout.manifold, torch.from_numpy(layout.coordinates), first[apart], second[apart])
    return distortion(shown, true[apart]), int(apart.sum())
