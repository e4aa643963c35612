"""Evaluations leave their numbers and a page that shows them, in a folder or beside a named file."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from leafward.cli.dispatch import main
from leafward.stats.intervals import share_interval
from leafward.systems.radial.breeds import read_breeds

WORDS = ("evaluate", "--task", "retrieval", "--features")


@pytest.fixture
def pairs(tmp_path):
    """Six pairs of unit vectors, of which four are found."""
    rng = np.random.default_rng(0)
    image = np.eye(6, dtype=np.float32)
    text = image[[0, 1, 2, 3, 5, 4]] + 0.01 * rng.normal(size=(6, 6)).astype(np.float32)
    np.save(tmp_path / "pairs.npy", np.stack([image, text]))
    return tmp_path / "pairs.npy"


@pytest.mark.parametrize(
    ("out", "record", "page"),
    [("found", "found/evaluation.json", "found/report.html"), ("found.json", "found.json", "found.html")],
)
def test_a_folder_or_a_named_file(pairs, tmp_path, monkeypatch, out, record, page):
    argv = [*WORDS, str(pairs), "--ks", "1", "--out", str(tmp_path / out)]
    monkeypatch.setattr("sys.argv", ["/some/where/leafward", *argv])
    assert main(argv) == 0
    found = json.loads((tmp_path / record).read_text(encoding="utf-8"))
    html = (tmp_path / page).read_text(encoding="utf-8")
    number = found["headline"][0]
    assert number["value"] == found["image_to_text@1"] == pytest.approx(4 / 6)
    assert number["interval"] == pytest.approx(share_interval(4, 6))
    assert "R@1" in html
    assert "/some/where" not in re.sub(r"<details>.*?</details>", "", html, flags=re.DOTALL)
    assert re.sub(r"<[^>]+>", "", html).count("leafward evaluate --task retrieval") == 1
    assert "Environment" in html


def test_numbers_over_a_taxonomy_have_intervals(tmp_path):
    (tmp_path / "tree.csv").write_text("child,parent\nroot,\na,root\nb,root\nc,a\nd,a\ne,b\n")
    truth, said = "ccccddddee", "ccdcddedee"
    rows = "".join(f"{t},{s}\n" for t, s in zip(truth, said, strict=True))
    (tmp_path / "labels.csv").write_text("true,predicted\n" + rows)
    words = ["evaluate", str(tmp_path / "labels.csv"), "--task", "hierarchy", "--taxonomy", str(tmp_path / "tree.csv")]
    assert main([*words, "--out", str(tmp_path / "out")]) == 0
    found = json.loads((tmp_path / "out" / "hierarchy.json").read_text(encoding="utf-8"))
    number = {each["name"]: each for each in found["headline"]}
    assert number["accuracy"]["interval"] == pytest.approx(share_interval(8, 10))
    distances = [0] * 8 + [2, 4]
    mean, error = np.mean(distances), np.std(distances, ddof=1) / 10**0.5
    reach = 2.2621571628540993 * error  # Student's t with nine degrees of freedom
    assert mean - reach < 0  # where no distance can be
    assert number["distance to the truth"]["interval"] == pytest.approx([0.0, mean + reach])
    low, high = number["mistake severity"]["interval"]
    assert low < number["mistake severity"]["value"] == 1.5 < high


def test_breeds_draws_accuracy_against_depth(tmp_path):
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "class_hierarchy.txt").write_text("r a\nr v\na dog\na cat\nv car\nv bus\n")
    names = "".join(f"{name}\t{name}\n" for name in ("r", "a", "v", "dog", "cat", "car", "bus"))
    (tmp_path / "tree" / "node_names.txt").write_text(names)
    classes = [[i, name, name] for i, name in enumerate(("dog", "cat", "car", "bus"))]
    (tmp_path / "tree" / "dataset_class_info.json").write_text(json.dumps(classes))
    text = np.eye(7, dtype=np.float32)
    label = read_breeds(tmp_path / "tree").tax.leaves  # each nearest to itself and to no group in particular
    np.savez(tmp_path / "features.npz", text=text, image=text[label], label=label)
    words = ["evaluate", "--task", "breeds", "--tree", str(tmp_path / "tree"), "--out", str(tmp_path / "out")]
    assert main([*words, "--features", str(tmp_path / "features.npz")]) == 0
    found = json.loads((tmp_path / "out" / "evaluation.json").read_text(encoding="utf-8"))
    assert found["queries_by_depth"] == {"1": 4, "2": 4}
    html = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert html.count("<svg ") == 1
    assert "Accuracy by depth" in html
    assert ">guessing<" in html


def test_hierarcaps_draws_the_radius_of_each_level_without_images(tmp_path):
    rows = [f"general {i} => middle {i} => special {i},x => y => z,{i}.jpg" for i in range(5)]
    (tmp_path / "chains.csv").write_text("positive,negative,image_url\n" + "\n".join(rows) + "\n")
    rng = np.random.default_rng(0)
    root = np.array([[1.0, 0.0, 0.0, 0.0]], dtype=np.float32)
    text = np.concatenate([root + level * 0.3 * rng.normal(size=(1, 4)) for _ in range(5) for level in (1, 2, 3)])
    np.savez(tmp_path / "features.npz", text=text.astype(np.float32), root=root)
    words = ["evaluate", "--task", "hierarcaps", "--data", str(tmp_path / "chains.csv"), "--out", str(tmp_path / "out")]
    assert main([*words, "--features", str(tmp_path / "features.npz")]) == 0
    html = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert html.count("<svg ") == 1
    assert "Radius by level" in html
    assert "over 5 chains" in html
