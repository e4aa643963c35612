"""What evaluations and audits leave behind, compared: numbers without a configuration and without curves."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leafward.errors import DataError, UsageError
from leafward.report.comparison import headline_table
from leafward.report.figures import dots
from leafward.report.number import Number
from leafward.report.page import Page, flatten
from leafward.report.runs import read_headline, read_json

_MOST_ROWS = 200
_MOST_FIGURES = 24


@dataclass(frozen=True)
class Record:
    """One evaluation or audit: what it is of (those of one `kind` share their numbers), and all that was found.

    `scores` holds every number by its dotted name.
    """

    path: Path
    kind: str
    headline: list[Number]
    scores: dict[str, float]


def read_evaluation(path: str | os.PathLike[str]) -> Record:
    """The record of an evaluation from its JSON file."""
    path = Path(path)
    found = read_object(path)
    kind = str(found.get("evaluation") or found.get("task") or path.stem)
    return Record(path, kind, read_headline(path, found), numbers_of(found))


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    found = read_json(path)
    if found is None:
        raise DataError(f"there is no file {path}")
    return found


def numbers_of(found: Mapping[str, Any]) -> dict[str, float]:
    """The numbers in a nested mapping by dotted names, without the headline, and without lists."""
    rest = {key: value for key, value in found.items() if key != "headline"}
    return {
        name: value
        for name, value in flatten(rest).items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def compare_records(records: Mapping[str, Record], noun: str, command: str, out: str | os.PathLike[str]) -> None:
    """Write the page that compares records, by their names, to `out`; noun: "evaluation" or "audit"."""
    if not records:
        raise UsageError(f"give at least one {noun}")
    many = f"Comparison of {len(records)} {noun}s"
    page = Page(many if len(records) > 1 else f"{noun.capitalize()} {next(iter(records))}")
    page.section(f"{noun.capitalize()}s")
    page.table([noun, "of", "file"], [[name, record.kind, str(record.path)] for name, record in records.items()])
    groups: dict[str, dict[str, Record]] = {}
    for name, record in records.items():
        groups.setdefault(record.kind, {})[name] = record
    for kind, group in groups.items():
        page.section(kind)
        headline_table(page, noun, {name: record.headline for name, record in group.items()}, "")
        if any(number.interval for record in group.values() for number in record.headline):
            page.text("Brackets and lines hold 95 % intervals unless a note says otherwise.")
        _figures(page, group)
        _scores(page, group)
    page.section("How this was made")
    page.command(command)
    page.write(out)


def _figures(page: Page, group: Mapping[str, Record]) -> None:
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
            figure = dots({own: number.estimate for own, number in having.items()})
            page.figure(figure, f"{name}, {unit}" if unit else name, alt=f"{name} of {', '.join(having)}")
    if len(names) > _MOST_FIGURES:
        page.note(f"There are {len(names)} headline numbers; the first {_MOST_FIGURES} are drawn.")


def _scores(page: Page, group: Mapping[str, Record]) -> None:
    names = list(dict.fromkeys(name for record in group.values() for name in record.scores))
    rows = [[name, *(record.scores.get(name) for record in group.values())] for name in names[:_MOST_ROWS]]
    page.table(["", *group], rows, "All numbers")
    if len(names) > _MOST_ROWS:
        page.note(f"There are {len(names)} numbers; the first {_MOST_ROWS} are in the table.")
