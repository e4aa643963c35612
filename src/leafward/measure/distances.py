"""Distances of sampled rows, and their nearest neighbours.

Rows are float32 (n, m). Distances come from the Gram product of the centred rows, in float32 with squared norms in
float64 before they are added, so that two rows are told apart down to about 1e-3 of the typical distance.
"""

from __future__ import annotations

import numpy as np

STRIP = 128


def centred(rows: np.ndarray) -> np.ndarray:
    """Rows (n, m) without their mean, and in units of their largest entry, so that nothing over- or underflows."""
    rows = np.asarray(rows, dtype=np.float32)
    peak = float(np.abs(rows).max(initial=0.0))
    rows = rows / np.float32(peak) if peak > 0 else rows
    return rows - rows.mean(0, dtype=np.float64).astype(np.float32)


def euclidean(rows: np.ndarray) -> np.ndarray:
    """All distances (n, n) of rows (n, m), float32, zero on the diagonal, in units of the root mean square distance."""
    rows = centred(rows)
    norms = np.einsum("ij,ij->i", rows, rows, dtype=np.float64)
    count = len(rows)
    # Σ_ij |x_i − x_j|² = 2n Σ|x_i|² for centred rows: the unit is known before the distances are.
    unit = (2 * float(norms.sum()) / max(count - 1, 1)) ** 0.5
    if unit > 0:
        rows, norms = rows / np.float32(unit), norms / unit**2
    norms = norms.astype(np.float32)
    found = rows @ rows.T
    for start in range(0, count, STRIP):
        part = found[start : start + STRIP]
        part *= -2
        part += norms
        part += norms[start : start + STRIP, None]
        np.maximum(part, 0, out=part)
        np.sqrt(part, out=part)
    np.fill_diagonal(found, 0)
    return found


def lorentz(space: np.ndarray, c: float) -> np.ndarray:
    """All distances (n, n) of Lorentz points by their space parts (n, m), in units of the root mean square distance."""
    import torch

    from leafward.geometry.pairs import distances

    points = torch.from_numpy(np.ascontiguousarray(space)).float()
    found = distances(points, points, c).numpy().copy()
    np.fill_diagonal(found, 0)
    scale = float(np.square(found, dtype=np.float64).mean()) * len(found) / max(len(found) - 1, 1)
    return found / np.float32(scale**0.5) if scale > 0 else found


def nearest(distances: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Index and distance (n, k) of the k nearest other points of each, nearest first, k = min(count, n − 1)."""
    count = min(count, len(distances) - 1)
    index = np.empty((len(distances), count), dtype=np.int64)
    value = np.empty((len(distances), count), dtype=distances.dtype)
    for start in range(0, len(distances), STRIP):
        part = distances[start : start + STRIP].copy()
        places = np.arange(len(part))
        part[places, places + start] = np.inf
        some = np.argpartition(part, count - 1, axis=1)[:, :count]
        found = np.take_along_axis(part, some, axis=1)
        order = found.argsort(axis=1, kind="stable")
        index[start : start + STRIP] = np.take_along_axis(some, order, axis=1)
        value[start : start + STRIP] = np.take_along_axis(found, order, axis=1)
    return index, value
