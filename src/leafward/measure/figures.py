"""The sampled figures of a matrix: everything that needs distances, of one sample of rows and of its nulls alike."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from leafward.measure import distances as dist
from leafward.measure.curvature import best_curvature
from leafward.measure.dimension import gride, two_nn
from leafward.measure.duplicates import clusters_of
from leafward.measure.hyperbolicity import literature_curvature, mean_delta, relative_delta
from leafward.measure.measured import UNKNOWN, Measured, groups_of, over_groups
from leafward.measure.ricci import NEIGHBOURS, neighbour_ricci

SAMPLE = 4096
WIDE = 16
LEAST_ROWS = 16
PARTS = 8
LEAST_PART = 40
Figures = dict[str, Measured]


def distances_of(sample: np.ndarray, curvature: float | None) -> np.ndarray:
    """Distances (n, n) of rows: Euclidean, or Lorentzian where the rows are space parts of points of curvature −c."""
    return dist.euclidean(sample) if curvature is None else dist.lorentz(sample, curvature)


def sampled_figures(sample: np.ndarray, distances: np.ndarray, seed: int) -> Figures:
    """All figures of a sample (n, m) with its distances (n, n); unknown where fewer than 16 rows differ."""
    relative = relative_delta(distances)
    return {
        "crowding": crowding(sample),
        "delta": mean_delta(distances, seed=seed),
        "delta_rel": relative,
        "c_literature": literature_curvature(relative),
        "curvature": best_curvature(distances),
        "duplicates": duplicate_share(distances),
    } | neighbour_figures(distances, seed)


def neighbour_figures(distances: np.ndarray, seed: int) -> Figures:
    """What nearest neighbours tell, in each of `PARTS` disjoint parts of the sample.

    Neighbourhoods of one graph share the rows that are near to many others, so that its edges and rows are no
    independent measurements; graphs of different rows are.
    """
    found: dict[str, list[float]] = {"ricci": [], "dimension": [], "dimension_wide": []}
    for part in groups_of(len(distances), PARTS, LEAST_PART):
        index, near = dist.nearest(distances[part, part], 2 * WIDE)
        found["ricci"].append(neighbour_ricci(index[:, :NEIGHBOURS], seed=seed))
        found["dimension"].append(two_nn(near).value)
        found["dimension_wide"].append(gride(near, WIDE).value)
    return {name: over_groups(values) for name, values in found.items()}


def varied(distances: np.ndarray) -> bool:
    """Whether at least `LEAST_ROWS` rows differ, so that the figures mean something."""
    return len(distances) >= LEAST_ROWS and int((distances.max(1) > 0).sum()) >= LEAST_ROWS


def crowding(sample: np.ndarray) -> Measured:
    """m·⟨o²⟩ of unit rows with the sample's mean removed, over groups of rows."""
    rows = dist.centred(sample)
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    unit = rows / np.where(lengths > 0, lengths, 1)
    found = []
    for each in groups_of(len(unit)):
        part = unit[each]
        count = int((lengths[each] > 0).sum())
        if count > 1:
            potential = float(np.square(part @ part.T, dtype=np.float64).sum())
            found.append(sample.shape[1] * (potential - count) / (count * (count - 1)))
    return over_groups(found) if found else UNKNOWN


def duplicate_share(distances: np.ndarray) -> Measured:
    """Share of rows in near-duplicate clusters, with the binomial standard error."""
    rows = len(distances)
    share = sum(map(len, clusters_of(distances))) / rows
    return Measured(share, (share * (1 - share) / rows) ** 0.5, rows)


def beyond(own: Measured, nulls: Mapping[str, Measured], level: float) -> int:
    """−1 or 1 where the whole interval of a figure lies below or above those of all nulls; 0 where it does not.

    The one rule of all verdicts: a figure is said to be anything only where no null, which has the structure taken out,
    can be what is seen.
    """
    ends = own.interval(level)
    others = [each.interval(level) for each in nulls.values()]
    if ends is None or not others or any(each is None for each in others):
        return 0
    if all(ends[1] < each[0] for each in others if each is not None):
        return -1
    return int(all(ends[0] > each[1] for each in others if each is not None))
