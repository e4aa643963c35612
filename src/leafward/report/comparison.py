"""One page that compares runs: headline numbers, what differs in configuration and environment, curves."""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from leafward.errors import UsageError
from leafward.report.figures import SERIES, legend, line_with_band, literal, log_axis, new_figure
from leafward.report.number import Estimate, Number, exact
from leafward.report.page import Page, flatten
from leafward.report.runs import Run, read_run

_MOST_FIGURES = 60
_MOST_POINTS = 400  # of one curve; beyond it the line shows means and the band the range
_LOG_RANGE = 20.0  # a positive series that spans more than this factor gets a logarithmic axis


def compare(runs: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str]) -> None:
    """Write the page that compares the run directories `runs` to `out`."""
    paths = [Path(run) for run in runs]
    if not paths:
        raise UsageError("give at least one run directory")
    named = dict(zip(shortest_names(paths), map(read_run, paths), strict=True))

    page = Page(f"Comparison of {len(named)} runs" if len(named) > 1 else f"Run {next(iter(named))}")
    page.section("Runs")
    _runs(page, named)
    groups = _by_recipe(named)
    page.section("Headline numbers")
    for recipe, group in groups.items():
        numbers = {name: run.headline for name, run in group.items()}
        headline_table(page, "run", numbers, recipe if len(groups) > 1 else "")
    if any(number.interval for run in named.values() for number in run.headline):
        page.text("Brackets hold 95 % intervals unless the run's own report says otherwise.")
    page.section("Configuration")
    for group in groups.values():
        _settings(page, "configuration", {name: run.config for name, run in group.items()})
    page.section("Curves")
    _curves(page, named)
    page.section("Environment")
    _settings(page, "environment", {name: run.environment for name, run in named.items()})
    page.command(f"leafward report {shlex.join(map(str, paths))} --out {shlex.quote(str(out))}")
    page.write(out)


def shortest_names(paths: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell them apart; one that is there twice is refused."""
    repeated = [str(path) for path, count in Counter(path.resolve() for path in paths).items() if count > 1]
    if repeated:
        raise UsageError(f"each may be given once; given twice: {', '.join(repeated)}")
    parts = [path.resolve().parts for path in paths]
    ends = (["/".join(part[-length:]) for part in parts] for length in range(1, max(map(len, parts)) + 1))
    return next(names for names in ends if len(set(names)) == len(names))


def _by_recipe(runs: Mapping[str, Run]) -> dict[str, dict[str, Run]]:
    """The runs of each recipe: those of different ones share neither their numbers nor their settings."""
    groups: dict[str, dict[str, Run]] = {}
    for name, run in runs.items():
        groups.setdefault(run.recipe, {})[name] = run
    return groups


def _runs(page: Page, runs: Mapping[str, Run]) -> None:
    rows = [
        [name, "unfinished" if run.result is None else "finished", run.last_step, run.recipe or None, str(run.path)]
        for name, run in runs.items()
    ]
    page.table(["run", "state", "last step", "recipe", "directory"], rows)
    for name, run in runs.items():
        for note in run.notes:
            page.note(f"{name}: {note}")


def headline_table(page: Page, noun: str, headlines: Mapping[str, Sequence[Number]], caption: str) -> None:
    """One row per run (or whatever `noun` says); one column per number, and one for its twin where any has a twin."""
    by_run = [{number.name: number for number in numbers} for numbers in headlines.values()]
    columns: dict[str, list[Any]] = {}
    for name in dict.fromkeys(name for numbers in by_run for name in numbers):
        found = [numbers.get(name) for numbers in by_run]
        title = _column_title(next(number for number in found if number))
        columns[title] = [number and _cell(number.estimate) for number in found]
        twins = [number.twin_estimate if number else None for number in found]
        if any(twins):
            twin_name = next(number.twin_name for number in found if number and number.twin is not None)
            columns[f"{name}: {twin_name}"] = [twin and _cell(twin) for twin in twins]
    if not columns:
        page.text(f"{', '.join(headlines)}: no headline numbers.")
        return
    page.table([noun, *columns], list(zip(headlines, *columns.values(), strict=True)), caption)


def _column_title(number: Number) -> str:
    unit = f", {number.unit}" if number.unit else ""
    return f"{number.name}{unit}" + (f" ({number.better} is better)" if number.better else "")


def _cell(estimate: Estimate) -> Estimate | float | None:
    return estimate if estimate.interval else estimate.value


def _settings(page: Page, what: str, by_run: Mapping[str, Mapping[str, Any]]) -> None:
    """A table of the keys in which the runs differ, and all of each run's keys folded away."""
    flat = [flatten(values) for values in by_run.values()]
    keys = dict.fromkeys(key for values in flat for key in values)
    rows = [[key, *(exact(values[key]) if key in values else None for values in flat)] for key in keys]
    differing = [row for row in rows if len(set(row[1:])) > 1]
    if differing:
        page.table(["key", *by_run], differing, caption=f"Where the runs differ in {what}")
    elif len(by_run) > 1:
        page.text(f"The runs do not differ in {what}.")
    for name, values in by_run.items():
        page.details(f"The whole {what} of {name}", values)


def _curves(page: Page, runs: Mapping[str, Run]) -> None:
    names = list(dict.fromkeys(name for run in runs.values() for name in run.series))
    if not names:
        page.text("No run has logged a number yet.")
    for name in names[:_MOST_FIGURES]:
        _curve(page, name, {run_name: run.series.get(name, {}) for run_name, run in runs.items()})
    if len(names) > _MOST_FIGURES:
        page.note(f"{len(names)} series were logged; the first {_MOST_FIGURES} are drawn.")


def _curve(page: Page, name: str, by_run: Mapping[str, Mapping[float, float]]) -> None:
    figure, axes = new_figure()
    for index, (run_name, points) in enumerate(by_run.items()):
        if not points:
            continue
        x, mean, low, high = _thinned(points)
        band = (low, high) if len(points) > _MOST_POINTS else (None, None)
        marker = "o" if len(points) == 1 else None
        line_with_band(axes, x, mean, *band, label=literal(run_name), marker=marker, **_look(index))
    values = [value for points in by_run.values() for value in points.values()]
    if min(values) > 0 and max(values) > _LOG_RANGE * min(values):
        log_axis(axes, "y")
    axes.set(xlabel="step", ylabel=literal(name))
    if len(by_run) > 1:
        legend(axes)
    thinned = any(len(points) > _MOST_POINTS for points in by_run.values())
    remark = " (long curves: mean of neighbouring steps, with their range as the band)" if thinned else ""
    page.figure(figure, f"{name} against step{remark}", alt=f"{name} against step for {', '.join(by_run)}")


def _look(index: int) -> dict[str, str]:
    """A run looks the same in every figure; dashes tell more runs apart than there are colours."""
    return {"color": SERIES[index % len(SERIES)], "linestyle": ("-", "--", ":")[index // len(SERIES) % 3]}


def _thinned(points: Mapping[float, float]) -> tuple[list[float], ...]:
    """Steps, means, minima and maxima of at most `_MOST_POINTS` groups of neighbouring steps."""
    import numpy as np

    steps, values = (np.array(list(column), float) for column in (points, points.values()))
    groups = min(len(steps), _MOST_POINTS)
    starts = np.arange(groups) * len(steps) // groups
    sizes = np.diff(starts, append=len(steps))
    columns = (
        np.add.reduceat(steps, starts) / sizes,
        np.add.reduceat(values, starts) / sizes,
        np.minimum.reduceat(values, starts),
        np.maximum.reduceat(values, starts),
    )
    return tuple(column.tolist() for column in columns)
