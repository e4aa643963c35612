"""A run knows what it was trained on: other data under the same name are refused by name, unless they are meant."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import golden_cases as golden
import golden_data
import golden_runs
import pytest
from experiment_ranks import Stop, train

from leafward.config import Place, Settings, full_name, lasting, places
from leafward.engine import RunDirectory
from leafward.engine.inputs import BLOCK, BLOCKS, MOST_FILES, RECORD, fingerprint
from leafward.errors import UsageError

SIGTERM = 143
LARGE = BLOCK * BLOCKS + 5


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a/1.txt", "a/2.txt", "b/1.txt"):
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).write_text(f"content of {name}")
    return tmp_path / "data"


def test_a_copy_has_the_fingerprint_of_what_it_was_made_from(folder: Path) -> None:
    copy = shutil.copytree(folder, folder.parent / "copy")
    os.utime(copy / "a/1.txt", (0, 0))
    (copy / ".DS_Store").write_text("hidden")
    assert fingerprint(copy) == fingerprint(folder)
    assert fingerprint(copy / "b/1.txt") == fingerprint(folder / "b/1.txt")


def test_bytes_names_and_places_count(folder: Path) -> None:
    known = {fingerprint(folder), fingerprint(folder / "a"), fingerprint(folder / "b")}
    (folder / "a/1.txt").rename(folder / "a/3.txt")
    known.add(fingerprint(folder))
    (folder / "a/3.txt").write_text("Content of a/1.txt")  # the same size
    known.add(fingerprint(folder))
    (folder / "a/2.txt").rename(folder / "b/2.txt")
    known.add(fingerprint(folder))
    (folder / "b/2.txt").unlink()
    known.add(fingerprint(folder))
    assert len(known) == 7


@pytest.mark.parametrize("place", [0, 1, LARGE // 2, LARGE - 2, LARGE - 1])
def test_of_a_large_file_the_ends_and_blocks_between_are_read(tmp_path: Path, place: int) -> None:
    """This one is a little over what is read whole, so its blocks leave nothing out that is seen here."""
    file = tmp_path / "large.bin"
    file.write_bytes(bytes(LARGE))
    before = fingerprint(file)
    with open(file, "r+b") as opened:
        opened.seek(place)
        opened.write(b"\1")
    assert fingerprint(file) != before


def test_a_folder_that_links_to_itself_and_many_files(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path)
    for number in range(MOST_FILES + 2):
        (tmp_path / f"{number:05}").touch()
    before = fingerprint(tmp_path)
    (tmp_path / "00001").write_text("a size counts, of every file")
    assert fingerprint(tmp_path) != before


class Inner(Settings, frozen=True):
    source: Place | None = None
    field: str = "text"


class Outer(Settings, frozen=True):
    data: Inner = Inner()
    many: tuple[Path, ...] = ()
    gone: Path | None = None
    width: int = 3


def test_settings_keep_whole_paths_for_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("text", "a", "b"):
        (tmp_path / name).touch()
    given = Outer(Inner("a", "text"), (Path("b"), Path("c")), Path("gone"))
    held = lasting(given)
    assert held == Outer(Inner(str(tmp_path / "a"), "text"), (tmp_path / "b", Path("c")), Path("gone"))
    assert places(held) == {"data.source": tmp_path / "a", "many[0]": tmp_path / "b"}
    assert lasting(Outer(Inner("wordnet"))) == Outer(Inner("wordnet"))
    assert lasting(Outer(Inner("ViT-B-32@a"))).data.source == f"ViT-B-32@{tmp_path / 'a'}"
    assert places(Outer(Inner("ViT-B-32@a"))) == {"data.source": Path("a")}


TREE = golden.NODES | {"batch_size": 4, "epochs": 3}


def rewired(path: Path) -> None:
    """As many nodes as before, one of them below another parent."""
    path.write_text(path.read_text().replace("n9,n4\n", "n9,n3\n"))


def test_a_taxonomy_that_was_rewired_is_refused_unless_that_is_meant(tmp_path: Path) -> None:
    data, out = golden_data.make_all(tmp_path / "data"), tmp_path / "run"
    given = ("taxonomy", TREE, data, out)
    assert train(1, *given, stop=Stop(calls=2)) == [SIGTERM]
    before = json.loads((out / RECORD).read_text())
    assert before["data.source"]["path"] == str(data / "tree.csv")
    rewired(data / "tree.csv")
    old, new = before["data.source"]["fingerprint"], fingerprint(data / "tree.csv")
    with pytest.raises(
        UsageError, match=rf"data.source: .*tree.csv has changed.*was {old} and is {new};.*--data-changed"
    ):
        golden_runs.train(*given, resume=True)
    golden_runs.train(*given, resume="data-changed")
    assert json.loads((out / RECORD).read_text())["data.source"]["fingerprint"] == new
    assert (out / "inputs" / "data.source.csv").read_bytes() == (data / "tree.csv").read_bytes()
    # Later the run is opened although the file is gone.
    assert RunDirectory.open(out).config["data"]["source"] == str(data / "tree.csv")
    (data / "tree.csv").unlink()
    assert RunDirectory.open(out).config["data"]["source"] == str(out / "inputs" / "data.source.csv")


READ: Mapping[str, tuple[str, ...]] = {
    "helm": ("data.source",),
    "vision": ("data.source",),
    "hcformer": ("data.source",),
    "himapper": ("data.source",),
    "hyperclip": ("data.source", "model"),
    "segmenter": ("data.source", "model"),
    "lathadapter": ("data.features",),
    "radial": ("data.source", "data.hyperlex", "data.second", "data.test", "model"),
    "superposition": (),
    "taxonomy": ("data.source",),
}


@pytest.mark.parametrize("system", golden.SYSTEMS)
def test_every_training_says_what_it_reads(system: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By whole paths, however the settings were written."""
    monkeypatch.chdir(tmp_path)
    settings: dict[str, Any] = dict(next(iter(golden.SYSTEMS[system].cases.values())).settings)
    files = {value[1:] for value in settings.values() if isinstance(value, str) and value.startswith("@")}
    for name in files:
        (tmp_path / name).touch()
    config = lasting(golden_runs.settings_of(system, settings, Path()))
    chosen = {full_name(type(config), name): value for name, value in settings.items()}
    assert places(config) == {name: tmp_path / chosen[name][1:] for name in READ[system]}
