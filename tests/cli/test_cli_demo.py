"""The demo from end to end, made small: its numbers, its page, its parts alone, and the data that it stands on."""

from __future__ import annotations

import io
import json
import shlex
import socket
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from leafward.cli import demo
from leafward.cli.demo_parts import adapt, build, catalogue, measure
from leafward.cli.dispatch import main
from leafward.config import replace
from leafward.data import samples as data
from leafward.data.fewshot import read_feature_set
from leafward.engine.config import LoopConfig
from leafward.geometry import Lorentz
from leafward.hierarchy import Taxonomy
from leafward.report import show_rows

MOST_BYTES = 4_500_000
CLASSES = ("dress", "hat", "longsleeve", "outwear", "pants", "shirt", "shoes", "shorts", "skirt", "t-shirt")


@pytest.fixture(scope="module")
def small():
    """Every part at its smallest, and no way out to a network."""
    with pytest.MonkeyPatch.context() as patch:
        sweep, fewshot, language, vision = measure.sweep(), adapt.fewshot(), build.language(), build.vision()
        fleet = {"features": 40, "widths": (4, 6, 9), "laws": ("power:1",), "steps": 40, "batch": 32, "workers": 0}
        patch.setattr(measure, "sweep", lambda: replace(sweep, **fleet))
        patch.setattr(adapt, "fewshot", lambda: replace(fewshot, seeds=2, shots=(2,), epochs=2))
        loop = LoopConfig(steps=2, batch_size=2)
        patch.setattr(build, "language", lambda: replace(language, context=32, loop=loop, eval_tokens=64))
        patch.setattr(build, "vision", lambda: replace(vision, size=32, loop=loop))
        patch.setattr(data, "write_photos", lambda folder, whole=data.write_photos: _few(patch, whole, folder))
        patch.setattr(build, "DRAWN_SIZE", 32)
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setattr(socket.socket, "connect", _no_network)
        yield patch


def _no_network(*_: object) -> None:
    raise AssertionError("the demo is offline, yet something asked for the network")


def _few(patch: pytest.MonkeyPatch, whole, folder: Path) -> None:
    """Write the first two photos of each class and split alone."""
    few = [photo for photo in data.photos() if photo.name.endswith(("-001", "-002"))]
    with patch.context() as inner:
        inner.setattr(data, "photos", lambda: few)
        whole(folder)


@pytest.fixture(scope="module")
def whole(small, tmp_path_factory):
    """What `leafward demo --json` gives, what it prints for a person, and its folder."""
    out = tmp_path_factory.mktemp("whole") / "demo"
    return (*_demo(out), out)


def _demo(out: Path, *words: str) -> tuple[dict, str]:
    """The result and the text of one run."""
    spoken, written = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout", written)
        patch.setattr("sys.stderr", spoken)
        patch.setenv("COLUMNS", "200")
        assert main(["demo", "--json", "--out", str(out), *words]) == 0, spoken.getvalue()
    return json.loads(written.getvalue().splitlines()[-1]), spoken.getvalue()


class _Text(HTMLParser):
    """The text of a page and the addresses that it loads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.words: list[str] = []
        self.loads: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        names = ("src", "srcset", "data", "poster", "xlink:href") + (
            ("href",) if tag in ("link", "image", "use") else ()
        )
        self.loads += [value for name, value in attrs if name in names and value]

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def test_the_whole_demo_writes_one_page_that_needs_nothing_else(whole):
    result, spoken, out = whole
    assert [result[part]["headline"] != [] for part in ("measure", "adapt", "build")] == [True] * 3
    page = _Text(Path(result["report"]))
    assert Path(result["report"]) == out / "report.html"
    assert all(address.startswith(("data:", "#")) for address in page.loads), page.loads[:3]
    assert page.loads  # photos and clusters are in it
    for part in ("measure", "adapt", "build"):
        for number in result[part]["headline"]:
            assert number["name"] in page.text
            assert number["name"] in spoken
    assert f"leafward demo --out {shlex.quote(str(out))}" in page.text


def test_the_numbers_are_those_of_the_runs(whole):
    result, _, out = whole
    kept = json.loads((out / "result.json").read_text())
    assert kept == {part: result[part] for part in ("measure", "adapt", "build")}
    runs = {name: json.loads((out / name / "result.json").read_text()) for name in ("superposition", "lathadapter")}
    assert result["measure"]["superposition"]["fits"] == runs["superposition"]["fits"]
    accuracy = {row["method"]: row["accuracy"] for row in runs["lathadapter"]["table"]}
    assert {row["method"]: row["accuracy"] for row in result["adapt"]["methods"]} == accuracy
    shown = {number["name"]: number for number in result["adapt"]["headline"]}["accuracy after few shots"]
    assert (shown["value"], shown["twin"]) == (accuracy[adapt.AFTER], accuracy[adapt.TWIN])
    helm, hcformer = (json.loads((out / name / "result.json").read_text()) for name in ("helm", "hcformer"))
    loss, top = result["build"]["headline"]
    assert {member["geometry"] for member in helm["members"]} == {"lorentz", "euclidean"}
    assert (loss["value"], loss["twin"]) == tuple(member["loss"]["value"] for member in helm["members"])
    assert top["value"] == hcformer["members"][0]["scores"]["top1"]


def test_severity_and_back_off_agree_with_the_trained_methods(small, whole):
    """Accuracy, severity and outcomes once more, photo by photo, from the probabilities of the kept methods."""
    result, _, out = whole
    tax = Taxonomy.load(data.embedded(adapt.TAXONOMY))
    parent = dict(tax.edges())
    asked = adapt.ask(adapt.fewshot(), out / "lathadapter", tax)
    truth = [tax.names[node] for node in asked.truth]
    for row in result["adapt"]["methods"]:
        answers = asked.answers[row["method"]]
        heights, right, kinds = [], [], []
        for leaf, node in zip(answers.leaf, answers.node, strict=True):
            said = [tax.names[i] for i in leaf]
            wrong = [1 if parent[a] == parent[b] else 2 for a, b in zip(said, truth, strict=True) if a != b]
            heights.append(np.mean(wrong))
            right.append(100 * np.mean([a == b for a, b in zip(said, truth, strict=True)]))
            kinds += [_outcome(tax.names[i], goal, parent) for i, goal in zip(node, truth, strict=True)]
        assert row["accuracy"] == pytest.approx(np.mean(right))
        assert row["severity"] == pytest.approx(np.mean(heights))
        for outcome in adapt.OUTCOMES:
            assert row[outcome] == pytest.approx(100 * np.mean([kind == outcome for kind in kinds]))


def _outcome(answer: str, truth: str, parent: dict[str, str]) -> str:
    right_class, right_group, unsaid, wrong = adapt.OUTCOMES
    return {truth: right_class, parent[truth]: right_group, "clothing": unsaid}.get(answer, wrong)


def test_outcomes_tell_the_four_kinds_apart():
    tax = Taxonomy.load(data.embedded(adapt.TAXONOMY))
    answers = tax.ids(["skirt", "bottoms", "clothing", "shorts", "tops"])
    assert adapt.outcomes(tax, answers, tax.ids(["skirt"] * 5)) == [0.2, 0.2, 0.2, 0.4]


def _explored(line: str, spoken: str, page: Path, capsys) -> dict:
    """What the explorer says of a line that the demo printed."""
    assert f"explorer: {line}   (" in spoken
    program, *words = shlex.split(line)
    assert program == "leafward"
    assert main([*words, "--export", str(page), "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_the_printed_lines_open_the_explorer(whole, tmp_path, capsys):
    result, spoken, _ = whole
    text = _Text(Path(result["report"])).text
    assert all(line in text for line in result["explore"])
    rows, filed, tokens = (_explored(line, spoken, tmp_path / "page.html", capsys) for line in result["explore"])
    assert rows["points"] == len(np.load(data.embedded(measure.MATRIX)))
    assert filed["points"] == sum(level["nodes"] for level in result["adapt"]["catalogue"]) > 372
    assert any("thumbnail" in note for note in filed["notes"])
    assert tokens["points"] == 512
    assert [view["label"] for view in tokens["views"]] == ["Lorentz", "Euclidean twin"]


def test_a_node_of_the_catalogue_is_the_centroid_of_its_photos(tmp_path):
    tax = Taxonomy.load(data.embedded(adapt.TAXONOMY))
    photos = [photo for photo in data.photos() if photo.split == "test"]
    set_ = read_feature_set(data.embedded(adapt.FEATURES))
    features = set_.images[set_.split == 2]
    labels = [photo.label for photo in photos]
    tree, tangent = catalogue.file(tax, tax.ids(labels), features, tmp_path)
    assert np.array_equal(np.load(tmp_path / "embeddings.npy"), tangent.numpy())
    assert (tmp_path / "names.txt").read_text().splitlines() == list(tree.names)
    space, bottoms = Lorentz(1.0), [label in ("pants", "shorts", "skirt") for label in labels]
    points = space.expmap0(catalogue.RADIUS * features / features.norm(dim=1, keepdim=True))
    mean = points[bottoms].mean(dim=0)  # the Lorentz centroid is the mean, brought back onto the hyperboloid
    point = mean / (mean[0] ** 2 - mean[1:].square().sum()).sqrt()
    assert np.allclose(tangent[int(tree.ids("bottoms"))], space.logmap0(point), atol=1e-4)
    radius = tangent.norm(dim=1)
    assert radius[int(tree.ids("clothing"))] < radius[int(tree.ids("bottoms"))] < radius[int(tree.ids(photos[0].name))]


def test_clusters_and_samples_are_in_the_result(whole):
    result, spoken, _ = whole
    built = result["build"]
    assert all(Image.open(file).size[0] > 32 for file in built["hcformer"]["drawn"])
    assert len(built["hcformer"]["drawn"]) >= len(build.DRAWN)
    for member in built["helm"]["members"]:
        assert f"{member['name']} goes on:" in spoken


def test_a_part_alone_leaves_the_others_out(small, tmp_path):
    result, spoken = _demo(tmp_path / "out", "--only", "measure")
    assert {"measure", "adapt", "build"} & set(result) == {"measure"}
    made = ["report.html", "result.json", measure.MATRIX, "superposition"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == made
    assert f"explorer: leafward explore {shlex.quote(str(tmp_path / 'out' / measure.MATRIX))}" in spoken
    assert "leafward demo --only measure" in _Text(tmp_path / "out" / "report.html").text
    assert "adapt" not in spoken


def test_the_lines_can_be_typed_where_the_program_is_not_on_the_path(monkeypatch, tmp_path):
    program = tmp_path / "bin" / "leafward"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [str(program), "demo"])
    monkeypatch.setenv("PATH", "")
    assert demo._runnable("leafward explore demo/helm") == "bin/leafward explore demo/helm"
    monkeypatch.setattr("sys.argv", ["bin/leafward", "demo"])  # as make calls it
    assert demo._runnable("leafward explore demo/helm") == "bin/leafward explore demo/helm"
    monkeypatch.setenv("PATH", str(program.parent))
    assert demo._runnable("leafward explore demo/helm") == "leafward explore demo/helm"


def test_a_table_is_folded_in_a_narrow_window_and_never_cut():
    written = io.StringIO()
    row = ("coop + Euclidean twin", "38.123456", *"12345")
    show_rows(Console(width=60, file=written), ["method", *adapt.SHORT], [row])
    assert "…" not in written.getvalue()


def test_an_unknown_part_is_refused(capsys):
    assert main(["demo", "--only", "polish"]) == 2
    assert "--only 'polish' is not one of its choices; allowed: adapt, all, build, measure" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_refused_before_the_work(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["demo", "--only", "measure", "--out", str(tmp_path / "file" / "out")]) == 1
    assert "is not a folder" in capsys.readouterr().err


def test_embedded_photos_features_and_taxonomy_belong_together():
    found = data.photos()
    assert len({photo.name for photo in found}) == len(found) == 1353
    tax = Taxonomy.load(data.embedded("clothing.csv"))
    assert sorted({photo.label for photo in found}) == sorted(tax.leaf_names) == sorted(CLASSES)
    for photo in found[::40]:
        assert max(Image.open(io.BytesIO(photo.jpeg)).size) == 96
    features = read_feature_set(data.embedded("clothing_features.npz"))
    others = [photo for photo in found if photo.split != "train"]
    assert [features.class_names[label] for label in features.labels.tolist()] == [photo.label for photo in others]
    assert [part == 2 for part in features.split.tolist()] == [photo.split == "test" for photo in others]


def test_embedded_files_are_small_and_each_has_its_origin():
    folder = data.embedded("README.md").parent
    files = [path for path in folder.iterdir() if path.is_file() and path.suffix not in (".py", ".md")]
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert all(f"| {path.name} |" in text for path in files)
    assert sum(path.stat().st_size for path in files) < MOST_BYTES
