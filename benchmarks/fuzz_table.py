"""How many bad inputs each part refuses: the table of docs/security.md, from running tests/fuzz.

    python benchmarks/fuzz_table.py              # one JSON object
    python benchmarks/fuzz_table.py --markdown   # the table
    python benchmarks/fuzz_table.py --least 2500 # fails where fewer were refused

An input was tried where it was handed to a command or a reader, and held where that ended with an error that names it,
without a traceback, without a file left behind and without its code having run; each is one call of the fixtures
`refuses` and `counts` of tests/fuzz/conftest.py. What a test finds otherwise counts as not held.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from _timing import markdown

FUZZ = Path(__file__).parents[1] / "tests" / "fuzz"
REFUSED = "bad inputs refused"


class Tally:
    """A plugin of pytest that adds up by file what tests say they refused."""

    def __init__(self) -> None:
        self.held: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: Any) -> None:
        where = Path(report.nodeid.partition("::")[0]).stem
        if report.failed:
            self.lost[where] += 1
        elif report.when == "call":
            self.held[where] += sum(count for name, count in report.user_properties if name == REFUSED)


def classes() -> dict[str, str]:
    """What each file of tests/fuzz tries: the first sentence of its docstring."""
    sys.path.insert(0, str(FUZZ))
    found = {}
    for path in sorted(FUZZ.glob("test_*.py")):
        text = path.read_text(encoding="utf-8").split('"""', 2)[1]
        found[path.stem] = " ".join(text.split()).partition(". ")[0].rstrip(".")
    return found


def rows(tally: Tally) -> list[dict[str, Any]]:
    return [
        {"class": text, "file": stem, "tried": tally.held[stem] + tally.lost[stem], "held": tally.held[stem]}
        for stem, text in classes().items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", action="store_true", help="print a table instead of JSON")
    parser.add_argument("--least", type=int, default=0, help="exit with 1 where fewer were held")
    parser.add_argument("--only", default="", help="part of the name of the files to run")
    arguments = parser.parse_args()
    tally = Tally()
    files = [str(path) for path in sorted(FUZZ.glob("test_*.py")) if arguments.only in path.stem]
    with contextlib.redirect_stdout(sys.stderr):
        pytest.main(["-q", "--no-header", "-p", "no:cacheprovider", *files], plugins=[tally])
    table = [row for row in rows(tally) if arguments.only in row["file"]]
    total = {"class": "all", "file": "", **{key: sum(row[key] for row in table) for key in ("tried", "held")}}
    if arguments.markdown:
        print(markdown(list(total), [[str(value) for value in row.values()] for row in [*table, total]]))
    else:
        print(json.dumps({"classes": table, "total": total}, indent=2, ensure_ascii=False))
    if total["held"] < max(arguments.least, total["tried"]):
        sys.exit(1)


if __name__ == "__main__":
    main()
