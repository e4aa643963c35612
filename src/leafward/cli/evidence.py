"""``leafward evidence list | run CLAIM | render``: the claims of the papers, and what was measured of them here."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from leafward.errors import LeafwardError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from leafward.report.claims import Row

ROOT = Path(__file__).resolve().parents[3]


@dataclass
class Args:
    action: Annotated[Literal["list", "run", "render"], tyro.conf.Positional]
    """list: every claim with its verdict. run: test one, and record what was found. render: write the page."""
    claim: Annotated[str | None, tyro.conf.Positional] = None
    """The claim to run: SYSTEM/NAME, as `list` has it."""
    given: tuple[str, ...] = ()
    """What the words in capitals of the claim's command stand for: DATA=path …"""
    folder: Path = ROOT / "evidence"
    """The claims and records; those of the source tree."""
    out: Path | None = None
    """render: the page to write (default: docs/evidence.md of the source tree)."""


def run(args: Args, console: Console) -> dict[str, Any]:
    from leafward.report.claims import find, read, render

    if not args.folder.is_dir():
        raise LeafwardError(f"{args.folder} is not there: the claims are part of the source tree; give --folder")
    if (args.claim is not None) != (args.action == "run"):
        raise UsageError("evidence run needs a CLAIM; list and render take none")
    if args.action == "render":
        from leafward.files import write_text

        out = args.out or ROOT / "docs" / "evidence.md"
        write_text(out, render(args.folder))
        console.print(f"wrote {out}", markup=False)
        return {"page": str(out)}
    rows = read(args.folder)
    return _list(rows, console) if args.action == "list" else _run(find(rows, args.claim or ""), args, console)


def _list(rows: list[Row], console: Console) -> dict[str, Any]:
    from leafward.report import show_rows

    found = {f"{row.system}/{row.name}": row.verdict for row in rows}
    show_rows(console, ["claim", "verdict"], list(found.items()))
    return {"claims": found}


def _run(row: Row, args: Args, console: Console) -> dict[str, Any]:
    """Run the command of a claim, within its budget, and record its numbers."""
    from leafward.report.claims import measured, placeholders, record

    given: dict[str, str] = {}
    for pair in args.given:
        word, equals, value = pair.partition("=")
        if not equals:
            raise UsageError(f"--given {pair}: it must be WORD=value, as in DATA=my/folder")
        given[word] = value
    missing = [word for word in placeholders(row.claim.command) if word not in given]
    if missing:
        raise UsageError(f"{row.claim.command} needs {', '.join(missing)}; give --given {missing[0]}=…")
    words = [given.get(word, word) for word in shlex.split(row.claim.command)]
    if words[0] == "leafward":
        words = [sys.executable, "-m", "leafward.cli", *words[1:], "--json"]
    elif words[0] in ("python", "pytest"):
        words = [sys.executable, *(["-m", "pytest"] if words[0] == "pytest" else []), *words[1:]]
    budget = None if row.claim.cpu_minutes is None else 60.0 * row.claim.cpu_minutes
    console.print(f"running: {shlex.join(words)}", markup=False)
    try:
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, timeout=budget, check=False, env=os.environ)
    except subprocess.TimeoutExpired as error:
        raise LeafwardError(
            f"{row.claim.command} took more than its budget of {row.claim.cpu_minutes:g} min"
        ) from error
    numbers = measured(row.claim, done.returncode == 0, _last_object(done.stdout))
    row = record(args.folder, row, numbers)
    console.print(f"{row.system}/{row.name}: {row.verdict}", markup=False)
    return {"claim": f"{row.system}/{row.name}", "verdict": row.verdict, "numbers": numbers}


def _last_object(text: str) -> dict[str, Any]:
    """The JSON object that a command printed: on its last line, or the whole of its output."""
    lines = text.strip().splitlines()
    for candidate in (lines[-1] if lines else "", text):
        try:
            found = json.loads(candidate)
        except ValueError:
            continue
        if isinstance(found, dict):
            return found
    return {}
