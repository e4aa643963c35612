"""Run directories that somebody changed: read, resumed, reported, searched."""

from __future__ import annotations

import json
import os
import shutil

import pytest
from fuzz_files import ARRAYS, TRAP

from leafward.cli.dispatch import main

TREE = "child,parent\nanimal,\ndog,animal\ncat,animal\npoodle,dog\ncorgi,dog\ntabby,cat\nmanx,cat\n"
SWEEP = ["--features", "20", "--widths", "3", "4", "6", "--decays", "-1", "1", "--laws", "power:1", "--steps", "10"]
SWEEP += ["--batch", "16", "--eval-rows", "64", "--workers", "0", "--device", "cpu"]
EMBED = ["--dim", "2", "--epochs", "2", "--device", "cpu"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A finished sweep, a finished embedding of a taxonomy, and an index of it."""
    folder = tmp_path_factory.mktemp("made")
    before = os.getcwd()
    os.chdir(folder)
    try:
        (folder / "tree.csv").write_text(TREE)
        assert main(["train", "superposition", *SWEEP, "--out", "sweep"]) == 0
        assert main(["train", "taxonomy", "--data", "tree.csv", *EMBED, "--out", "embedded"]) == 0
        assert main(["data", "index", "embedded", "--taxonomy", "tree.csv", "--out", "index"]) == 0
    finally:
        os.chdir(before)
    return folder


@pytest.fixture
def copied(made, place):
    """The same, to be spoilt."""
    shutil.copytree(made, place, dirs_exist_ok=True)
    return place


NO_OBJECT = {
    "empty": b"",
    "cut": b'{"rows": [',
    "list": b"[]",
    "null": b"null",
    "number": b"3",
    "latin": b'{"a": "\xe9"}',
    "zeros": b"\0" * 50,
    "pickle": TRAP,
    "deep": b"[" * 100_000,
}
ROW = {"width": 3, "decay": -1.0, "law": "power:1", "seed": 0, "dataset_rows": None, "loss": 1.0, "step": 10}
TABLES = NO_OBJECT | {
    "nothing": b"{}",
    "rows-null": b'{"rows": null, "norms": [], "failures": [], "time": {}}',
    "rows-empty": b'{"rows": [], "norms": [], "failures": [], "time": {}}',
    "rows-numbers": b'{"rows": [1, 2], "norms": [], "failures": [], "time": {}}',
    "rows-text": b'{"rows": "abc", "norms": [], "failures": [], "time": {}}',
    "row-short": json.dumps({"rows": [ROW], "norms": [], "failures": [], "time": {}}).encode(),
    "time-text": b'{"rows": [], "norms": [], "failures": [], "time": "now"}',
}


def sweep_again(refuses, named):
    words = ["train", "superposition", *SWEEP, "--out", "sweep", "--resume"]
    refuses(words, named, rewritten=("sweep/env.json", "sweep/config.yaml"))


@pytest.mark.parametrize("case", TABLES)
def test_a_table_that_was_changed(case, copied, refuses):
    (copied / "sweep/result.json").unlink()
    (copied / "sweep/checkpoints/table.json").write_bytes(TABLES[case])
    sweep_again(refuses, "table.json")


@pytest.mark.parametrize(
    "change",
    [
        {"width": "three"},
        {"width": None},
        {"width": 99},
        {"loss": "much"},
        {"loss": [1]},
        {"law": "power:7"},
        {"law": None},
        {"step": "last"},
        {"seed": 5},
        {"phi_half": {}},
        {"decay": []},
        {"dataset_rows": 10},
    ],
    ids=str,
)
def test_a_row_that_was_changed(change, copied, refuses):
    path = copied / "sweep/checkpoints/table.json"
    table = json.loads(path.read_text())
    table["rows"][0] |= change
    path.write_text(json.dumps(table))
    (copied / "sweep/result.json").unlink()
    sweep_again(refuses, "table.json")


@pytest.mark.parametrize("key", ["rows", "norms", "time"])
def test_a_table_without_a_part(key, copied, refuses):
    path = copied / "sweep/checkpoints/table.json"
    table = json.loads(path.read_text())
    del table[key]
    path.write_text(json.dumps(table))
    (copied / "sweep/result.json").unlink()
    sweep_again(refuses, "table.json")


@pytest.mark.parametrize("case", TABLES)
def test_a_result_of_a_pack_that_was_changed(case, copied, refuses):
    (copied / "sweep/result.json").unlink()
    (copied / "sweep/checkpoints/table.json").unlink()
    next((copied / "sweep/checkpoints").glob("*/result.json")).write_bytes(TABLES[case])
    sweep_again(refuses, "result.json")


@pytest.mark.parametrize("case", [*NO_OBJECT])
def test_an_environment_that_was_changed(case, copied, refuses):
    """Without its mark a folder is no run's, and nothing in it may be overwritten."""
    (copied / "sweep/env.json").write_bytes(NO_OBJECT[case])
    refuses(["train", "superposition", *SWEEP, "--out", "sweep", "--overwrite"], "sweep")


CONFIGS = {
    "empty": b"",
    "list": b"- a\n",
    "broken": b"steps: [1\n",
    "latin": b"law: \xe9\n",
    "python": b"steps: !!python/object/apply:os.system [id]\n",
    "bomb": b"a: &a [x, x]\nb: [*a, *a]\n",
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_configuration_that_was_changed(case, copied, refuses):
    (copied / "sweep/config.yaml").write_bytes(CONFIGS[case])
    (copied / "sweep/result.json").unlink()
    refuses(["train", "superposition", *SWEEP, "--out", "sweep", "--resume"], "sweep")
    refuses(["evaluate", "sweep"], "sweep")


@pytest.mark.parametrize("case", [*NO_OBJECT, "headline"])
def test_a_result_that_was_changed(case, copied, refuses):
    content = NO_OBJECT.get(case, b'{"headline": [{"value": "x"}]}')
    (copied / "sweep/result.json").write_bytes(content)
    refuses(["report", "sweep", "--out", "page.html"], "sweep")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["train", "superposition", *SWEEP, "--out", "sweep"], "--overwrite"),
        (["train", "superposition", *SWEEP, "--out", "sweep", "--resume"], "--overwrite"),
        (["train", "taxonomy", "--data", "tree.csv", *EMBED, "--out", "sweep", "--resume"], "sweep"),
        (["evaluate", "sweep"], "superposition"),
        (["evaluate", "embedded"], "taxonomy"),
        (["evaluate", "sweep", "--task", "language"], "superposition"),
        (["evaluate", "sweep", "--task", "sample"], "superposition"),
        (["evaluate", "sweep", "--task", "vision"], "sweep"),
        (["evaluate", "sweep", "--task", "himapper"], "sweep"),
        (["evaluate", "sweep", "--task", "fewshot", "--features", "x.npz"], "sweep"),
        (["explain", "sweep", "x.png"], "superposition"),
        (["export", "sweep", "--to", "exported"], "sweep"),
        (["data", "index", "sweep", "--out", "other"], "sweep"),
        (["data", "index", "embedded", "--out", "index"], "index"),
        (["audit", "sweep", "--out", "audit"], "sweep"),
        (["report", "sweep", "--out", "tree.csv/page.html"], "tree.csv"),
        (["report", "sweep", "gone", "--out", "page.html"], "gone"),
        (["evaluate", "index", "--task", "search", "--like", "pudel"], "pudel"),
        (["evaluate", "index", "--task", "search", "--like", "poodle", "--k", "0"], "k"),
        (["evaluate", "index", "--task", "search", "--like", "poodle", "--under", "lynx"], "lynx"),
        (["evaluate", "index", "--task", "search", "--queries", "gone.npy"], "gone.npy"),
        (["evaluate", "index", "--task", "search", "--like", "poodle", "--queries", "q.npy"], "--queries"),
        (["evaluate", "sweep", "--task", "search", "--like", "poodle"], "sweep"),
    ],
    ids=lambda value: " ".join(word for word in value if word not in SWEEP)[:60] if isinstance(value, list) else "",
)
def test_a_run_for_what_it_is_not(words, named, copied, refuses):
    refuses(words, named)


@pytest.mark.parametrize("case", [name for name in ARRAYS if name.endswith(".safetensors")])
def test_an_index_that_was_changed(case, copied, refuses):
    (copied / "index/index.safetensors").write_bytes(ARRAYS[case][1])
    refuses(["evaluate", "index", "--task", "search", "--like", "poodle"], "index")


ITEMS = NO_OBJECT | {
    "nothing": b"{}",
    "version": b'{"version": 9, "names": [], "scale": 1, "vectors": "tangent"}',
    "names-number": b'{"version": 1, "names": 3, "scale": 1, "vectors": "tangent"}',
    "names-few": b'{"version": 1, "names": ["a"], "scale": 1, "vectors": "tangent"}',
    "scale-text": b'{"version": 1, "names": [], "scale": "x", "vectors": "tangent"}',
    "scale-null": b'{"version": 1, "names": [], "scale": null, "vectors": "tangent"}',
}


@pytest.mark.parametrize("case", ITEMS)
def test_items_that_were_changed(case, copied, refuses):
    (copied / "index/items.json").write_bytes(ITEMS[case])
    refuses(["evaluate", "index", "--task", "search", "--like", "poodle"], "index")


def test_an_index_without_a_part(copied, refuses):
    from safetensors import safe_open
    from safetensors.torch import save_file

    path = copied / "index/index.safetensors"
    with safe_open(path, "pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    spoilt = [{name: each for name, each in tensors.items() if name != left_out} for left_out in tensors]
    spoilt += [tensors | {name: each[:1].clone()} for name, each in tensors.items()]
    spoilt += [tensors | {"nodes": tensors["nodes"] + 100}, tensors | {"space": tensors["space"] * float("nan")}]
    for each in spoilt:
        save_file(each, path, metadata)
        refuses(["evaluate", "index", "--task", "search", "--like", "poodle", "--under", "dog"], "index")
    settings = json.loads(metadata["leafward.index"])
    for change in ({"c": "x"}, {"c": -1}, {"c": None}, {"kind": "other"}, {"storage": "int8"}, {"version": 2}):
        save_file(tensors, path, {"leafward.index": json.dumps(settings | change)})
        refuses(["evaluate", "index", "--task", "search", "--like", "poodle"], "index")
    for text in ("", "[]", "null", "{}"):
        save_file(tensors, path, {"leafward.index": text})
        refuses(["evaluate", "index", "--task", "search", "--like", "poodle"], "index")
