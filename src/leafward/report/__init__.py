"""Results, and the one renderer that makes a page, a table or a file of them; the package knows no system.

Everything is imported on first use, so that `import leafward.report` costs nothing::

    made = Result("Superposition: quick sweep", estimates=[Estimate(1.07, (0.95, 1.19), name="strong exponent")])
    fig, axes = new_figure()
    line_with_band(axes, widths, loss, low, high, label="γ = −1")
    made.figure(fig, "Loss against width")
    made.write("run/report.html")
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
    from leafward.report.records import Record, read_evaluation, read_run
    from leafward.report.render import show_rows
    from leafward.report.result import Result
    from leafward.stats.estimate import Estimate

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
    "records": ("Record", "read_evaluation", "read_run"),
    "render": ("show_rows",),
    "result": ("Estimate", "Result"),
}

__all__ = [
    "SERIES",
    "Estimate",
    "Record",
    "Result",
    "colour_css",
    "compare",
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
    "show_rows",
    "style",
    "to_svg",
    "whole_numbers",
]

__getattr__, __dir__ = lazy(__name__, _HOME)
