"""Near-duplicate rows: clusters of rows that are nearly the same vector, such as the unused tokens of a vocabulary.

Two rows are near-duplicates where their distance is at most a twentieth of the root mean square distance of two rows.
Clusters are the connected parts of that relation. Among more rows than the sample holds, clusters are found in the
sample and then filled up: every row that near to the middle of a cluster belongs to it. A pair that the sample does not
hold together is not seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

CLOSE = 0.05
SHOWN = 6


@dataclass(frozen=True, eq=False)
class Cluster:
    """The rows (k,) of one cluster in rising order, and how they are called."""

    rows: np.ndarray
    names: tuple[str, ...]

    @property
    def title(self) -> str:
        shown = ", ".join(self.names[:SHOWN])
        return shown + (f", … ({len(self.rows):,} rows)" if len(self.rows) > SHOWN else "")


def clusters_of(distances: np.ndarray, close: float = CLOSE) -> list[np.ndarray]:
    """Connected parts of two or more rows under distances (n, n) of root mean square 1; the largest first."""
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import connected_components

    near = np.argwhere(np.triu(distances <= close, 1))
    if not len(near):
        return []
    graph = csr_array((np.ones(len(near), dtype=np.int8), (near[:, 0], near[:, 1])), shape=distances.shape)
    _, label = connected_components(graph, directed=False)
    sizes = np.bincount(label)
    found = [np.flatnonzero(label == each) for each in np.flatnonzero(sizes > 1)]
    return sorted(found, key=lambda rows: (-len(rows), int(rows[0])))


def called(rows: np.ndarray, names: Sequence[str] | None) -> Cluster:
    """A cluster with the names of its first rows: those of a vocabulary, else row numbers."""
    known = names or ()
    shown = [str(known[row]) if row < len(known) else f"row {row}" for row in rows[: SHOWN + 1].tolist()]
    return Cluster(rows, tuple(shown))


def middles(sample: np.ndarray, clusters: Sequence[np.ndarray], least: int) -> np.ndarray:
    """The mean row (q, m) of each cluster of a sample (n, m) that has at least `least` rows."""
    kept = [sample[rows].mean(0) for rows in clusters if len(rows) >= least]
    return np.stack(kept) if kept else np.empty((0, sample.shape[1]), dtype=sample.dtype)
