"""The one rule by which a claim is judged: from an interval, a tolerance and the scale of the test."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from leafward.errors import UsageError
from leafward.stats.estimate import ANY, Estimate

Verdict = Literal["holds", "does not hold", "undecided", "needs more scale", "not tested here"]
HOLDS: Verdict = "holds"
FAILS: Verdict = "does not hold"
UNDECIDED: Verdict = "undecided"
SCALE: Verdict = "needs more scale"
UNTESTED: Verdict = "not tested here"


@dataclass(frozen=True)
class Tolerance:
    """Between which values a claim says that its number lies, ends included: `low` alone is "at least"."""

    low: float = -math.inf
    high: float = math.inf

    def __post_init__(self) -> None:
        if not self.low <= self.high or (self.low, self.high) == ANY:
            raise UsageError(f"a tolerance needs low ≤ high and an end that is finite, not [{self.low}, {self.high}]")

    def __str__(self) -> str:
        if math.isinf(self.low):
            return f"at most {self.high:g}"
        return f"at least {self.low:g}" if math.isinf(self.high) else f"{self.low:g} to {self.high:g}"


def judge(
    found: Estimate, tolerance: Tolerance, *, exact: bool = False, small: bool = False, over_seeds: bool = False
) -> Verdict:
    """Holds: the whole interval lies within the tolerance. Does not hold: it lies wholly outside. Else undecided.

    small: the test is much smaller than the paper's, which no interval makes up for. exact: the number has no
    uncertainty (a count, an identity), so that it is its own interval. over_seeds: what differs from training to
    training is judged by an interval over seeds alone. `Estimate` refuses what is no interval: one
    without width, over one seed, or beyond what is possible.
    """
    if found.value is None:
        return UNTESTED
    if small:
        return SCALE
    if not exact and (found.interval is None or (over_seeds and not found.over.seeds)):
        return UNDECIDED
    low, high = (found.value, found.value) if found.interval is None else found.interval
    if tolerance.low <= low and high <= tolerance.high:
        return HOLDS
    return FAILS if high < tolerance.low or low > tolerance.high else UNDECIDED
