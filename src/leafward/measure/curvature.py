"""The curvature of best fit: of all spaces of constant curvature κ = −c, which one holds these distances best?

A space of curvature κ and dimension r holds n points with distances D exactly where a matrix of D has the right
signature:

    κ = −c < 0   cosh(√c D)   one positive eigenvalue, at most r negative ones       (hyperbolic)
    κ = 0        −½ J D² J    at most r positive eigenvalues, J = I − 11ᵀ/n           (classical scaling)
    κ > 0        cos(√κ D)    at most r + 1 positive eigenvalues, none negative       (sphere)

Points are read off the leading eigenvectors, brought back to the space, and their distances d̂ compared with D by
Kruskal's stress √(Σ(d − d̂)²/Σd²). The κ of least stress is found on a grid and refined. Rows of a matrix are points of
a flat space of m dimensions, where κ = 0 is exact; the question is which curvature holds them in few dimensions r.

All curvatures here are in units of the mean distance: κ·(mean d)².
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from leafward.errors import need
from leafward.measure.measured import UNKNOWN, Measured, groups_of, over_groups

DIMENSION = 10
BATCH_ROWS = 128
BATCHES = 8
FARTHEST = 18.0  # √c · diameter: cosh of it keeps seven digits of float64 for the smallest distances
STEPS = 7  # of the grid on each side of 0
REFINEMENTS = 2


@dataclass(frozen=True)
class Fit:
    """κ·(mean d)² of least stress, that stress, and the stress of the flat space (κ = 0)."""

    curvature: float
    stress: float
    flat_stress: float


def fit_curvature(distances: np.ndarray, dimension: int = DIMENSION) -> Fit:
    """The constant curvature that holds distances (n, n) best in `dimension` dimensions."""
    d = np.asarray(distances, dtype=np.float64)
    need(d.ndim == 2 and d.shape[0] == d.shape[1] and len(d) >= 4, "distances", "four points or more", list(d.shape))
    need(dimension >= 1, "dimension", "at least 1", dimension)
    mean, most = d.sum() / (len(d) * (len(d) - 1)), float(d.max())
    need(mean > 0, "distances", "not all zero", 0.0)
    low, high = -((FARTHEST / most * mean) ** 2), (0.99 * np.pi / most * mean) ** 2
    d = d / mean
    dimension = min(dimension, len(d) - 2)
    shares = np.linspace(0, 1, STEPS + 1)[1:] ** 2
    grid = np.concatenate([low * shares[::-1], [0.0], high * shares])
    stresses = [stress(d, float(kappa), dimension) for kappa in grid]
    best = int(np.argmin(stresses))
    for _ in range(REFINEMENTS):
        left, right = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
        inner = np.linspace(left, right, 7)
        values = [stress(d, float(kappa), dimension) for kappa in inner]
        grid, stresses, best = inner, values, int(np.argmin(values))
    return Fit(float(grid[best]), float(stresses[best]), stress(d, 0.0, dimension))


def stress(distances: np.ndarray, curvature: float, dimension: int) -> float:
    """Kruskal's stress of distances (n, n) held in a space of this curvature κ and dimension."""
    held = embedded_distances(distances, curvature, dimension)
    return float(np.sqrt(np.square(distances - held).sum() / np.square(distances).sum()))


def embedded_distances(distances: np.ndarray, curvature: float, dimension: int) -> np.ndarray:
    """Distances (n, n) of the points that scaling in the space of curvature κ finds."""
    n = len(distances)
    if curvature == 0:
        square = np.square(distances)
        mean = square.mean(0)
        space = _points(-(square - mean - mean[:, None] + square.mean()) / 2, n - dimension, n)
        return np.sqrt(np.maximum(_squares(space), 0))
    root = abs(curvature) ** 0.5
    if curvature < 0:
        space = _points(-np.cosh(root * distances), n - dimension, n)
        norms = np.einsum("ij,ij->i", space, space)
        time = np.sqrt(1 + norms)
        product = np.outer(time, time) - space @ space.T
        return np.arccosh(np.maximum(product, 1)) / root
    unit = _points(np.cos(root * distances), n - dimension - 1, n)
    length = np.linalg.norm(unit, axis=1, keepdims=True)
    unit = unit / np.where(length > 0, length, 1)
    return np.arccos(np.clip(unit @ unit.T, -1, 1)) / root


def _points(matrix: np.ndarray, first: int, last: int) -> np.ndarray:
    """Points (n, r) = √λ·u by the eigenvectors first … last − 1 in rising order, negative eigenvalues left out."""
    from scipy.linalg import eigh

    values, vectors = eigh(matrix, subset_by_index=(max(first, 0), last - 1), check_finite=False)
    return vectors * np.sqrt(np.maximum(values, 0))


def _squares(points: np.ndarray) -> np.ndarray:
    norms = np.einsum("ij,ij->i", points, points)
    return norms[:, None] + norms - 2 * points @ points.T


def best_curvature(distances: np.ndarray, dimension: int = DIMENSION) -> Measured:
    """κ·(mean d)² of least stress over batches of rows of distances (n, n), with its interval."""
    found = []
    for rows in groups_of(len(distances), BATCHES, least=16):
        part = distances[rows, rows][:BATCH_ROWS, :BATCH_ROWS]
        if len(part) >= 4 and part.any():
            found.append(fit_curvature(part, dimension).curvature)
    return over_groups(found) if found else UNKNOWN
