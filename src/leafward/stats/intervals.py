"""95 % confidence intervals that several systems report: of a mean over seeds or items, of a share, of a rank
correlation.

Student's interval knows nothing of where a number can lie, so that of an accuracy over few seeds may reach beyond 1.
What cannot be is cut off: the true value is never there, so the rest covers it just as often. Differences are not cut;
they are read against 0. Values that are all the same have no interval: they do not tell how far off their mean may be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from leafward.stats.estimate import ANY, UNSAID, Estimate, Interval, Over, sound


def around(value: float, error: float, count: int, over: Over = UNSAID) -> Interval | None:
    """`value` ± Student's t for `count` independent values times the standard error."""
    from scipy.stats import t

    reach = float(t.ppf(0.975, count - 1)) * error
    return sound(Interval(value - reach, value + reach, over, method="Student t", standard_error=error))


def mean_interval(
    values: Sequence[float] | Any,
    low: float = -math.inf,
    high: float = math.inf,
    over: Over = UNSAID,
) -> tuple[float, Interval | None]:
    """The mean of independent values (a sequence or an array) and its interval; none of fewer than two.

    low, high: between which the values always lie, so that their true mean does as well.
    """
    import numpy as np

    value, count = float(np.mean(values)), len(values)
    interval = None if count < 2 else around(value, float(np.std(values, ddof=1)) / count**0.5, count, over)
    return value, None if interval is None else interval.within(low, high)


def over_seeds(
    values: Sequence[float | None], possible: tuple[float, float] = ANY, *, samples: int = 0, of: str = "samples"
) -> Estimate:
    """The mean over seeds, one value for each; the share of one seed has the interval of its `samples`, where they are
    given. A value that is missing leaves nothing to say."""
    if any(value is None for value in values):
        return Estimate(None)
    count = len(values)
    value, interval = mean_interval(values, *possible, over=Over(seeds=count if count > 1 else 0))
    if count == 1 and samples:
        scale = possible[1]
        interval = share_interval(round(value / scale * samples), samples, of).times(scale)
    return Estimate(value, interval, possible=possible)


def over_samples(
    values: Sequence[float] | Any, possible: tuple[float, float] = ANY, *, of: str = "samples"
) -> Estimate:
    """The mean over samples of one seed."""
    count = len(values)
    over = Over(samples=count if count > 1 else 0, of=of)
    return Estimate(*mean_interval(values, *possible, over=over), possible=possible)


def share_interval(count: int, total: int, of: str = "samples") -> Interval:
    """Wilson's interval of the share count/total."""
    from scipy.stats import binomtest

    found = binomtest(count, total).proportion_ci(0.95, method="wilson")
    return Interval(
        float(found.low), float(found.high), Over(samples=total if total > 1 else 0, of=of), method="Wilson"
    )


def rank_correlation_interval(rho: float, count: int) -> Interval | None:
    """Of Spearman's ρ over `count` pairs, by Fisher's transform with Bonett and Wright's variance; none below four."""
    if count < 4 or not abs(rho) < 1.0:
        return None
    reach = 1.959963984540054 * math.sqrt((1.0 + rho**2 / 2.0) / (count - 3))
    ends = math.tanh(math.atanh(rho) - reach), math.tanh(math.atanh(rho) + reach)
    return Interval(*ends, Over(samples=count, of="pairs"), method="Fisher's transform")
