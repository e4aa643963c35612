"""``leafward report TARGET… --out FILE``: one page that compares runs, evaluations or audits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from leafward.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console


@dataclass
class Args:
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """What to compare, all of one kind: run directories; folders or .json files of evaluations; folders of audits."""
    out: Path = Path("report.html")
    """The file to write: the page (.html), or the headline numbers as a table (.csv)."""


def run(args: Args, console: Console) -> dict[str, Any]:
    from leafward.report import compare

    if not args.runs:
        raise UsageError("RUN is missing; give one or more run directories, evaluations or audits")
    ending = args.out.suffix.lower()
    if ending not in (".html", ".htm", ".csv"):
        raise UsageError(f"--out {args.out}: it must end in .html, for the page, or .csv, for the numbers alone")
    made = compare(args.runs, args.out)
    made.write(args.out)
    console.print(f"wrote {args.out}", markup=False)
    return {"report": str(args.out), "runs": [str(path) for path in args.runs]}
