"""The second tier of tests, marked `full`: FULL.json says what ran last, and the suite says when that is out of date.

`make test-full` runs them and writes the record: date, commit, counts, and for each file with such tests a hash of
what it covers: the file itself, and the folder of the package that its own folder mirrors (tests/engine:
src/leafward/engine). Hashes, because a checkout gives every file the time of the checkout.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORD = Path(__file__).with_name("FULL.json")
MARK = re.compile(r"^(\s*@pytest\.|pytestmark\b.*|.*\bmarks=.*)mark\.full\b", re.MULTILINE)
COUNTED = ("passed", "failed", "error", "skipped")


def with_full_tests(root: Path = ROOT) -> list[str]:
    """The test files that hold tests of the second tier, as paths from the root of the repository."""
    files = sorted((root / "tests").rglob("test_*.py"))
    return [file.relative_to(root).as_posix() for file in files if MARK.search(file.read_text(encoding="utf-8"))]


def covered_by(file: str, root: Path = ROOT) -> list[Path]:
    """The folder of the package that a test file mirrors; of one without, the whole package."""
    package = root / "src" / "leafward"
    mirrored = package / Path(file).relative_to("tests").parent
    return sorted((mirrored if mirrored.is_dir() else package).rglob("*.py"))


def fingerprint(file: str, root: Path = ROOT) -> str:
    """Of a test file and what it covers: the names and the content of all."""
    content = hashlib.sha256()
    for path in (root / file, *covered_by(file, root)):
        content.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return content.hexdigest()[:16]


def record(stats: Mapping[str, Iterable[Any]], seconds: float, root: Path = ROOT) -> dict[str, Any]:
    """What a run of the second tier did, from pytest's reports by outcome."""
    counts = Counter({name: len(list(stats.get(name, ()))) for name in COUNTED})
    ran = {report.nodeid.partition("::")[0] for name in COUNTED for report in stats.get(name, ())}
    files = [file for file in with_full_tests(root) if file in ran]
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": _commit(root),
        "counts": {name: count for name, count in counts.items() if count},
        "seconds": round(seconds),
        "files": {file: fingerprint(file, root) for file in files},
    }


def complaint(last: Mapping[str, Any] | None, root: Path = ROOT) -> str | None:
    """What is to be said of the last run: tests that failed in it, never ran, or ran before what they cover changed."""
    again = "run make test-full"
    if last is None:
        return f"full: tests/FULL.json is not there; {again}" if with_full_tests(root) else None
    ran, reasons = last["files"], []
    failed = sum(last["counts"].get(name, 0) for name in ("failed", "error"))
    reasons += [f"{failed} failed"] if failed else []
    files = with_full_tests(root)
    never = [file for file in files if file not in ran]
    reasons += [f"never ran: {', '.join(never)}"] if never else []
    older = [file for file in files if file in ran and ran[file] != fingerprint(file, root)]
    reasons += [f"ran before what they cover changed: {', '.join(older)}"] if older else []
    return f"full: last run {last['date']}; {'; '.join(reasons)}; {again}" if reasons else None


def read(path: Path = RECORD) -> dict[str, Any] | None:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def write(value: Mapping[str, Any], path: Path = RECORD) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def _commit(root: Path) -> str | None:
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*", "--abbrev=40"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    return done.stdout.strip() or None
