"""How tree-like distances are: Gromov's δ by the four-point condition.

For four points let S₁ ≥ S₂ ≥ S₃ be the sums d(x,y)+d(z,w), d(x,z)+d(y,w), d(x,w)+d(y,z); then δ(x,y,z,w) = (S₁ − S₂)/2.
It is 0 for every four points of a tree, and at most half the diameter anywhere. Written by Gromov products at a base w,
(x|y) = ½[d(x,w) + d(y,w) − d(x,y)], it is min((x|z), (z|y)) − (x|y) where that is positive.

Two figures, because the literature's depends on how many rows it looks at and on the two rows farthest apart:
δ_rel = 2 max δ / diameter (Khrulkov et al. 2020), and 2 mean δ / mean distance, which has an honest interval.
"""

from __future__ import annotations

import numpy as np

from leafward.errors import need
from leafward.measure.measured import LEAST_GROUP, UNKNOWN, Measured, groups_of, over_groups

QUADRUPLES = 1_000_000
BATCH_ROWS = 256
EXACT_ROWS = 200  # n⁴ work: seconds


def exact_delta(distances: np.ndarray) -> float:
    """The largest δ over all quadruples of points with these distances (n, n): max over bases of the max-min product.

    n³ work for each base, so at most `EXACT_ROWS` points.
    """
    d = np.asarray(distances, dtype=np.float64)
    need(d.ndim == 2 and d.shape[0] == d.shape[1], "distances", "a square matrix", list(d.shape))
    need(4 <= len(d) <= EXACT_ROWS, "distances", f"4 to {EXACT_ROWS} points for an exact δ", len(d))
    return max(based_delta(d, base) for base in range(len(d)))


def based_delta(distances: np.ndarray, base: int = 0) -> float:
    """The largest δ over all triples with one base point: max of (A ∘ A) − A, A the Gromov products, ∘ max-min."""
    d = np.asarray(distances)
    gromov = (d[:, base, None] + d[None, base] - d) / 2
    best = np.full_like(gromov, -np.inf)
    least = np.empty_like(gromov)
    for column in range(len(gromov)):
        np.minimum(gromov[:, column, None], gromov[None, column], out=least)
        np.maximum(best, least, out=best)
    return float((best - gromov).max())


def quadruple_deltas(distances: np.ndarray, quadruples: np.ndarray) -> np.ndarray:
    """δ (q,) of quadruples (q, 4) of points."""
    x, y, z, w = quadruples.T
    sums = np.stack(
        [
            distances[x, y] + distances[z, w],
            distances[x, z] + distances[y, w],
            distances[x, w] + distances[y, z],
        ]
    )
    sums.sort(axis=0)
    return (sums[2] - sums[1]) / 2


def relative_delta(distances: np.ndarray) -> Measured:
    """δ_rel = 2 max δ / diameter of batches of 256 rows, from one base row each, as published scripts compute it."""
    found = []
    for rows in _batches(len(distances)):
        part = distances[rows, rows]
        diameter = float(part.max(initial=0.0))
        if len(part) >= LEAST_GROUP and diameter > 0:
            found.append(2 * based_delta(part) / diameter)
    return over_groups(found)


def mean_delta(distances: np.ndarray, quadruples: int = QUADRUPLES, seed: int = 0) -> Measured:
    """2 mean δ / mean distance over random quadruples of different rows, all four of one batch of rows."""
    batches = list(_batches(len(distances)))
    rng = np.random.default_rng(seed)
    found = []
    for rows in batches:
        part = distances[rows, rows]
        if len(part) < LEAST_GROUP or not part.any():
            continue
        drawn = rng.integers(0, len(part), (max(1, quadruples // len(batches)), 4), dtype=np.int32)
        ordered = np.sort(drawn, axis=1)
        drawn = drawn[(ordered[:, 1:] != ordered[:, :-1]).all(axis=1)]
        if len(drawn):
            mean = part.sum(dtype=np.float64) / (len(part) * (len(part) - 1))
            found.append(2 * float(quadruple_deltas(part, drawn).mean(dtype=np.float64)) / mean)
    return over_groups(found)


def literature_curvature(relative: Measured) -> Measured:
    """c = (0.144/δ_rel)²: the curvature that published work assigns to a δ_rel; .144 is δ_rel of the unit disk."""
    if not relative.value > 0:
        return UNKNOWN
    return relative.map(lambda delta: (0.144 / delta) ** 2)


def _batches(rows: int) -> list[slice]:
    """Batches of at most BATCH_ROWS rows."""
    return [slice(each.start, min(each.stop, each.start + BATCH_ROWS)) for each in groups_of(rows)]
