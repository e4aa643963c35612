"""Figures and self-contained HTML reports; the package knows no system.

Everything is imported on first use, so that `import leafward.report` costs nothing::

    page = Page("Superposition: quick sweep")
    page.headline([Number("strong exponent", 1.07, interval=(0.95, 1.19))])
    fig, axes = new_figure()
    line_with_band(axes, widths, loss, low, high, label="γ = −1")
    page.figure(fig, "Loss against width")
    page.write("run/report.html")
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from leafward._lazy import lazy

if TYPE_CHECKING:
    from leafward.report.comparison import compare
    from leafward.report.figures import (
        SERIES,
        colour_css,
        dots,
        figure_css,
        legend,
        line_with_band,
        literal,
        log_axis,
        new_figure,
        points_with_bars,
        save_svg,
        style,
        to_svg,
        whole_numbers,
    )
    from leafward.report.number import Estimate, Number
    from leafward.report.page import Page
    from leafward.report.records import Record, compare_records, read_evaluation
    from leafward.report.runs import Run, read_run

__all__ = [
    "SERIES",
    "Estimate",
    "Number",
    "Page",
    "Record",
    "Run",
    "colour_css",
    "compare",
    "compare_records",
    "dots",
    "figure_css",
    "legend",
    "line_with_band",
    "literal",
    "log_axis",
    "new_figure",
    "points_with_bars",
    "read_evaluation",
    "read_run",
    "save_svg",
    "style",
    "to_svg",
    "whole_numbers",
]

_HOME = {
    "comparison": ("compare",),
    "figures": (
        "SERIES",
        "colour_css",
        "dots",
        "figure_css",
        "legend",
        "line_with_band",
        "literal",
        "log_axis",
        "new_figure",
        "points_with_bars",
        "save_svg",
        "style",
        "to_svg",
        "whole_numbers",
    ),
    "number": ("Estimate", "Number"),
    "page": ("Page",),
    "records": ("Record", "compare_records", "read_evaluation"),
    "runs": ("Run", "read_run"),
}

__getattr__, __dir__ = lazy(__name__, _HOME)
