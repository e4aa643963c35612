"""What an evaluation leaves behind: its numbers as JSON, and the page that shows them."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console

    from leafward.report import Number, Page


def evaluation_page(title: str, subtitle: str, numbers: Sequence[Number], scores: Mapping[str, Any]) -> Page:
    """A page with headline numbers and a table of all scores, nested ones by their dotted names."""
    from leafward.report import Page
    from leafward.report.page import flatten

    page = Page(title, subtitle=subtitle)
    page.headline(numbers)
    figure = _with_intervals(numbers)
    if figure is not None:
        page.section("Side by side")
        page.figure(figure, "The numbers above, with their 95 % intervals.")
    page.section("All scores")
    page.table(["", "value"], list(flatten(scores).items()))
    return page


def _with_intervals(numbers: Sequence[Number]) -> Figure | None:
    """Those numbers of one scale that have intervals, one under the other; None for fewer than two."""
    from leafward.report import new_figure
    from leafward.report.figures import literal, style

    shown = [(number.name, number.value, number.interval) for number in numbers if number.interval and not number.unit]
    if len(shown) < 2:
        return None
    names, values, intervals = zip(*shown, strict=True)
    figure, axes = new_figure(height=0.8 + 0.35 * len(shown))
    rows = range(len(shown))
    with style():
        (drawn,) = axes.plot(values, rows, marker="o", linestyle="none")
        axes.hlines(rows, *zip(*intervals, strict=True), color=drawn.get_color(), linewidth=1.2)
        axes.set_yticks(rows, [literal(name) for name in names])
        axes.set_ylim(len(shown) - 0.5, -0.5)
    return figure


def how_it_was_run(page: Page) -> None:
    """The last section of every page: the command and the environment of this process."""
    from leafward.engine.run import environment

    page.section("How it was run")
    page.command(shlex.join(sys.argv))
    page.environment(environment({}))


def write_evaluation(out: Path, result: Mapping[str, Any], page: Page, console: Console) -> None:
    """Write `out`/evaluation.json and report.html, or where `out` is NAME.json, that file and NAME.html beside it.

    In the folder of a run, whose report.html is that of its training, the page is evaluation.html.
    """
    from leafward.engine.run import CONFIG
    from leafward.files import write_json

    named = out.suffix == ".json"
    record = out if named else out / "evaluation.json"
    shown = record.with_suffix(".html") if named or (out / CONFIG).is_file() else out / "report.html"
    write_json(record, result)
    how_it_was_run(page)
    page.write(shown)
    console.print(f"wrote {record} and {shown}", markup=False)
