"""``leafward report RUN``: a run's own page, drawn again. ``leafward report TARGET… --out FILE``: one page that
compares runs, evaluations or audits."""

from __future__ import annotations

import importlib
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from leafward.errors import DataError, UsageError
from leafward.files import read_text, write_text
from leafward.systems import TASKS, TRAININGS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from leafward.report import Record

AUDIT, EVALUATIONS = "audit.json", ("evaluation.json", "hierarchy.json")
"""What an audit, and what evaluations leave in their folders."""
HOMES = TRAININGS | {"segmenter": TASKS["hyperclip"]["segment"]}
"""What a run directory calls its training -> the folder of that training, as a package."""
Kind = Literal["run", "audit", "evaluation"]


@dataclass
class Args:
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """What to compare, all of one kind: run directories; folders or .json files of evaluations; folders of audits.
    One finished run, without --out: its own report.html is drawn again."""
    out: Path | None = None
    """The page to write (default: report.html)."""


def run(args: Args, console: Console) -> dict[str, Any]:
    from leafward.report import compare, compare_records

    if not args.runs:
        raise UsageError("RUN is missing; give one or more run directories, evaluations or audits")
    if args.out is None and len(args.runs) == 1 and kind_of(args.runs[0]) == "run":
        page = draw_again(args.runs[0])
        console.print(f"wrote {page}", markup=False)
        return {"report": str(page), "runs": [str(args.runs[0])]}
    out = args.out or Path("report.html")
    if out.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"--out {out}: the page is one file that ends in .html")
    kinds = {path: kind_of(path) for path in args.runs}
    if len(set(kinds.values())) > 1:
        said = ", ".join(f"{path} ({kind})" for path, kind in kinds.items())
        raise UsageError(f"runs, evaluations and audits have no numbers in common; compare those of one kind: {said}")
    kind = kinds[args.runs[0]]
    if kind == "run":
        compare(list(args.runs), out)
    else:
        records = _audits(args.runs) if kind == "audit" else _evaluations(args.runs)
        words = ["leafward", "report", *map(str, args.runs), "--out", str(out)]
        compare_records(records, kind, shlex.join(words), out)
    console.print(f"wrote {out}", markup=False)
    return {"report": str(out), "runs": [str(path) for path in args.runs]}


def draw_again(path: Path) -> Path:
    """Draw the page of a finished run as `--resume` does where one lacks it; if that fails the old one stays."""
    from leafward.config import checked
    from leafward.engine.run import MEMBERS, RunDirectory

    run = RunDirectory.open(path)
    if run.recipe not in HOMES or path.resolve().parent.name == MEMBERS:
        raise UsageError(f"{path} is one model of a run, whose page is that of the run; name the run")
    if not run.finished:
        raise UsageError(f"{path} is not finished, and its page comes with its result; --resume goes on with it")
    known, training = (importlib.import_module(f"{HOMES[run.recipe]}.{part}") for part in ("config", "train"))
    config = checked(known.Config, run.config)
    old = read_text(run.report) if run.report.is_file() else None
    run.report.unlink(missing_ok=True)
    try:
        training.run(config, path, resume=True)
    finally:
        if old is not None and not run.report.is_file():
            write_text(run.report, old)
    return run.report


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
