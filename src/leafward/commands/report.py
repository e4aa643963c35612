"""``leafward report RUN… --out FILE``: one page that compares runs."""

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
    """Run directories to compare."""
    out: Path = Path("report.html")
    """The page to write."""


def run(args: Args, console: Console) -> dict[str, Any]:
    from leafward.report import compare

    if not args.runs:
        raise UsageError("RUN is missing; give one or more run directories")
    compare(list(args.runs), args.out)
    console.print(f"wrote {args.out}")
    return {"report": str(args.out), "runs": [str(path) for path in args.runs]}
