"""docs/security.md says what was tried; here it is held to it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import fuzz_table

ROOT = Path(__file__).parents[1]
LEAST = 2500


def table() -> dict[str, tuple[int, int]]:
    """Tried and held by file, as the page has them."""
    lines = (ROOT / "docs" / "security.md").read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return {row[1] or row[0]: (int(row[2]), int(row[3])) for row in cells if row[-1].isdigit()}


def test_the_table_has_every_class_and_enough_of_them():
    found = table()
    tried, held = found.pop("all")
    assert found.keys() == fuzz_table.classes().keys()
    assert (tried, held) == tuple(map(sum, zip(*found.values(), strict=True)))
    assert tried == held >= LEAST


def test_the_table_is_what_the_tests_count():
    words = [sys.executable, "benchmarks/fuzz_table.py", "--only", "test_fuzz_sizes"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    total = json.loads(done.stdout)["total"]
    assert (total["tried"], total["held"]) == table()["test_fuzz_sizes"]


@pytest.mark.full
def test_all_of_it_is_held():
    words = [sys.executable, "benchmarks/fuzz_table.py", "--least", str(LEAST)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
