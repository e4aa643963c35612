"""A figure of a sample of rows with its confidence interval, over disjoint groups of those rows.

A statistic of pairs, triples or quadruples has errors that share rows, so counting the quadruples would claim far too
much. The sample is cut into G groups of different rows; the figure is computed in each, and Student's t over the G
values gives the interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

GROUPS = 16
LEAST_GROUP = 4  # rows of a group: four points are the least that have a four-point condition


@dataclass(frozen=True)
class Measured:
    """`value`, its standard error over `groups` values, and how sure that is. One group has no interval."""

    value: float
    error: float = math.nan
    groups: int = 0

    def interval(self, level: float = 0.95) -> tuple[float, float] | None:
        """value ± t · error with Student's t on groups − 1 degrees of freedom; None where it is not known."""
        if self.groups < 2 or not math.isfinite(self.error) or not math.isfinite(self.value):
            return None
        from scipy.stats import t

        reach = float(t.ppf(0.5 + level / 2, self.groups - 1)) * self.error
        return self.value - reach, self.value + reach

    def map(self, function: Callable[[float], float]) -> Measured:
        """A monotone function of the figure, its error to first order (by a central difference)."""
        if not math.isfinite(self.value):
            return self
        value = function(self.value)
        if not math.isfinite(self.error) or self.error == 0:
            return Measured(value, self.error, self.groups)
        step = 1e-4 * self.error
        slope = (function(self.value + step) - function(self.value - step)) / (2 * step)
        return Measured(value, abs(slope) * self.error, self.groups)

    def to_dict(self) -> dict[str, Any]:
        ends = self.interval()
        return {"value": self.value, "low": ends and ends[0], "high": ends and ends[1]}


UNKNOWN = Measured(math.nan)
"""A figure that the rows do not allow: fewer than four different points, a constant matrix."""


def over_groups(values: Sequence[float] | np.ndarray) -> Measured:
    """The mean over groups with its standard error; groups whose value is not finite do not count."""
    found = np.asarray(values, dtype=np.float64)
    found = found[np.isfinite(found)]
    if not len(found):
        return UNKNOWN
    error = float(found.std(ddof=1) / len(found) ** 0.5) if len(found) > 1 else math.nan
    return Measured(float(found.mean()), error, len(found))


def groups_of(rows: int, groups: int = GROUPS, least: int = LEAST_GROUP) -> Iterator[slice]:
    """At most `groups` equal slices of `rows` rows (which are in random order), each of at least `least`."""
    count = max(1, min(groups, rows // least))
    size = rows // count
    return (slice(start, start + size) for start in range(0, count * size, size))


def group_index(rows: int, groups: int = GROUPS) -> np.ndarray:
    """The group (rows,) of each row, for figures that are means over rows."""
    return np.arange(rows) * max(1, min(groups, rows // 2)) // max(rows, 1)


def group_means(values: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Mean of the finite values (n,) in each group."""
    keep = np.isfinite(values)
    counts = np.bincount(index[keep], minlength=int(index.max(initial=0)) + 1)
    sums = np.bincount(index[keep], weights=values[keep], minlength=len(counts))
    return sums[counts > 0] / counts[counts > 0]
