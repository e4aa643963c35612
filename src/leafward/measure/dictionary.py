"""Sparse autoencoders: how the rows of a decoder lie to each other and to the encoder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from leafward.data.arrays import RowReader
from leafward.stats.intervals import mean_interval

DEAD = 1e-3  # of the median length
TWIN = 0.95  # |cosine| from which two features are the same direction, or opposite ones
BLOCK = 2048


def dictionary_figures(decoder: RowReader, encoder: RowReader | None, advance: Callable[[int], None]) -> dict[str, Any]:
    """Dead rows, rows with a duplicate or an antipode, and the angle of each feature's encoder and decoder, in degrees.

    decoder: (features, width). encoder: (width, features), or None. A row is dead that is a thousandth of the median
    length or shorter; a duplicate or an antipode is another row with a cosine of at least .95 or at most −.95.
    """
    rows = decoder.read(0, decoder.shape[0]).float().numpy()
    norms = np.linalg.norm(rows.astype(np.float64), axis=1)
    alive = norms > DEAD * np.median(norms)
    unit = rows / np.where(alive, norms, np.inf)[:, None].astype(np.float32)
    highest, lowest = np.full(len(unit), -1.0), np.full(len(unit), 1.0)
    for start in range(0, len(unit), BLOCK):
        overlap = unit[start : start + BLOCK] @ unit.T
        places = np.arange(len(overlap))
        overlap[places, places + start] = 0
        highest[start : start + BLOCK], lowest[start : start + BLOCK] = overlap.max(1), overlap.min(1)
        advance(len(overlap))
    found: dict[str, Any] = {
        "features": len(rows),
        "dead": int((~alive).sum()),
        "duplicates": int((highest >= TWIN).sum()),
        "antipodes": int((lowest <= -TWIN).sum()),
        "duplicate_rows": np.flatnonzero(highest >= TWIN)[:20].tolist(),
        "antipodal_rows": np.flatnonzero(lowest <= -TWIN)[:20].tolist(),
    }
    if encoder is not None and encoder.shape == decoder.shape[::-1]:
        found["angle"] = _angles(unit, encoder, alive)
    return found


def _angles(unit: np.ndarray, encoder: RowReader, alive: np.ndarray) -> dict[str, Any]:
    columns = encoder.read(0, encoder.shape[0]).float().numpy().T
    lengths = np.linalg.norm(columns.astype(np.float64), axis=1)
    both = alive & (lengths > 0)
    cosine = np.einsum("ij,ij->i", unit[both], columns[both]) / lengths[both]
    angle = np.degrees(np.arccos(np.clip(cosine, -1, 1)))
    if not len(angle):
        return {"value": None, "interval": None}
    mean, interval = mean_interval(angle, 0.0, 180.0)
    return {"value": mean, "interval": interval, "median": float(np.median(angle)), "most": float(angle.max())}
