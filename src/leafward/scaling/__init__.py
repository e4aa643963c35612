"""Power-law fits with honest uncertainty.

    from leafward.scaling import fit_power_law
    fit = fit_power_law(m, loss, offset=True)
    fit.exponent, fit.interval, fit.summary()

Names are imported on first use, so that importing the package costs nothing; scipy is needed only to fit.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from leafward.scaling.compare import Candidate, Comparison, compare_laws
    from leafward.scaling.laws import fit_joint_law, fit_power_law
    from leafward.scaling.ranges import (
        Extrapolation,
        RangeChoice,
        RangeReport,
        choose_range,
        fit_ranges,
        leave_largest_out,
    )
    from leafward.scaling.results import Interval, JointFit, PowerLawFit
    from leafward.scaling.width import WidthFit, fit_width

_HOME = {
    "Candidate": "compare",
    "Comparison": "compare",
    "Extrapolation": "ranges",
    "Interval": "results",
    "JointFit": "results",
    "PowerLawFit": "results",
    "RangeChoice": "ranges",
    "RangeReport": "ranges",
    "WidthFit": "width",
    "choose_range": "ranges",
    "compare_laws": "compare",
    "fit_joint_law": "laws",
    "fit_power_law": "laws",
    "fit_ranges": "ranges",
    "fit_width": "width",
    "leave_largest_out": "ranges",
}

__all__ = [
    "Candidate",
    "Comparison",
    "Extrapolation",
    "Interval",
    "JointFit",
    "PowerLawFit",
    "RangeChoice",
    "RangeReport",
    "WidthFit",
    "choose_range",
    "compare_laws",
    "fit_joint_law",
    "fit_power_law",
    "fit_ranges",
    "fit_width",
    "leave_largest_out",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
