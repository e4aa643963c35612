"""What trainings, evaluations and audits left behind, read for a comparison."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from leafward.engine.layout import is_run, members_of
from leafward.engine.run import ENV, METRICS, RESULT, RunDirectory
from leafward.errors import DataError
from leafward.files import read_record
from leafward.report.render import flatten
from leafward.report.result import read_headline
from leafward.stats.estimate import Estimate

EVALUATIONS, AUDIT = ("evaluation.json", "hierarchy.json"), "audit.json"
"""What evaluations, and an audit, leave in their folders."""


@dataclass(frozen=True)
class Record:
    """One training, evaluation or audited matrix: what it is of (those of one `kind` share their numbers), its headline
    numbers, and whatever else there is: every number by its dotted name, settings, environment, one curve for each
    logged number (step -> value), and remarks on what could not be read."""

    path: Path
    kind: str
    headline: list[Estimate]
    scores: Mapping[str, float] = field(default_factory=dict)
    finished: bool = True
    config: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    series: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def read(path: str | os.PathLike[str]) -> tuple[str, dict[str, Record]]:
    """What `path` holds, "run", "evaluation" or "audit", and its records: one, with no name; of an audit of several
    matrices one for each, by the name of the matrix."""
    path = Path(path)
    if not path.exists():
        raise DataError(f"{path} does not exist")
    if is_run(path):
        return "run", {"": read_run(path)}
    files = [path] if path.suffix == ".json" else [path / name for name in (AUDIT, *EVALUATIONS)]
    file = next((each for each in files if each.is_file()), None)
    if file is None:
        names = " or ".join(EVALUATIONS)
        raise DataError(f"{path} is neither a run (config.yaml), nor an evaluation ({names}), nor an audit ({AUDIT})")
    return ("audit", _audits(file)) if file.name == AUDIT else ("evaluation", {"": read_evaluation(file)})


def read_run(path: str | os.PathLike[str]) -> Record:
    """A run directory, finished or not."""
    run = RunDirectory.open(Path(path))
    result = run.result() if run.finished else {}
    notes = [] if run.finished else ["unfinished: there is no result.json yet"]
    environment = read_record(run.path / ENV) if (run.path / ENV).exists() else {}
    notes += [] if environment else ["there is no env.json"]
    members = members_of(run.path) if not (run.path / METRICS).exists() else [run]
    series = {
        name if each.path == run.path else f"{name}, {each.path.name}": points
        for each in members
        for name, points in _series(each, notes).items()
    }
    headline = read_headline(run.path / RESULT, result)
    kind = str(environment.get("recipe", ""))
    return Record(run.path, kind, headline, {}, run.finished, run.config, environment, series, tuple(notes))


def read_evaluation(path: str | os.PathLike[str]) -> Record:
    """The record of an evaluation from its JSON file."""
    path = Path(path)
    found = read_record(path)
    kind = str(found.get("evaluation") or found.get("task") or path.stem)
    return Record(path, kind, read_headline(path, found), numbers_of(found))


def _audits(file: Path) -> dict[str, Record]:
    """One record for each matrix."""
    held = read_record(file)
    audits, matrices = held.get("audits"), held.get("matrices")
    if audits is None and isinstance(matrices, list) and all(isinstance(each, dict) for each in matrices):
        return {str(each.get("matrix", place)): _surveyed(file, each) for place, each in enumerate(matrices)}
    if not isinstance(audits, list) or not audits or not all(isinstance(audit, dict) for audit in audits):
        raise DataError(f"{file}: audits must be a list of what was found of each matrix")
    found: dict[str, Record] = {}
    for place, audit in enumerate(audits):
        scores, own = numbers_of(audit), Path(str(audit.get("target", place))).name * (len(audits) > 1)
        headline = [
            Estimate(scores[key], name=name, note=note) for key, (name, note) in AUDITED.items() if key in scores
        ]
        found[own if own not in found else f"{own} ({place})"] = Record(file, "Superposition", headline, scores)
    return found


def _surveyed(file: Path, matrix: Mapping[str, Any]) -> Record:
    """One matrix of an audit of many: its figures by name."""
    scores = {name.removesuffix(".value"): value for name, value in numbers_of(matrix.get("values", {})).items()}
    scores = {name: value for name, value in scores.items() if "." not in name}
    headline = [Estimate(scores[key], name=name, note=note) for key, (name, note) in SURVEYED.items() if key in scores]
    return Record(file, "Audit", headline, scores)


SURVEYED = {
    "overlap": ("m·⟨overlap²⟩, raw", "1 for random directions"),
    "overlap_centred": ("m·⟨overlap²⟩, mean removed", ""),
    "effective_rank": ("effective rank", ""),
    "delta": ("hyperbolicity δ", "0 for trees"),
    "dimension": ("intrinsic dimension", ""),
}
AUDITED = {
    "raw.scaled_overlap": ("m·⟨overlap²⟩, raw", "1 for random directions"),
    "centred.scaled_overlap": ("m·⟨overlap²⟩, mean removed", ""),
    "raw.participation_ratio": ("participation ratio", ""),
    "represented": ("share of rows represented", ""),
}
"""Number of an audit -> what it is called, and what to read it against."""


def numbers_of(found: Mapping[str, Any]) -> dict[str, float]:
    """The numbers in a nested mapping by dotted names, without the headline, and without lists."""
    rest = flatten({key: value for key, value in found.items() if key != "headline"})
    return {name: value for name, value in rest.items() if _is_number(value)}


def _series(run: RunDirectory, notes: list[str]) -> dict[str, dict[int, float]]:
    """The logged numbers by step. A run that was resumed may repeat steps; the later value counts."""
    file = run.path / METRICS
    if not file.exists():
        notes.append(f"there is no {METRICS}")
        return {}
    series: dict[str, dict[int, float]] = {}
    left_out = 0
    for record in run.metrics():
        for name, value in flatten({key: value for key, value in record.items() if key != "step"}).items():
            if _is_number(value):
                series.setdefault(name, {})[record["step"]] = value
            left_out += value is None or (isinstance(value, float) and not _is_number(value))
    if left_out:
        notes.append(f"{METRICS}: {left_out} values that are not finite are left out of the curves")
    with open(file, "rb") as text:
        if text.read()[-1:] not in (b"", b"\n"):
            notes.append(f"{METRICS}: the last line is torn and left out")
    return {name: dict(sorted(points.items())) for name, points in series.items()}


def _is_number(value: Any) -> bool:
    """Whether it is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value - value == 0
