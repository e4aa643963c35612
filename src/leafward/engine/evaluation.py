"""What an evaluation leaves behind: its numbers as JSON, and the page that shows them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from leafward.report import Result


def write_evaluation(out: Path | None, found: Result, console: Console, title: str = "") -> dict[str, Any]:
    """Show what was found and write `out`/evaluation.json and report.html, or where `out` is NAME.json, that file and
    NAME.html beside it; None: no file. Returns the numbers.

    In the folder of a run, whose report.html is that of its training, the page is evaluation.html. The page's title
    tells `leafward report` which evaluations can be compared.
    """
    from leafward.engine.layout import is_run
    from leafward.files import write_json

    found.run = True
    found.show(console, title)
    result = found.to_json()
    if out is not None:
        named = out.suffix == ".json"
        record = out if named else out / "evaluation.json"
        shown = record.with_suffix(".html") if named or is_run(out) else out / "report.html"
        write_json(record, {"evaluation": found.title, **result})
        found.write(shown)
        console.print(f"wrote {record} and {shown}", markup=False)
    return result
