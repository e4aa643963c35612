"""Reading a run directory: `config.yaml`, `env.json`, `metrics.jsonl` and, at the end, `result.json`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from leafward.engine.layout import is_run
from leafward.errors import DataError, UsageError
from leafward.report.number import Number
from leafward.report.page import flatten

_LARGEST_FILE = 64 * 2**20  # bytes of a configuration, environment or result; metrics are read line by line


@dataclass(frozen=True)
class Run:
    """What a run directory says. `result` is None while the run is unfinished.

    `series` holds one curve per numeric entry of metrics.jsonl: name -> {step: value}, in order of the steps.
    `notes` are remarks on what could not be read.
    """

    path: Path
    config: dict[str, Any]
    environment: dict[str, Any]
    series: dict[str, dict[float, float]]
    result: dict[str, Any] | None
    headline: list[Number]
    notes: list[str] = field(default_factory=list)

    @property
    def recipe(self) -> str:
        """The recipe that made the run; empty where its environment does not say."""
        return str(self.environment.get("recipe", ""))

    @property
    def last_step(self) -> float | None:
        return max((step for points in self.series.values() for step in points), default=None)


def read_run(path: str | os.PathLike[str]) -> Run:
    """Read a run directory. A torn last line of metrics.jsonl is noted; any other damage is an error."""
    path = Path(path)
    if not path.is_dir():
        raise DataError(f"{path} is not a run directory: " + ("it is a file" if path.exists() else "it does not exist"))
    if not is_run(path):
        raise DataError(f"{path} is not a run directory: it has no config.yaml")
    notes: list[str] = []
    environment = read_json(path / "env.json")
    if environment is None:
        notes.append("there is no env.json")
    result = read_json(path / "result.json")
    if result is None:
        notes.append("unfinished: there is no result.json yet")
    return Run(
        path=path,
        config=_read_yaml(path / "config.yaml"),
        environment=environment or {},
        series=_read_series(path, notes),
        result=result,
        headline=read_headline(path / "result.json", result or {}),
        notes=notes,
    )


def _read_text(path: Path) -> str:
    try:
        size = path.stat().st_size
        if size > _LARGEST_FILE:
            raise DataError(f"{path} has {size:,} bytes; at most {_LARGEST_FILE:,} are read")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error


def _read_yaml(path: Path) -> dict[str, Any]:
    import yaml

    try:
        value = yaml.safe_load(_read_text(path))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise DataError(f"{path}{line}: not valid YAML ({getattr(error, 'problem', None) or error})") from error
    return _mapping(value, path)


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file, or None where there is no such file."""
    if not path.exists():
        return None
    text = _read_text(path)
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{path}, line {error.lineno}: not valid JSON ({error.msg})") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not valid JSON ({error})") from error
    return _mapping(value, path)


def _mapping(value: Any, path: Path) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"{path} must hold keys and values, not {type(value).__name__}")
    return value


def read_headline(path: Path, result: dict[str, Any]) -> list[Number]:
    """The headline numbers in the object of the JSON file `path`."""
    records = result.get("headline", [])
    if not isinstance(records, list):
        raise DataError(f"{path}: headline must be a list, not {type(records).__name__}")
    numbers = []
    for index, record in enumerate(records):
        try:
            numbers.append(Number.from_json(record))
        except UsageError as error:
            raise DataError(f"{path}: headline[{index}]: {error}") from error
        if numbers[-1].name in (number.name for number in numbers[:-1]):
            raise DataError(f"{path}: headline[{index}]: the name {numbers[-1].name!r} occurs twice")
    return numbers


def _read_series(path: Path, notes: list[str]) -> dict[str, dict[float, float]]:
    """The series of the run; of one that only puts members together, those of its members, by their names."""
    members = sorted(path.glob("members/*/metrics.jsonl"))
    if members and not (path / "metrics.jsonl").exists():
        by_member = {file.parent.name: _read_metrics(file, notes) for file in members}
        return {f"{name}, {member}": points for member, of in by_member.items() for name, points in of.items()}
    return _read_metrics(path / "metrics.jsonl", notes)


def _read_metrics(path: Path, notes: list[str]) -> dict[str, dict[float, float]]:
    """The numeric series by step, or by the record's place where it names none.

    A run that was resumed repeats steps; the later value of a step is the one that counts.
    """
    series: dict[str, dict[float, float]] = {}
    left_out = 0
    for index, record in enumerate(_records(path, notes)):
        step = record.pop("step", None)
        if not _is_finite(step):
            step = index
        for name, value in flatten(record).items():
            if _is_finite(value):
                series.setdefault(name, {})[step] = value
            elif isinstance(value, float):
                left_out += 1
    if left_out:
        notes.append(f"metrics.jsonl: {left_out} values that are not finite are left out of the curves")
    return {name: dict(sorted(points.items())) for name, points in series.items()}


def _records(path: Path, notes: list[str]) -> Iterator[dict[str, Any]]:
    if not path.exists():
        notes.append("there is no metrics.jsonl")
        return
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    yield _record(line)
                except (ValueError, RecursionError) as error:
                    if line.endswith(b"\n"):
                        raise DataError(f"{path}, line {number}: not valid JSON ({error})") from error
                    # a complete line ends in a newline, so this one was cut off while it was written
                    notes.append(f"metrics.jsonl: the last line ({number}) is torn and left out")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error


def _record(line: bytes) -> dict[str, Any]:
    record = json.loads(line.decode("utf-8"))
    if not isinstance(record, dict):
        raise ValueError(f"an object is expected, not {type(record).__name__}")
    return record


def _is_finite(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) <= sys.float_info.max
