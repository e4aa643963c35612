"""``leafward bench NAME``: run one benchmark of the source tree; its own flags are passed on."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leafward.errors import LeafwardError, UsageError, nearest

if TYPE_CHECKING:
    from rich.console import Console


@dataclass
class Args:
    name: str | None
    rest: list[str] = field(default_factory=list)


FOLDER = Path(__file__).resolve().parents[3] / "benchmarks"
ABSENT = "the benchmarks are part of the source tree; install from a clone with: pip install -e ."


def names() -> dict[str, str]:
    """Benchmark name -> first sentence of its docstring."""
    found = {}
    for path in sorted(FOLDER.glob("[!_]*.py")):
        text = path.read_text(encoding="utf-8")
        if "\nif __name__" in text:
            told = " ".join((ast.get_docstring(ast.parse(text)) or "").partition("\n\n")[0].split())
            found[path.stem] = re.split(r"(?<=[.?]) ", told)[0]
    return found


def parse(argv: list[str]) -> Args:
    words = [word for word in argv if word not in ("--json", "--debug")]
    if not words or words[0] in ("-h", "--help"):
        return Args(None)
    return Args(words[0], words[1:])


def run(args: Args, console: Console) -> dict[str, Any]:
    known = names()
    if args.name is None:
        if not known:
            console.print(ABSENT)
        for name, text in known.items():
            console.print(f"  {name:<22}{text}")
        return {"benchmarks": known}
    if not known:
        raise LeafwardError(ABSENT)
    if args.name not in known:
        raise UsageError(f"unknown benchmark {args.name!r}; {nearest(args.name, known)}")
    command = [sys.executable, str(FOLDER / f"{args.name}.py"), *args.rest]
    status = subprocess.run(command, env=os.environ | {"PYTHONUNBUFFERED": "1"}, check=False).returncode
    if status:
        raise LeafwardError(f"benchmark {args.name} failed with status {status}")
    return {"benchmark": args.name}
