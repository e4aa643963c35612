"""95 % intervals that several systems report: of a mean over seeds or items, of a share, of a rank correlation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Interval = tuple[float, float]


def around(value: float, error: float, count: int) -> Interval:
    """`value` ± Student's t for `count` independent values times the standard error."""
    from scipy.stats import t

    reach = float(t.ppf(0.975, count - 1)) * error
    return value - reach, value + reach


def mean_interval(values: Sequence[float] | Any) -> tuple[float, Interval | None]:
    """The mean of independent values (a sequence or an array) and its interval; none of fewer than two."""
    import numpy as np

    value, count = float(np.mean(values)), len(values)
    if count < 2:
        return value, None
    return value, around(value, float(np.std(values, ddof=1)) / count**0.5, count)


def share_interval(count: int, total: int) -> Interval:
    """Wilson's interval of the share count/total."""
    from scipy.stats import binomtest

    found = binomtest(count, total).proportion_ci(0.95, method="wilson")
    return float(found.low), float(found.high)


def rank_correlation_interval(rho: float, count: int) -> Interval | None:
    """Of Spearman's ρ over `count` pairs, by Fisher's transform with Bonett and Wright's variance; none below four."""
    import math

    if count < 4 or not abs(rho) < 1.0:
        return None
    reach = 1.959963984540054 * math.sqrt((1.0 + rho**2 / 2.0) / (count - 3))
    return math.tanh(math.atanh(rho) - reach), math.tanh(math.atanh(rho) + reach)
