"""What others build on: public names, and files that earlier versions wrote."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import api
from leafward.adapters.io import read_config
from leafward.engine import RunDirectory
from leafward.errors import DataError
from leafward.geometry import Lorentz
from leafward.hierarchy import Taxonomy
from leafward.systems.taxonomy.index import load

FORMATS = Path(__file__).parent / "data" / "formats"
VERSIONS = sorted(path.name for path in FORMATS.iterdir() if path.is_dir() and path.name[0].isdigit())


def test_public_names_change_only_on_purpose():
    """A name that goes is deprecated first (docs/conventions.md, "Public names"). The list: python tests/api.py"""
    listed, found = api.LIST.read_text(encoding="utf-8").split(), api.names()
    gone, new = sorted(set(listed) - set(found)), sorted(set(found) - set(listed))
    assert not gone, f"public names that are gone: {gone}; deprecate them first, then run python tests/api.py"
    assert not new, f"new public names: {new}; run python tests/api.py if they are meant"
    assert listed == found


def test_every_part_of_the_list_is_public():
    listed = api.LIST.read_text(encoding="utf-8").split()
    assert len(listed) > 100
    assert not [name for name in listed if any(part.startswith("_") for part in name.split("."))]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_run_of_an_earlier_version_is_opened(version):
    run = RunDirectory.open(FORMATS / version / "run")
    assert run.finished
    assert run.recipe == "taxonomy"
    assert run.config["data"]
    assert [record["step"] for record in run.metrics()][-1] == 2
    assert 0.0 <= run.result()["members"][0]["mean_average_precision"] <= 1.0


@pytest.mark.parametrize("version", VERSIONS)
def test_embeddings_and_an_index_of_an_earlier_version_are_opened(version):
    from leafward.data.items import read_items

    items = read_items(FORMATS / version / "run")
    assert set(items.names) == set(Taxonomy.load(FORMATS / version / "tree.csv").names)
    index, settings = load(FORMATS / version / "index")
    assert settings["names"] == items.names
    found = index.search(Lorentz(1.0).expmap0(torch.from_numpy(items.vectors)), k=1)
    assert found.ids[:, 0].tolist() == list(range(len(items.names)))


def test_what_a_later_version_wrote_is_refused(tmp_path):
    run = tmp_path / "run"
    shutil.copytree(FORMATS / VERSIONS[0] / "run", run)
    told = json.loads((run / "env.json").read_text())
    for version in (2, 0, "1", None, 1.5):
        (run / "env.json").write_text(json.dumps({**told, "version": version}))
        with pytest.raises(DataError, match=r"has format version .*; this leafward reads versions up to 1"):
            RunDirectory.open(run)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"format": "leafward-adapter", "version": 2}))
    with pytest.raises(DataError, match="has format version 2"):
        read_config(tmp_path)
