"""Claims of papers, the records of what was measured of them, and the page that the two give by one rule.

A folder `evidence/` has `claims/SYSTEM.yaml`, what a paper says, with the tolerance that was set beforehand, and
`records/SYSTEM.yaml`, what a command printed. Nobody writes a verdict: `leafward.stats.verdict` decides it.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, field

from leafward.config import Settings, checked, parse_yaml
from leafward.errors import DataError, UsageError, nearest
from leafward.files import read_text
from leafward.report.render import flatten
from leafward.stats.digits import MISSING
from leafward.stats.estimate import ANY, Estimate, Interval, Over
from leafward.stats.verdict import SCALE, UNTESTED, Tolerance, judge

CLAIMS, RECORDS, INTRODUCTION, REMARKS = "claims", "records", "introduction.md", "remarks.md"
Date = Annotated[str, Meta(pattern=r"^\d{4}-\d\d-\d\d$", description="a date as 2026-11-20")]


class Test(Settings, frozen=True):
    """One number of a claim: between which values it must lie for the claim to hold, and when that was set."""

    low: float | None = None
    high: float | None = None
    set: Date = ""
    commit: str = ""
    """The commit that set it, where that was before the tolerance came to stand here."""
    possible: tuple[float, float] | None = None
    """Between which values it always lies."""
    seeds: bool = False
    """Trainings differ from seed to seed: an interval over anything else does not decide."""
    read: str = ""
    """Where the number is in what the command gives: the name of a headline number, or a dotted path in its JSON;
    "status": whether the command succeeds."""

    def conditions(self) -> None:
        _ = self.tolerance

    @property
    def tolerance(self) -> Tolerance:
        low, high = ANY
        return Tolerance(low if self.low is None else self.low, high if self.high is None else self.high)


class Claim(Settings, frozen=True):
    """What a paper says, and how it is tested."""

    statement: str
    command: str
    tests: dict[str, Test] = field(default_factory=dict)
    """By name; of a single number it may be empty. Without any there is nothing yet that could be measured."""
    setting: str = ""
    """What stands beside the command: data, hardware, sizes."""
    place: str = ""
    """Where the paper says it."""
    scale: str = ""
    """The paper's scale, where ours differs."""
    cpu_minutes: float | None = None
    """What the command may take on two cores; None: it needs a GPU."""


class Paper(Settings, frozen=True):
    paper: str
    title: str
    claims: dict[str, Claim]


class Number(Settings, frozen=True):
    """One number that was measured. Without `low` and `high` it has no interval, unless it is exact."""

    value: float | None
    low: float | None = None
    high: float | None = None
    seeds: int = 0
    samples: int = 0
    of: str = "samples"
    unit: str = ""
    exact: bool = False
    """A count or an identity, which has no uncertainty."""
    small: bool = False
    """The test is much smaller than the paper's."""

    def conditions(self) -> None:
        self.estimate(Test(low=0.0))

    def estimate(self, test: Test) -> Estimate:
        pair = None if self.low is None or self.high is None else (self.low, self.high)
        interval = None if pair is None else Interval(*pair, Over(self.seeds, self.samples, self.of))
        return Estimate(self.value, interval, unit=self.unit, possible=test.possible or ANY)


class Measurement(Settings, frozen=True):
    """What was measured of one claim."""

    date: Date
    numbers: dict[str, Number] = field(default_factory=dict)
    commit: str = ""
    """The commit that recorded it, where that was before it came to stand here."""
    scale: str = ""
    """The scale of the test."""
    more: str = ""
    """What else was printed, or must be known to read the numbers."""
    remark: str = ""
    """What the verdict is worth."""


@dataclass(frozen=True)
class Row:
    """A claim with what was measured of it, if anything was."""

    system: str
    name: str
    paper: Paper
    claim: Claim
    record: Measurement | None

    def found(self, name: str) -> Estimate:
        number = None if self.record is None else self.record.numbers.get(name)
        return Estimate(None) if number is None else number.estimate(self.claim.tests[name])

    def verdicts(self) -> dict[str, str]:
        """The verdict on each of its numbers."""
        numbers = {} if self.record is None else self.record.numbers
        return {
            name: judge(
                self.found(name),
                test.tolerance,
                exact=name in numbers and numbers[name].exact,
                small=name in numbers and numbers[name].small,
                over_seeds=test.seeds,
            )
            for name, test in self.claim.tests.items()
        }

    @property
    def verdict(self) -> str:
        """The verdicts in words, each once, and what they are worth; † : a tolerance was set later than the result."""
        verdicts = self.verdicts()
        if len(set(verdicts.values())) <= 1:
            said = next(iter(verdicts.values()), UNTESTED)
        else:
            said = "; ".join(f"{name}: {verdict}" for name, verdict in verdicts.items())
        said += f" (the paper: {self.claim.scale})" if SCALE in verdicts.values() and self.claim.scale else ""
        remark = f". {self.record.remark}" if self.record is not None and self.record.remark else ""
        return said + " †" * self.set_later() + remark

    def set_later(self) -> bool:
        """Whether a tolerance was set when the result was already known."""
        tests = self.claim.tests.values()
        return self.record is not None and any(test.set > self.record.date for test in tests)


def read(folder: str | Path) -> list[Row]:
    """Every claim in the folder, in the order of the files."""
    folder = Path(folder)
    files = sorted((folder / CLAIMS).glob("*.yaml"))
    if not files:
        raise DataError(f"{folder} holds no claims: there is no file {folder / CLAIMS / 'SYSTEM.yaml'}")
    return [row for file in files for row in _rows(file, folder / RECORDS / file.name)]


def _rows(claims: Path, records: Path) -> Iterator[Row]:
    paper = _load(Paper, claims, _yaml(claims))
    measured = {
        name: _load(Measurement, records, values)
        for name, values in (_yaml(records) if records.exists() else {}).items()
    }
    for name, record in measured.items():
        if name not in paper.claims:
            raise DataError(f"{records}: {name!r} is no claim of {claims}; {nearest(name, paper.claims)}")
        for number in record.numbers:
            if number not in paper.claims[name].tests:
                known = nearest(number, paper.claims[name].tests)
                raise DataError(f"{records}: {name}: {number!r} is not tested by the claim; {known}")
    for name, claim in paper.claims.items():
        row = Row(claims.stem, name, paper, claim, measured.get(name))
        try:
            row.verdicts()
        except UsageError as error:
            raise DataError(f"{records}: {name}: {error}") from error
        yield row


def _yaml(path: Path) -> dict[str, Any]:
    return parse_yaml(read_text(path), str(path))


def _load(kind: Any, path: Path, values: Any) -> Any:
    try:
        return checked(kind, values)
    except UsageError as error:
        raise DataError(f"{path}: {error}") from error


def find(rows: list[Row], name: str) -> Row:
    """The claim of that name, SYSTEM/CLAIM."""
    known = {f"{row.system}/{row.name}": row for row in rows}
    if name not in known:
        raise UsageError(f"unknown claim {name!r}; {nearest(name, known)}")
    return known[name]


def render(folder: str | Path) -> str:
    """docs/evidence.md: the introduction, the table of claims by the rule, and the remarks."""
    folder = Path(folder)
    lines = ["| paper | claim | command | our number [95 % CI] | verdict |", "|---|---|---|---|---|"]
    before = None
    for row in read(folder):
        command = f"`{row.claim.command}`" if row.claim.command != before else "the same"
        setting = row.claim.setting
        command += (" " if setting.startswith("(") else ": ") * bool(setting) + setting
        before = row.claim.command
        cells = (row.paper.paper, _statement(row.claim), command, _numbers(row), row.verdict)
        lines.append("| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |")
    parts = [read_text(folder / INTRODUCTION).strip(), "\n".join(lines), read_text(folder / REMARKS).strip()]
    return "\n\n".join(parts) + "\n"


def _statement(claim: Claim) -> str:
    return claim.statement + (f" ({claim.place})" if claim.place else "")


def _numbers(row: Row) -> str:
    if row.record is None:
        return MISSING
    shown = []
    for name in row.record.numbers:
        found = row.found(name)
        over = f" over {found.over}" if str(found.over) else ""
        shown.append(f"{name}{': ' * bool(name)}{found} {found.unit}".strip() + over)
    return "; ".join(filter(None, [*shown, row.record.more, row.record.scale])) or MISSING


def placeholders(command: str) -> list[str]:
    """Words in capitals that stand for what a command is given."""
    return list(dict.fromkeys(re.findall(r"\b[A-Z][A-Z_]{2,}\b", command)))


def measured(claim: Claim, succeeded: bool, result: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The numbers of a claim from what its command gave."""
    return {name: _measured(name, test, succeeded, result) for name, test in claim.tests.items()}


def _measured(name: str, test: Test, succeeded: bool, result: Mapping[str, Any]) -> dict[str, Any]:
    if test.read == "status":
        return {"value": float(succeeded), "exact": True}
    if not succeeded:
        raise DataError("the command failed; nothing is recorded")
    headline = {each.get("name"): each for each in result.get("headline", [])}
    if test.read in headline:
        found = Estimate.from_json(headline[test.read])
        ends = {} if found.interval is None else {"low": found.interval.low, "high": found.interval.high}
        unit = {"unit": found.unit} if found.unit else {}
        return {"value": found.value, **ends, **(found.over.to_json() or {}), **unit}
    value = flatten(result).get(test.read)
    if not test.read or not isinstance(value, int | float) or isinstance(value, bool):
        raise DataError(
            f"{name or 'the number'}: what the command gave has no number {test.read!r}; nothing is recorded"
        )
    return {"value": float(value)}


def record(folder: Path, row: Row, numbers: Mapping[str, Mapping[str, Any]]) -> Row:
    """Put what was measured into the record of the claim, with today's date; gives the row as it is now."""
    from leafward.config import to_yaml
    from leafward.files import write_text

    path = folder / RECORDS / f"{row.system}.yaml"
    values = _yaml(path) if path.exists() else {}
    kept = {key: each for key, each in values.get(row.name, {}).items() if key in ("scale", "remark")}
    values[row.name] = {"date": datetime.date.today().isoformat(), "numbers": dict(numbers), **kept}
    _load(Measurement, path, values[row.name])
    write_text(path, to_yaml(values))
    return find(read(folder), f"{row.system}/{row.name}")
