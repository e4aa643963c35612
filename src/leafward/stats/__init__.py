"""Estimates with their intervals, verdicts on claims, intervals over seeds and samples, and power-law fits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from leafward._lazy import lazy

if TYPE_CHECKING:
    from leafward.stats.estimate import Estimate, Interval, Over
    from leafward.stats.intervals import mean_interval, over_samples, over_seeds, share_interval
    from leafward.stats.verdict import Tolerance, judge

__all__ = [
    "Estimate",
    "Interval",
    "Over",
    "Tolerance",
    "judge",
    "mean_interval",
    "over_samples",
    "over_seeds",
    "share_interval",
]

_HOME = {
    "estimate": ("Estimate", "Interval", "Over"),
    "intervals": ("mean_interval", "over_samples", "over_seeds", "share_interval"),
    "verdict": ("Tolerance", "judge"),
}

__getattr__, __dir__ = lazy(__name__, _HOME)
