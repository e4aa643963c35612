"""``leafward audit TARGET --by LEVEL --taxonomy FILE``: does the radius of the rows order general and specific?"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from leafward.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from leafward.measure.survey_report import Survey
    from leafward.report import Result

DEPTH = "depth"


def add_levels(args: Any, report: Survey, console: Console, page: Result) -> list[dict[str, Any]]:
    """Radius against depth for every matrix whose rows have names, on screen and on the page."""
    from leafward.data.taxonomy import read_taxonomy
    from leafward.files import finite
    from leafward.measure.named_rows import named_radii
    from leafward.report import show_rows

    if args.by != DEPTH and not args.by.isdecimal():
        raise UsageError(f"--by must be {DEPTH} or the number of a level, 0 at the root, got {args.by!r}")
    taxonomy = read_taxonomy(args.taxonomy)
    below = None if args.by == DEPTH else int(args.by)
    found = named_radii(args.targets[0], args.tensor, taxonomy, below)
    for name, levels in found.items():
        rows = [(str(depth), str(count), f"{mean:.4g}") for depth, (count, mean) in levels.levels.items()]
        show_rows(console, ["depth", "rows", "mean radius"], rows, f"{name}: radius by depth")
        ends = "–" if levels.interval is None else "[{:.3f}, {:.3f}]".format(*levels.interval)
        words = f"{name}: rank correlation of radius and depth {levels.rho:.3f} {ends} over {levels.rows} rows"
        if levels.ordered_interval is not None:
            low, high = levels.ordered_interval
            words += f"; {levels.ordered:.1%} [{low:.1%}, {high:.1%}] of {levels.pairs} children lie farther out"
        words += f": {levels.verdict}"
        console.print(words, markup=False)
        page.section(f"{name}: radius by depth")
        page.text(words)
        page.table(["depth", "rows", "mean radius"], [list(row) for row in rows])
    return [
        finite({"matrix": name, **dataclasses.asdict(each), "verdict": each.verdict}) for name, each in found.items()
    ]
