"""``leafward report RUN``: a run's own page, drawn again. ``leafward report TARGET… --out FILE``: one page that
compares runs, evaluations or audits."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from leafward.errors import UsageError
from leafward.files import read_text, write_text
from leafward.systems import TASKS, TRAININGS

if TYPE_CHECKING:
    from rich.console import Console

HOMES = TRAININGS | {"segmenter": TASKS["hyperclip"]["segment"]}
"""What a run directory calls its training -> the folder of that training, as a package."""


@dataclass
class Args:
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """What to compare, all of one kind: run directories; folders or .json files of evaluations; folders of audits.
    One finished run, without --out: its own report.html is drawn again."""
    out: Path | None = None
    """The file to write: the page (.html; default: report.html), or the headline numbers as a table (.csv)."""


def run(args: Args, console: Console) -> dict[str, Any]:
    from leafward.engine.layout import is_run
    from leafward.report import compare

    if not args.runs:
        raise UsageError("RUN is missing; give one or more run directories, evaluations or audits")
    out = args.out or Path("report.html")
    if args.out is None and len(args.runs) == 1 and is_run(args.runs[0]):
        out = draw_again(args.runs[0])
    elif out.suffix.lower() not in (".html", ".htm", ".csv"):
        raise UsageError(f"--out {out}: it must end in .html, for the page, or .csv, for the numbers alone")
    else:
        compare(args.runs, out).write(out)
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
