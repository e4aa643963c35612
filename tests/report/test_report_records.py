"""Evaluations and audits compared: read from what the commands leave, told apart, mixed, damaged."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from leafward.cli.dispatch import main
from leafward.report import read_evaluation
from leafward.report.records import numbers_of


def cells(html: str) -> list[list[list[str]]]:
    """The tables of a page as lists of rows of text."""
    tables = re.findall(r"<table>(.*?)</table>", html, re.S)
    rows = [re.findall(r"<tr>(.*?)</tr>", table, re.S) for table in tables]
    return [[re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.S) for row in table] for table in rows]


@pytest.fixture
def evaluations(tmp_path: Path) -> list[Path]:
    """Two evaluations of retrieval, in a folder and as a named file, of which the second is the worse."""
    rng, image = np.random.default_rng(0), np.eye(6, dtype=np.float32)
    found = []
    for out, order in (("first", [0, 1, 2, 3, 5, 4]), ("second.json", [1, 0, 2, 3, 5, 4])):
        text = image[order] + 0.01 * rng.normal(size=(6, 6)).astype(np.float32)
        np.save(tmp_path / "pairs.npy", np.stack([image, text]))
        words = ["evaluate", "--task", "retrieval", "--ks", "1", "--features", str(tmp_path / "pairs.npy")]
        assert main([*words, "--out", str(tmp_path / out)]) == 0
        found.append(tmp_path / out)
    return found


@pytest.fixture
def audits(tmp_path: Path) -> list[Path]:
    """An audit of one matrix, and one of two."""
    rng = np.random.default_rng(0)
    for name in "abc":
        np.save(tmp_path / f"{name}.npy", rng.normal(size=(40, 8)).astype(np.float32))
    assert main(["audit", str(tmp_path / "a.npy"), "--out", str(tmp_path / "one")]) == 0
    assert main(["audit", str(tmp_path / "b.npy"), str(tmp_path / "c.npy"), "--out", str(tmp_path / "two")]) == 0
    return [tmp_path / "one", tmp_path / "two"]


def page_of(paths: list[Path], tmp_path: Path) -> str:
    assert main(["report", *map(str, paths), "--out", str(tmp_path / "page.html")]) == 0
    return (tmp_path / "page.html").read_text(encoding="utf-8")


def test_evaluations_side_by_side(evaluations, tmp_path):
    html = page_of(evaluations, tmp_path)
    listed, headline, scores = cells(html)
    assert [row[:2] for row in listed[1:]] == [[name, "Evaluation: retrieval"] for name in ("first", "second.json")]
    assert [row[0] for row in headline[1:]] == ["first", "second.json"]
    first, second = (read_evaluation(path) for path in (evaluations[0] / "evaluation.json", evaluations[1]))
    assert [row[1].partition(" ")[0] for row in headline[1:]] == ["0.67", "0.33"]
    assert first.headline[0].value == pytest.approx(4 / 6)
    assert second.headline[0].value == pytest.approx(2 / 6)
    assert ["image_to_text@1", "0.6667", "0.3333"] in scores
    assert html.count("<svg ") == len(first.headline)
    assert "Comparison of 2 evaluations" in html
    words = re.sub("<[^>]+>", "", re.findall(r"<pre>.*?</pre>", html, re.S)[0])
    assert words == f"leafward report {evaluations[0]} {evaluations[1]} --out {tmp_path / 'page.html'}"


def test_evaluations_of_different_tasks_have_sections_of_their_own(evaluations, tmp_path):
    (tmp_path / "tree.csv").write_text("child,parent\nroot,\na,root\nb,root\n")
    (tmp_path / "labels.csv").write_text("true,predicted\na,a\nb,a\n")
    words = ["evaluate", str(tmp_path / "labels.csv"), "--task", "hierarchy", "--taxonomy", str(tmp_path / "tree.csv")]
    assert main([*words, "--out", str(tmp_path / "third")]) == 0
    html = page_of([*evaluations, tmp_path / "third"], tmp_path)
    tables = cells(html)
    assert [row[0] for row in tables[1][1:]] == ["first", "second.json"]
    assert [row[0] for row in tables[3][1:]] == ["third"]


def test_audits_side_by_side(audits, tmp_path):
    html = page_of(audits, tmp_path)
    listed, headline, scores = cells(html)
    names = ["one", "two: b.npy", "two: c.npy"]
    assert [row[0] for row in listed[1:]] == [row[0] for row in headline[1:]] == names
    kept = [json.loads((path / "audit.json").read_text())["audits"] for path in audits]
    overlaps = [audit["raw"]["scaled_overlap"] for audits in kept for audit in audits]
    assert [float(row[1]) for row in headline[1:]] == pytest.approx(overlaps, rel=1e-3)
    (row,) = [row for row in scores if row[0] == "raw.scaled_overlap"]
    assert [float(cell) for cell in row[1:]] == pytest.approx(overlaps, rel=1e-3)
    assert "m·⟨overlap²⟩, raw" in headline[0]
    assert "Comparison of 3 audits" in html


def test_one_alone_has_a_page(evaluations, audits, tmp_path):
    assert "Evaluation first" in page_of(evaluations[:1], tmp_path)
    assert "Audit one" in page_of(audits[:1], tmp_path)


def test_kinds_are_not_mixed(evaluations, audits, tmp_path, capsys):
    assert main(["report", str(evaluations[0]), str(audits[0]), "--out", str(tmp_path / "page.html")]) == 2
    said = capsys.readouterr().err
    assert "compare those of one kind" in said
    assert f"{audits[0]} (audit)" in said
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize(
    ("file", "content", "named"),
    [
        ("evaluation.json", "[1]", "evaluation.json"),
        ("evaluation.json", "{", "evaluation.json: not valid JSON"),
        ("evaluation.json", '{"headline": 3}', "headline must be a list"),
        ("evaluation.json", '{"headline": [{"name": "x"}]}', "lacks value"),
        ("audit.json", "{}", "audits must be a list"),
        ("audit.json", '{"audits": []}', "audits must be a list"),
        ("audit.json", '{"audits": [7]}', "audits must be a list"),
        ("other.json", "{}", "neither a run (config.yaml), nor an evaluation"),
    ],
)
def test_damage_is_named_and_nothing_is_written(tmp_path, capsys, file, content, named):
    (tmp_path / "found").mkdir()
    (tmp_path / "found" / file).write_text(content)
    assert main(["report", str(tmp_path / "found"), "--out", str(tmp_path / "page.html")]) == 1
    assert named in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["found"]


def test_numbers_are_found_by_dotted_names():
    found = {"headline": [{"name": "x", "value": 1}], "a": {"b": 2.5, "c": "text", "d": True}, "e": [1, 2], "n": None}
    assert numbers_of(found) == {"a.b": 2.5}
