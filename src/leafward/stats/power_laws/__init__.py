"""Power-law fits with honest uncertainty.

    from leafward.stats.power_laws import fit_power_law
    fit = fit_power_law(m, loss, offset=True)
    fit.exponent, fit.interval, fit.summary()

Names are imported on first use, so that importing the package costs nothing; scipy is needed only to fit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from leafward._lazy import lazy

if TYPE_CHECKING:
    from leafward.stats.power_laws.compare import Candidate, Comparison, compare_laws
    from leafward.stats.power_laws.compute import Allocation, ComputeLaw, compute_laws
    from leafward.stats.power_laws.laws import fit_joint_law, fit_power_law
    from leafward.stats.power_laws.ranges import (
        Extrapolation,
        RangeChoice,
        RangeReport,
        choose_range,
        fit_ranges,
        leave_largest_out,
    )
    from leafward.stats.power_laws.results import Interval, JointFit, PowerLawFit
    from leafward.stats.power_laws.width import WidthFit, fit_width

_HOME = {
    "compare": ("Candidate", "Comparison", "compare_laws"),
    "compute": ("Allocation", "ComputeLaw", "compute_laws"),
    "laws": ("fit_joint_law", "fit_power_law"),
    "ranges": ("Extrapolation", "RangeChoice", "RangeReport", "choose_range", "fit_ranges", "leave_largest_out"),
    "results": ("Interval", "JointFit", "PowerLawFit"),
    "width": ("WidthFit", "fit_width"),
}

__all__ = [
    "Allocation",
    "Candidate",
    "Comparison",
    "ComputeLaw",
    "Extrapolation",
    "Interval",
    "JointFit",
    "PowerLawFit",
    "RangeChoice",
    "RangeReport",
    "WidthFit",
    "choose_range",
    "compare_laws",
    "compute_laws",
    "fit_joint_law",
    "fit_power_law",
    "fit_ranges",
    "fit_width",
    "leave_largest_out",
]


__getattr__, __dir__ = lazy(__name__, _HOME)
