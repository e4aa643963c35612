"""The record of the second tier says what ran, and is out of date once what it covers has changed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import full_tier

CONFTEST = Path(__file__).with_name("conftest.py")
TESTS = "import pytest\n\ndef test_smoke(): pass\n\n@pytest.mark.full\n@pytest.mark.parametrize('k', range(3))\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository of one room, its tests, and the same hooks as this one."""
    for name, text in {
        "src/leafward/engine/loop.py": "A = 1\n",
        "src/leafward/data/read.py": "B = 1\n",
        "tests/engine/test_loop.py": f"{TESTS}def test_all(k): assert k\n",
        "tests/engine/test_plain.py": "def test_plain(): pass\n",
        "tests/conftest.py": CONFTEST.read_text(encoding="utf-8"),
        "tests/full_tier.py": Path(full_tier.__file__).read_text(encoding="utf-8"),
        "pyproject.toml": CONFTEST.parents[1].joinpath("pyproject.toml").read_text(encoding="utf-8"),
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def run(root: Path, *options: str) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300).stdout


def test_a_full_run_is_recorded_and_the_suite_says_when_it_is_out_of_date(root: Path) -> None:
    said = run(root, "-m", "full", "--record")
    assert "1 failed, 2 passed, 2 deselected" in said
    assert "warning: full: last run" in said
    record = full_tier.read(root / "tests" / "FULL.json")
    assert record is not None
    assert record["counts"] == {"passed": 2, "failed": 1}
    assert list(record["files"]) == ["tests/engine/test_loop.py"]
    said = run(root)
    assert "2 passed, 3 deselected" in said
    assert f"warning: full: last run {record['date']}; 1 failed; run make test-full" in said


def complaint(root: Path, last: dict[str, Any] | None) -> str:
    return str(full_tier.complaint(last, root))


def test_what_is_out_of_date_is_named(root: Path) -> None:
    assert "tests/FULL.json is not there" in complaint(root, None)
    name = "tests/engine/test_loop.py"
    last = {"date": "2026-01-02", "counts": {"passed": 3}, "files": {name: full_tier.fingerprint(name, root)}}
    assert full_tier.complaint(last, root) is None
    (root / "src/leafward/data/read.py").write_text("B = 2\n", encoding="utf-8")  # not what the test mirrors
    assert full_tier.complaint(last, root) is None
    (root / "src/leafward/engine/loop.py").write_text("A = 2\n", encoding="utf-8")
    assert f"last run 2026-01-02; ran before what they cover changed: {name}; run" in complaint(root, last)
    (root / "tests/engine/test_plain.py").write_text("pytestmark = pytest.mark.full\n", encoding="utf-8")
    assert "never ran: tests/engine/test_plain.py" in complaint(root, last)


def test_one_without_a_folder_of_its_own_covers_the_whole_package(root: Path) -> None:
    (root / "tests/test_all.py").touch()
    assert [path.name for path in full_tier.covered_by("tests/test_all.py", root)] == ["read.py", "loop.py"]
    assert [path.name for path in full_tier.covered_by("tests/engine/test_loop.py", root)] == ["loop.py"]
