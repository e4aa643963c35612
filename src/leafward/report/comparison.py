"""Trainings, evaluations or audits side by side: headline numbers, what differs, every number, curves."""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from leafward.errors import UsageError
from leafward.report.figures import MOST_POINTS, course, dots, literal
from leafward.report.records import Record, read
from leafward.report.render import flatten
from leafward.report.result import Result
from leafward.stats.digits import exact
from leafward.stats.estimate import Estimate

_MOST_FIGURES, _MOST_ROWS = 60, 200


def compare(targets: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str] = "report.html") -> Result:
    """The comparison of run directories, evaluations or audits, all of one kind; `out` stands in its command."""
    paths = [Path(each) for each in targets]
    if not paths:
        raise UsageError("give one or more run directories, evaluations or audits")
    found = {path: read(path) for path in paths}
    nouns = {path: noun for path, (noun, _) in found.items()}
    if len(set(nouns.values())) > 1:
        said = ", ".join(f"{path} ({noun})" for path, noun in nouns.items())
        raise UsageError(f"runs, evaluations and audits have no numbers in common; compare those of one kind: {said}")
    records = {
        f"{name}: {own}" if own else name: record
        for name, (_, several) in zip(shortest_names(paths), found.values(), strict=True)
        for own, record in several.items()
    }
    made = _compared(records, nouns[paths[0]])
    made.section("How this was made")
    made.command(shlex.join(["leafward", "report", *map(str, paths), "--out", str(out)]))
    return made


def shortest_names(paths: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell them apart; one that is there twice is refused."""
    repeated = [str(path) for path, count in Counter(path.resolve() for path in paths).items() if count > 1]
    if repeated:
        raise UsageError(f"each may be given once; given twice: {', '.join(repeated)}")
    parts = [path.resolve().parts for path in paths]
    ends = (["/".join(part[-length:]) for part in parts] for length in range(1, max(map(len, parts)) + 1))
    return next(names for names in ends if len(set(names)) == len(names))


def _compared(records: Mapping[str, Record], noun: str) -> Result:
    many = f"Comparison of {len(records)} {noun}s"
    made = Result(many if len(records) > 1 else f"{noun.capitalize()} {next(iter(records))}")
    made.section(f"{noun.capitalize()}s")
    _listed(made, records, noun)
    groups: dict[str, dict[str, Record]] = {}
    for name, record in records.items():
        groups.setdefault(record.kind, {})[name] = record
    for kind, group in groups.items():
        made.section(kind or "Headline numbers")
        _headline(made, noun, {name: record.headline for name, record in group.items()})
        if any(number.interval for record in group.values() for number in record.headline):
            made.text("Brackets and lines hold 95 % confidence intervals unless a note says otherwise.")
        _side_by_side(made, group)
        if any(record.scores for record in group.values()):
            _scores(made, group)
        if noun == "run":
            _settings(made, "configuration", {name: record.config for name, record in group.items()})
    if noun == "run":
        made.section("Curves")
        _curves(made, records)
        made.section("Environment")
        _settings(made, "environment", {name: record.environment for name, record in records.items()})
    return made


def _listed(made: Result, records: Mapping[str, Record], noun: str) -> None:
    if noun == "run":
        rows = []
        for name, record in records.items():
            last = max((step for points in record.series.values() for step in points), default=None)
            state = "finished" if record.finished else "unfinished"
            rows.append([name, state, last, record.kind or None, str(record.path)])
        made.table(["run", "state", "last step", "recipe", "directory"], rows)
    else:
        rows = [[name, record.kind, str(record.path)] for name, record in records.items()]
        made.table([noun, "of", "file"], rows)
    for name, record in records.items():
        for note in record.notes:
            made.note(f"{name}: {note}")


def _headline(made: Result, noun: str, headlines: Mapping[str, Sequence[Estimate]]) -> None:
    """One row per run (or whatever `noun` says); one column per number, and one for its twin where any has a twin."""
    by_run = [{number.name: number for number in numbers} for numbers in headlines.values()]
    columns: dict[str, list[Any]] = {}
    for name in dict.fromkeys(name for numbers in by_run for name in numbers):
        found = [numbers.get(name) for numbers in by_run]
        columns[_title(next(number for number in found if number))] = [number and _cell(number) for number in found]
        beside = [number.twin if number else None for number in found]
        if any(beside):
            twin_name = next(number.twin_name for number in found if number and number.twin is not None)
            columns[f"{name}: {twin_name}"] = [twin and _cell(twin) for twin in beside]
    if not columns:
        made.text(f"{', '.join(headlines)}: no headline numbers.")
        return
    made.table(
        [noun, *columns], list(zip(headlines, *columns.values(), strict=True)), "Headline numbers", terminal=True
    )


def _title(number: Estimate) -> str:
    unit = f", {number.unit}" if number.unit else ""
    return f"{number.name}{unit}" + (f" ({number.better} is better)" if number.better else "")


def _cell(number: Estimate) -> Estimate | float | None:
    return number if number.interval else number.value


def _side_by_side(made: Result, group: Mapping[str, Record]) -> None:
    """One figure for each headline number that two or more of the records have."""
    names = list(dict.fromkeys(number.name for record in group.values() for number in record.headline))
    for name in names[:_MOST_FIGURES]:
        having = {
            own: number
            for own, record in group.items()
            for number in record.headline
            if number.name == name and number.value is not None
        }
        if len(having) > 1:
            unit = next(number.unit for number in having.values())
            made.figure(dots(having), f"{name}, {unit}" if unit else name, alt=f"{name} of {', '.join(having)}")
    _say_left_out(made, len(names), "headline numbers")


def _scores(made: Result, group: Mapping[str, Record]) -> None:
    names = list(dict.fromkeys(name for record in group.values() for name in record.scores))
    rows = [[name, *(record.scores.get(name) for record in group.values())] for name in names[:_MOST_ROWS]]
    made.table(["", *group], rows, "All numbers")
    if len(names) > _MOST_ROWS:
        made.note(f"There are {len(names)} numbers; the first {_MOST_ROWS} are in the table.")


def _settings(made: Result, what: str, by_run: Mapping[str, Mapping[str, Any]]) -> None:
    """A table of the keys in which the runs differ, and all of each run's keys folded away."""
    flat = [flatten(values) for values in by_run.values()]
    keys = dict.fromkeys(key for values in flat for key in values)
    rows = [[key, *(exact(values[key]) if key in values else None for values in flat)] for key in keys]
    differing = [row for row in rows if len(set(row[1:])) > 1]
    if differing:
        made.table(["key", *by_run], differing, caption=f"Where the runs differ in {what}")
    elif len(by_run) > 1:
        made.text(f"The runs do not differ in {what}.")
    for name, values in by_run.items():
        made.details(f"The whole {what} of {name}", values)


def _curves(made: Result, runs: Mapping[str, Record]) -> None:
    names = list(dict.fromkeys(name for run in runs.values() for name in run.series))
    if not names:
        made.text("No run has logged a number yet.")
    for name in names[:_MOST_FIGURES]:
        by_run = {run_name: run.series.get(name, {}) for run_name, run in runs.items()}
        thinned = any(len(points) > MOST_POINTS for points in by_run.values())
        remark = " (long curves: mean of neighbouring steps, with their range as the band)" if thinned else ""
        alt = f"{name} against step for {', '.join(by_run)}"
        series: dict[str, list[Any]] = {run: [points] if points else [] for run, points in by_run.items()}
        draw = partial(course, series, by_range=True, xlabel="step", ylabel=literal(name))
        made.figure(draw, f"{name} against step{remark}", alt=alt)
    _say_left_out(made, len(names), "series")


def _say_left_out(made: Result, count: int, what: str) -> None:
    if count > _MOST_FIGURES:
        made.note(f"There are {count} {what}; the first {_MOST_FIGURES} are drawn.")
