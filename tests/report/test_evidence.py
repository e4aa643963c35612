"""The claims and their records: the page is what they give, and tolerances were set before results."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from leafward.cli.dispatch import main
from leafward.errors import DataError
from leafward.report.claims import CLAIMS, RECORDS, Row, read, render

ROOT = Path(__file__).resolve().parents[2]
EVIDENCE = ROOT / "evidence"


def test_the_page_is_what_the_claims_and_records_give() -> None:
    assert (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8") == render(EVIDENCE), (
        "docs/evidence.md is made: run leafward evidence render"
    )


def git(repo: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(repo), *words], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def before(repo: Path, first: str, second: str) -> bool:
    """Whether `first` is an ancestor of `second`, and not the same commit."""
    words = ["git", "-C", str(repo), "merge-base", "--is-ancestor", first, second]
    return git(repo, "rev-parse", first) != git(repo, "rev-parse", second) and not subprocess.run(words).returncode


def last_changed(repo: Path, file: Path, name: str, indent: int, keys: tuple[str, ...]) -> set[str]:
    """The commits of the lines `key: …` in the block of `name`; without those that are not committed yet."""
    found, inside = set(), False
    for line in git(repo, "blame", "-s", "-l", "--", str(file)).splitlines():
        commit, text = line.split(" ", 1)[0].lstrip("^"), line.partition(") ")[2]
        if re.match(rf" {{{indent}}}\S", text):
            inside = text.strip() == f"{name}:"
        elif inside and text.strip().split(":")[0] in keys and set(commit) != {"0"}:
            found.add(commit)
    return found


def out_of_order(folder: Path, rows: list[Row]) -> list[str]:
    """The claims whose tolerance was not committed before the record, among those that do not say that it was not."""
    wrong = []
    for row in rows:
        if row.record is None or row.set_later() or not row.claim.tests:
            continue
        places = (folder / CLAIMS / f"{row.system}.yaml", 2, ("low", "high", "set", "seeds", "possible"))
        set_by = {test.commit for test in row.claim.tests.values()} - {""}
        set_by = set_by or last_changed(folder, places[0], row.name, places[1], places[2])
        file, keys = folder / RECORDS / f"{row.system}.yaml", ("value", "low", "high", "date")
        recorded = {row.record.commit} - {""} or last_changed(folder, file, row.name, 0, keys)
        if not all(before(folder, one, other) for one in set_by for other in recorded):
            wrong.append(f"{row.system}/{row.name}: set in {sorted(set_by)}, recorded in {sorted(recorded)}")
    return wrong


def test_tolerances_were_set_before_the_results_or_the_page_says_otherwise() -> None:
    if not git(ROOT, "rev-parse", "--verify", "c195100"):
        pytest.skip("there is no git history here")
    assert out_of_order(EVIDENCE, read(EVIDENCE)) == []


CLAIM = """paper: Toys
title: On toys
claims:
  big:
    statement: toys are big
    command: leafward bench toys --data DATA
    cpu_minutes: 1
    tests:
      size:
        low: {low}
        set: '2026-01-01'
        read: size of a toy
"""
RECORD = """big:
  date: '2026-01-02'
  numbers:
    size: {value: 3.0, low: 2.5, high: 3.5, seeds: 3}
"""


def commit(repo: Path, **texts: str) -> None:
    for folder, text in texts.items():
        (repo / folder).mkdir(exist_ok=True)
        (repo / folder / "toys.yaml").write_text(text, encoding="utf-8")
    git(repo, "init", "-q")
    git(repo, "add", "-A")
    git(repo, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "-m", "x")


def test_a_result_that_is_recorded_with_its_tolerance_is_found(tmp_path: Path) -> None:
    commit(tmp_path, claims=CLAIM.format(low=1.0), records=RECORD)
    assert len(out_of_order(tmp_path, read(tmp_path))) == 1


def test_a_tolerance_that_is_changed_after_the_result_is_found(tmp_path: Path) -> None:
    commit(tmp_path, claims=CLAIM.format(low=4.0))
    commit(tmp_path, records=RECORD)
    assert out_of_order(tmp_path, read(tmp_path)) == []
    assert [row.verdict for row in read(tmp_path)] == ["does not hold"]
    commit(tmp_path, claims=CLAIM.format(low=2.0))
    assert [row.verdict for row in read(tmp_path)] == ["holds"]
    assert len(out_of_order(tmp_path, read(tmp_path))) == 1


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("big:", "bigg:", "'bigg' is no claim of .*did you mean 'big'"),
        ("size:", "sise:", "'sise' is not tested by the claim; did you mean 'size'"),
        ("high: 3.5", "high: 2.5", "has no width"),
        ("low: 2.5", "low: 4.5", "must have low ≤ high"),
        ("seeds: 3", "seeds: 1", "needs two or more of them, not 1"),
        ("2026-01-02", "yesterday", "a date as 2026-11-20"),
    ],
)
def test_damaged_records_are_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    for folder, text in ((CLAIMS, CLAIM.format(low=1.0)), (RECORDS, RECORD.replace(old, new))):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "toys.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=f"(?s)toys.yaml.*{message}"):
        read(tmp_path)


def test_a_command_tests_its_claim_and_is_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On a claim about an audit, whose number is known: rows that are all alike overlap with 1."""
    np.save(tmp_path / "rows.npy", np.ones((6, 4), np.float32) * np.arange(1, 7, dtype=np.float32)[:, None])
    claim = CLAIM.format(low=3.9).replace("leafward bench toys --data DATA", "leafward audit ROWS")
    claim = claim.replace("size of a toy", "audits.0.raw.scaled_overlap")
    (tmp_path / CLAIMS).mkdir()
    (tmp_path / CLAIMS / "toys.yaml").write_text(claim, encoding="utf-8")
    words = ["evidence", "run", "toys/big", "--folder", str(tmp_path)]
    assert main(words) == 2
    assert "needs ROWS; give --given ROWS=" in capsys.readouterr().err
    assert main([*words, "--given", f"ROWS={tmp_path / 'rows.npy'}"]) == 0
    (row,) = read(tmp_path)
    assert row.record is not None
    assert row.found("size").value == pytest.approx(4.0)
    assert row.verdict == "undecided"  # a number without an interval
    assert main(["evidence", "run", "toys/bigg", "--folder", str(tmp_path)]) == 2
    assert "did you mean 'toys/big'" in capsys.readouterr().err
    assert main(["evidence", "list", "--folder", str(tmp_path), "--json"]) == 0
    assert '"toys/big": "undecided"' in capsys.readouterr().out
