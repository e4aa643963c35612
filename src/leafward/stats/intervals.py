"""95 % intervals that several systems report: of a mean over seeds or items, of a share, of a rank correlation.

Student's interval knows nothing of where a number can lie, so that of an accuracy over few seeds may reach beyond 1.
What cannot be is cut off: the true value is never there, so the rest covers it just as often. Differences are not cut;
they are read against 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

Interval = tuple[float, float]


def around(value: float, error: float, count: int) -> Interval:
    """`value` ± Student's t for `count` independent values times the standard error."""
    from scipy.stats import t

    reach = float(t.ppf(0.975, count - 1)) * error
    return value - reach, value + reach


def mean_interval(
    values: Sequence[float] | Any, low: float = -math.inf, high: float = math.inf
) -> tuple[float, Interval | None]:
    """The mean of independent values (a sequence or an array) and its interval; none of fewer than two.

    low, high: between which the values always lie, so that their true mean does as well.
    """
    import numpy as np

    value, count = float(np.mean(values)), len(values)
    if count < 2:
        return value, None
    below, above = around(value, float(np.std(values, ddof=1)) / count**0.5, count)
    return value, (max(low, below), min(high, above))


def share_interval(count: int, total: int) -> Interval:
    """Wilson's interval of the share count/total."""
    from scipy.stats import binomtest

    found = binomtest(count, total).proportion_ci(0.95, method="wilson")
    return float(found.low), float(found.high)


def rank_correlation_interval(rho: float, count: int) -> Interval | None:
    """Of Spearman's ρ over `count` pairs, by Fisher's transform with Bonett and Wright's variance; none below four."""
    if count < 4 or not abs(rho) < 1.0:
        return None
    reach = 1.959963984540054 * math.sqrt((1.0 + rho**2 / 2.0) / (count - 3))
    return math.tanh(math.atanh(rho) - reach), math.tanh(math.atanh(rho) + reach)
