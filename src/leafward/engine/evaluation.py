"""What an evaluation leaves behind: its numbers as JSON, and the page that shows them."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console

    from leafward.report import Number, Page


def evaluation_page(
    title: str,
    subtitle: str,
    numbers: Sequence[Number],
    scores: Mapping[str, Any],
    draw: Callable[[Page], None] | None = None,
) -> Page:
    """A page with headline numbers, what `draw` adds, and a table of all scores, nested ones by their dotted names."""
    from leafward.report import Page
    from leafward.report.page import flatten

    page = Page(title, subtitle=subtitle)
    page.headline(numbers)
    figure = _with_intervals(numbers)
    if figure is not None:
        page.section("Side by side")
        page.figure(figure, "The numbers above, with their 95 % intervals.")
    if draw is not None:
        draw(page)
    page.section("All scores")
    page.table(["", "value"], list(flatten(scores).items()))
    return page


def _with_intervals(numbers: Sequence[Number]) -> Figure | None:
    """Those numbers of one scale that have intervals, one under the other; None for fewer than two."""
    from leafward.report import dots

    shown = {number.name: number.estimate for number in numbers if number.interval and not number.unit}
    return dots(shown) if len(shown) > 1 else None


def how_it_was_run(page: Page) -> None:
    """The last section of every page: the command and the environment of this process."""
    from leafward.engine.run import environment

    page.section("How it was run")
    page.command(shlex.join(sys.argv))
    page.environment(environment({}))


def write_evaluation(out: Path, result: Mapping[str, Any], page: Page, console: Console) -> None:
    """Write `out`/evaluation.json and report.html, or where `out` is NAME.json, that file and NAME.html beside it.

    In the folder of a run, whose report.html is that of its training, the page is evaluation.html. The page's title
    tells `leafward report` which evaluations can be compared.
    """
    from leafward.engine.layout import is_run
    from leafward.files import write_json

    named = out.suffix == ".json"
    record = out if named else out / "evaluation.json"
    shown = record.with_suffix(".html") if named or is_run(out) else out / "report.html"
    write_json(record, {"evaluation": page.title, **result})
    how_it_was_run(page)
    page.write(shown)
    console.print(f"wrote {record} and {shown}", markup=False)
