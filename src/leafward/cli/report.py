"""``leafward report TARGET… --out FILE``: one page that compares runs, evaluations or audits."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from leafward.errors import DataError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from leafward.report import Record

AUDIT, EVALUATIONS = "audit.json", ("evaluation.json", "hierarchy.json")
"""What an audit, and what evaluations leave in their folders."""
Kind = Literal["run", "audit", "evaluation"]


@dataclass
class Args:
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """What to compare, all of one kind: run directories; folders or .json files of evaluations; folders of audits."""
    out: Path = Path("report.html")
    """The page to write."""


def run(args: Args, console: Console) -> dict[str, Any]:
    from leafward.report import compare, compare_records

    if not args.runs:
        raise UsageError("RUN is missing; give one or more run directories, evaluations or audits")
    if args.out.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"--out {args.out}: the page is one file that ends in .html")
    kinds = {path: kind_of(path) for path in args.runs}
    if len(set(kinds.values())) > 1:
        said = ", ".join(f"{path} ({kind})" for path, kind in kinds.items())
        raise UsageError(f"runs, evaluations and audits have no numbers in common; compare those of one kind: {said}")
    kind = kinds[args.runs[0]]
    if kind == "run":
        compare(list(args.runs), args.out)
    else:
        records = _audits(args.runs) if kind == "audit" else _evaluations(args.runs)
        words = ["leafward", "report", *map(str, args.runs), "--out", str(args.out)]
        compare_records(records, kind, shlex.join(words), args.out)
    console.print(f"wrote {args.out}", markup=False)
    return {"report": str(args.out), "runs": [str(path) for path in args.runs]}


def kind_of(path: Path) -> Kind:
    """What a path holds."""
    from leafward.engine.layout import is_run

    if not path.exists():
        raise DataError(f"{path} does not exist")
    if path.is_file() and path.suffix == ".json":
        return "audit" if path.name == AUDIT else "evaluation"
    if is_run(path):
        return "run"
    if (path / AUDIT).is_file():
        return "audit"
    if any((path / name).is_file() for name in EVALUATIONS):
        return "evaluation"
    names = " or ".join(EVALUATIONS)
    raise DataError(f"{path} is neither a run (config.yaml), nor an evaluation ({names}), nor an audit ({AUDIT})")


def _evaluations(paths: Sequence[Path]) -> dict[str, Record]:
    from leafward.report import read_evaluation
    from leafward.report.comparison import shortest_names

    files = [path if path.is_file() else next(path / n for n in EVALUATIONS if (path / n).is_file()) for path in paths]
    return dict(zip(shortest_names(paths), map(read_evaluation, files), strict=True))


def _audits(paths: Sequence[Path]) -> dict[str, Record]:
    """One record for each matrix; a folder of one matrix has the folder's name, one of several that of each target."""
    from leafward.report import Record
    from leafward.report.comparison import shortest_names
    from leafward.report.records import numbers_of, read_object

    found: dict[str, Record] = {}
    for name, path in zip(shortest_names(paths), paths, strict=True):
        file = path if path.is_file() else path / AUDIT
        audits = read_object(file).get("audits")
        if not isinstance(audits, list) or not audits or not all(isinstance(audit, dict) for audit in audits):
            raise DataError(f"{file}: audits must be a list of what was found of each matrix")
        for place, audit in enumerate(audits):
            own = name if len(audits) == 1 else f"{name}: {Path(str(audit.get('target', place))).name}"
            found[own if own not in found else f"{own} ({place})"] = Record(
                file, "Superposition", _audit_headline(numbers_of(audit)), numbers_of(audit)
            )
    return found


def _audit_headline(scores: dict[str, float]) -> list[Any]:
    from leafward.report import Number

    return [Number(title, scores[name], note=note) for name, (title, note) in AUDITED.items() if name in scores]


AUDITED = {
    "raw.scaled_overlap": ("m·⟨overlap²⟩, raw", "1 for random directions"),
    "centred.scaled_overlap": ("m·⟨overlap²⟩, mean removed", ""),
    "raw.participation_ratio": ("participation ratio", ""),
    "represented": ("share of rows represented", ""),
}
"""Number of an audit -> what it is called, and what to read it against."""
