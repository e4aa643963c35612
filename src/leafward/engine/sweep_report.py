"""What the variants of a sweep found together: the best of each side, whether it lies at an edge, and the page."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leafward.config import flatten
from leafward.engine.run import CELLS, RunDirectory
from leafward.report.result import Result
from leafward.stats.estimate import Estimate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = dict[str, Any]
"""One cell: its name, the settings that it changes, its run, its headline numbers, and why it failed if it did."""
SHOWN = 4
"""Headline numbers in the table; the cells' own pages have all."""
DECADE = 8.0
"""From this ratio between the ends of an axis on it is logarithmic."""


def row_of(name: str, changes: Mapping[str, Any], config: Any, path: Path, failed: str | None) -> Row:
    plain = flatten(config)
    settings = {key: plain.get(key) for key in changes}
    headline = [] if failed else RunDirectory.open(path).result()["headline"]
    return {
        "cell": name,
        "settings": settings,
        "run": f"{CELLS}/{name}",
        "headline": headline,
        **({"failed": failed} if failed else {}),
    }


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """The rows, the best of each side by its first headline number, and notes: for every best value at an edge, and
    for every variant without a result."""
    result: dict[str, Any] = {"cells": list(rows), "best": {}, "headline": [], "notes": []}
    for side in ("value", "twin"):
        best = best_of(rows, side)
        if best is None:
            continue
        number = best["headline"][0]
        result["best"][side] = {"cell": best["cell"], "name": number["name"], "value": number[side]}
        who = "" if side == "value" else f"{number.get('twin_name', 'twin')}: "
        result["notes"] += [who + note for note in edges(rows, best, side)]
        if side == "value":
            result["headline"] = best["headline"]
    result["notes"] += [f"{row['cell']} has no result: {row['failed']}" for row in rows if "failed" in row]
    chosen = result["best"]
    if "twin" in chosen:
        twin = next(row for row in rows if row["cell"] == chosen["twin"]["cell"])["headline"][0]
        note = f"each side at its best: {chosen['value']['cell']}, its twin {chosen['twin']['cell']}"
        sides = {"twin": twin["twin"], "twin_interval": twin.get("twin_interval"), "note": note}
        result["headline"] = [result["headline"][0] | sides]
    elif result["headline"]:
        result["headline"] = [result["headline"][0] | {"note": f"the best of {len(rows)}: {chosen['value']['cell']}"}]
    return result


def best_of(rows: Sequence[Row], side: str) -> Row | None:
    """The cell with the best first headline number of a side; None where it has none, or no direction is better."""
    scored = [row for row in rows if row["headline"] and row["headline"][0].get(side) is not None]
    if not scored or scored[0]["headline"][0].get("better") is None:
        return None
    pick = max if scored[0]["headline"][0]["better"] == "higher" else min
    return pick(scored, key=lambda row: row["headline"][0][side])


def edges(rows: Sequence[Row], best: Row, side: str) -> list[str]:
    """The settings of `best` that lie at an end of what was tried of them, in words; not where another value is as
    good, as of a curvature that a Euclidean twin does not have."""
    equal = [row for row in rows if row["headline"] and row["headline"][0].get(side) == best["headline"][0][side]]
    notes = []
    for key in numeric_axes(rows):
        values, good = tried(rows, key), tried(equal, key)
        if len(good) == 1 and good[0] in (values[0], values[-1]):
            notes.append(f"{key} = {good[0]:g} is the best tried, at the edge of the grid: better may lie beyond")
    return notes


def numeric_axes(rows: Sequence[Row]) -> list[str]:
    """The settings of which several numbers were tried."""
    return [key for key in dict.fromkeys(key for row in rows for key in row["settings"]) if len(tried(rows, key)) > 1]


def tried(rows: Sequence[Row], key: str) -> list[float]:
    """The numbers that were tried of a setting, in order."""
    values = [row["settings"].get(key) for row in rows]
    return sorted({each for each in values if isinstance(each, int | float) and not isinstance(each, bool)})


def result_of(recipe: str, found: Mapping[str, Any], run: RunDirectory) -> Result:
    """The best, a figure for every numeric axis or one of all variants, and a row for each cell."""
    rows = found["cells"]
    what = ", ".join(dict.fromkeys(key for row in rows for key in row["settings"]))
    title = f"{recipe}: {len(rows)} variants"
    made = Result.of(found, title, f"{what}; every variant is a run of its own, in {CELLS}/", run=run.path)
    made.section("Variants")
    for draw, caption in figures(rows):
        made.figure(draw, caption)
    made.table(*table(rows), "The best of a side is marked with a star." if found["best"] else "", terminal=True)
    return made


def table(rows: Sequence[Row]) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows: what each variant changes, its first headline numbers, and those of its twin."""
    names = list(dict.fromkeys(number["name"] for row in rows for number in row["headline"]))[:SHOWN]
    twins = any(number.get("twin") is not None for row in rows for number in row["headline"][:1])
    best = {side: best_of(rows, side) for side in ("value", "twin")}
    keys = list(dict.fromkeys(key for row in rows for key in row["settings"]))
    columns = ["variant", *(key for key in keys if tried(rows, key)), *names]
    columns += [f"{names[0]}, twin"] if twins else []
    cells = []
    for row in rows:
        numbers = {each["name"]: Estimate.from_json(each) for each in row["headline"]}
        stars = "".join(f" ★{' (twin)' * (side == 'twin')}" for side in best if best[side] is row)
        found = [numbers.get(name) for name in names]
        twin = [numbers[names[0]].twin if names[0] in numbers else None] if twins else []
        settings = [row["settings"].get(key) for key in keys if tried(rows, key)]
        cells.append([row["cell"] + stars, *settings, *found, *(each or Estimate(None) for each in twin)])
    return columns, cells


def figures(rows: Sequence[Row]) -> list[tuple[Callable[[], Figure], str]]:
    """The first headline number against every setting of which several numbers were tried; where there is none, of all
    variants under one another."""
    from leafward.report import dots

    scored = [row for row in rows if row["headline"] and row["headline"][0]["value"] is not None]
    if len(scored) < 2:
        return []
    name = scored[0]["headline"][0]["name"]
    axes = numeric_axes(scored)
    if not axes:
        shown = {row["cell"]: Estimate.from_json(row["headline"][0]) for row in scored}
        return [(partial(dots, shown), f"{name} of every variant, with its interval where it has one.")]
    return [
        (partial(against, scored, key, name), f"{name} against {key}; a line for all that is otherwise the same.")
        for key in axes
    ]


def against(rows: Sequence[Row], key: str, name: str) -> Figure:
    """A line for every combination of the other settings, and a dashed one for its twin."""
    from leafward.report import legend, line_with_band, log_axis, new_figure

    figure, axes = new_figure()
    lines: dict[str, list[Row]] = {}
    for row in rows:
        others = ", ".join(
            f"{other.rpartition('.')[2]} {each}" for other, each in row["settings"].items() if other != key
        )
        lines.setdefault(others, []).append(row)
    for label, members in lines.items():
        members.sort(key=lambda row: row["settings"][key])
        x = [row["settings"][key] for row in members]
        band = _band(members) if len(lines) == 1 else (None, None)  # several would hide each other
        drawn = line_with_band(axes, x, _side(members, "value"), *band, label=label or name, marker="o")
        twin = _side(members, "twin")
        if not all(map(math.isnan, twin)):
            chosen = {"color": drawn.get_color(), "linestyle": "--", "marker": "o"}
            line_with_band(axes, x, twin, label=f"{label}, twin" if label else "twin", **chosen)
    values = tried(rows, key)
    axes.set(xlabel=key, ylabel=name)
    if values[0] > 0 and values[-1] >= DECADE * values[0]:
        log_axis(axes, "x")
    legend(axes)
    return figure


def _side(rows: Sequence[Row], side: str) -> list[float]:
    found = [row["headline"][0].get(side) for row in rows]
    return [math.nan if each is None else each for each in found]


def _band(rows: Sequence[Row]) -> tuple[list[float], list[float]] | tuple[None, None]:
    intervals = [row["headline"][0].get("interval") for row in rows]
    if any(each is None for each in intervals):
        return None, None
    low, high = zip(*intervals, strict=True)
    return list(low), list(high)
