"""Good files with some bytes changed: each is still good, or refused by name with nothing left behind.

Whether a mutated file is bad is not known beforehand, so only those that were refused are counted.
"""

from __future__ import annotations

import json
import os
import shutil

import hypothesis
import numpy as np
import pytest
import torch
from fuzz_files import safetensors, tensor
from hypothesis import strategies as st

from leafward.cli.dispatch import main
from leafward.config import load_yaml
from leafward.errors import LeafwardError
from leafward.systems.helm import config as helm
from leafward.systems.superposition import config as superposition

SETTINGS = hypothesis.settings(
    derandomize=True,
    max_examples=30,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
TREE = b"child,parent\nanimal,\ndog,animal\ncat,animal\npoodle,dog\ncorgi,dog\n"
NESTED = b'{"animal": {"dog": {"poodle": {}, "corgi": null}, "cat": ["tabby", "manx"]}}'
PREDICTIONS = b"true,poodle,corgi,cat\npoodle,0.6,0.3,0.1\ncat,0.2,0.2,0.6\n"
SWEEP = ["--features", "20", "--widths", "3", "4", "6", "--decays", "-1", "1", "--laws", "power:1", "--steps", "10"]
SWEEP += ["--batch", "16", "--eval-rows", "64", "--workers", "0", "--device", "cpu"]


@st.composite
def mutated(draw: st.DrawFn, content: bytes) -> bytes:
    """`content` with one to four places changed, taken out, put in or doubled, or its end cut off."""
    data = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        kind = draw(st.sampled_from(["change", "remove", "insert", "double", "cut"]))
        some = draw(
            st.sampled_from([b"\0", b"\xff", b'"', b",", b"\n", b"\r", b"{", b"]", b"-", b"9" * 20, b"null", b":"])
        )
        if kind == "change":
            data[at : at + 1] = some
        elif kind == "remove":
            del data[at : at + draw(st.integers(1, 8))]
        elif kind == "insert":
            data[at:at] = some
        elif kind == "double":
            data[at:at] = data[at : at + draw(st.integers(1, 40))]
        else:
            del data[at:]
    return bytes(data)


@SETTINGS
@hypothesis.given(content=mutated(TREE))
def test_taxonomies_in_csv(content, place, refuses):
    (place / "t.csv").write_bytes(content)
    refuses(["data", "chains", "--taxonomy", "t.csv", "--out", "c.jsonl"], "t.csv", maybe=True)


@SETTINGS
@hypothesis.given(content=mutated(NESTED))
def test_taxonomies_in_json(content, place, refuses):
    (place / "t.json").write_bytes(content)
    refuses(["data", "chains", "--taxonomy", "t.json", "--out", "c.jsonl"], "t.json", maybe=True)


@SETTINGS
@hypothesis.given(content=mutated(PREDICTIONS))
def test_predictions(content, place, refuses):
    (place / "tree.csv").write_bytes(TREE)
    (place / "p.csv").write_bytes(content)
    refuses(["evaluate", "p.csv", "--task", "hierarchy", "--taxonomy", "tree.csv", "--json"], "p.csv", maybe=True)


@SETTINGS
@hypothesis.given(data=st.data(), recipe=st.sampled_from([superposition, helm]))
def test_configurations(data, recipe, place, counts):
    """Read without training: a mutated configuration may be a good one."""
    from leafward.config import to_yaml

    (place / "c.yaml").write_bytes(data.draw(mutated(to_yaml(recipe.Config()).encode())))
    said = "good"
    try:
        load_yaml(recipe.Config, place / "c.yaml")
    except LeafwardError as error:
        said = str(error)
        counts()
    assert said == "good" or "c.yaml" in said


WEIGHTS = safetensors({"w": tensor([8, 4])}, np.arange(32, dtype=np.float32).tobytes())


@SETTINGS
@hypothesis.given(content=mutated(WEIGHTS[:90]))
def test_headers_of_tensors(content, place, refuses):
    (place / "w.safetensors").write_bytes(content + WEIGHTS[90:])
    refuses(["data", "index", "w.safetensors", "--out", "index", "--overwrite"], "w.safetensors", maybe=True)


ADAPTER = {
    "format": "leafward-adapter",
    "method": "block_scale",
    "leafward_version": "1",
    "base_model": {"name": "base", "revision": "", "class": "Model"},
    "config": {"block_size": 8, "targets": ["q", "k"], "encoder": "both", "constraint": "free", "share": []},
}


@SETTINGS
@hypothesis.given(content=mutated(json.dumps(ADAPTER).encode()))
def test_descriptions_of_adapters(content, place, refuses):
    from safetensors.torch import save_file

    shutil.rmtree(place / "out", ignore_errors=True)
    (place / "adapter").mkdir(exist_ok=True)
    save_file({"w": torch.zeros(2)}, place / "adapter/adapter_model.safetensors")
    (place / "adapter/adapter_config.json").write_bytes(content)
    refuses(["export", "adapter", "--to", "out"], "", maybe=True)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """A finished sweep."""
    folder = tmp_path_factory.mktemp("sweep")
    before = os.getcwd()
    os.chdir(folder)
    try:
        assert main(["train", "superposition", *SWEEP, "--out", "sweep"]) == 0
    finally:
        os.chdir(before)
    return folder / "sweep"


@SETTINGS
@hypothesis.given(data=st.data())
def test_results_of_runs(data, sweep, place, refuses):
    shutil.copytree(sweep, place / "sweep", dirs_exist_ok=True)
    (place / "sweep/result.json").write_bytes(data.draw(mutated((sweep / "result.json").read_bytes())))
    refuses(["report", "sweep", "--out", "page.html"], "sweep", maybe=True)


@hypothesis.settings(SETTINGS, max_examples=15)
@hypothesis.given(data=st.data())
def test_tables_of_runs(data, sweep, place, refuses):
    shutil.rmtree(place / "sweep", ignore_errors=True)
    shutil.copytree(sweep, place / "sweep")
    (place / "sweep/result.json").unlink()
    path = place / "sweep/checkpoints/table.json"
    path.write_bytes(data.draw(mutated(path.read_bytes())))
    words = ["train", "superposition", *SWEEP, "--out", "sweep", "--resume"]
    refuses(words, "table.json", maybe=True, rewritten=("sweep/env.json", "sweep/config.yaml"))
