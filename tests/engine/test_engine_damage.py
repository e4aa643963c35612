"""Damage to what was saved: found, named, and gone around where an older checkpoint is good."""

from __future__ import annotations

import binascii
import json
import os
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_toys import ToyConfig, finish, free_port, launch, record, reporting, train, train_rank, train_ranks
from torch import nn

from leafward.config import replace
from leafward.engine.checkpoint import Checkpointer, load_published, publish, verify
from leafward.engine.hashes import HashedFile, check_sums, file_hash, write_sums
from leafward.errors import DataError
from leafward.report import read_run


def _flip(file: Path, place: int, bit: int = 3) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1 << bit
    file.write_bytes(content)


def _zero(file: Path) -> None:
    """Zero the data of a safetensors file, whose header begins with its own length."""
    content = file.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    file.write_bytes(content[:start] + bytes(len(content) - start))


def _manifest_state(file: Path) -> None:
    manifest = file.with_name("manifest.json")
    text = manifest.read_text()
    assert '"step": 3' in text
    manifest.write_text(text.replace('"step": 3', '"step": 7', 1))


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a flipped bit": (lambda file: _flip(file, -2), r"shard-.*is damaged: its hash is crc32:"),
    "zeroed data": (_zero, r"shard-.*is damaged: its hash is crc32:"),
    "a flipped header": (lambda file: _flip(file, 20), r"shard-.*is damaged: its hash is crc32:"),
    "truncated": (lambda file: os.truncate(file, file.stat().st_size - 3), r"shard-.*is damaged: it has \d+ bytes"),
    "missing": (Path.unlink, r"shard-.* is missing"),
    "another state": (_manifest_state, r"manifest\.json is damaged"),
}


def _keeper(folder: Path, steps: int = 3) -> Checkpointer:
    keeper = Checkpointer(folder, "me")
    for step in range(1, steps + 1):
        keeper.save(step, {"a": torch.arange(1.0, 9.0) * step}, {"step": step})
    return keeper


@pytest.mark.parametrize("damage", DAMAGES)
def test_every_kind_of_damage_is_found_and_named(tmp_path: Path, damage: str) -> None:
    keeper = _keeper(tmp_path)
    (shard,) = keeper.path(3).glob("*.safetensors")
    harm, words = DAMAGES[damage]
    harm(shard)
    with pytest.raises(DataError, match=words):
        verify(keeper.path(3))
    with pytest.warns(UserWarning, match="step-00000003.*trying the checkpoint before it"):
        found = keeper.latest()
    assert found is not None
    assert (found.step, found.state) == (2, {"step": 2})
    assert len(keeper.damaged) == 1
    tensors = {"a": torch.zeros(8)}
    keeper.load(2, tensors)
    assert torch.equal(tensors["a"], torch.arange(1.0, 9.0) * 2)


def test_any_flipped_bit_anywhere_is_found(tmp_path: Path) -> None:
    keeper = _keeper(tmp_path, 1)
    chosen = random.Random(0)
    for file in sorted(keeper.path(1).iterdir()):
        whole = file.read_bytes()
        for _ in range(40):
            _flip(file, chosen.randrange(len(whole)), chosen.randrange(8))
            with pytest.raises(DataError, match="step-00000001"):
                verify(keeper.path(1))
            file.write_bytes(whole)
    assert verify(keeper.path(1)).step == 1


def test_the_hash_is_that_of_the_file(tmp_path: Path) -> None:
    content = random.Random(1).randbytes(9_000_001)
    with HashedFile(tmp_path / "f") as file:
        for start in range(0, len(content), 1_234_567):
            file.write(memoryview(content)[start : start + 1_234_567])
    assert (tmp_path / "f").read_bytes() == content
    assert file.digest == file_hash(tmp_path / "f") == f"crc32:{binascii.crc32(content):08x}"


def test_the_hash_is_of_what_was_handed_over_and_not_of_what_arrived(tmp_path: Path) -> None:
    """A buffer that its owner changes right after the call is hashed as it was written."""
    buffer = bytearray(b"a" * (32 << 20))
    with HashedFile(tmp_path / "f") as file:
        file.write(buffer)
        buffer[:] = bytes(len(buffer))
    assert file.digest == f"crc32:{binascii.crc32(b'a' * (32 << 20)):08x}"


def test_checkpoints_without_hashes_still_load(tmp_path: Path) -> None:
    keeper = _keeper(tmp_path, 2)
    for step in (1, 2):
        manifest = keeper.path(step) / "manifest.json"
        read = json.loads(manifest.read_text())
        del read["hashes"], read["seal"]
        manifest.write_text(json.dumps(read | {"version": 1}))
    (shard,) = keeper.path(2).glob("*.safetensors")
    found = keeper.latest()
    assert found is not None
    assert found.step == 2
    keeper.load(2, {"a": torch.zeros(8)})
    os.truncate(shard, 10)
    with pytest.warns(UserWarning, match="has 10 bytes"):
        found = keeper.latest()
    assert found is not None
    assert found.step == 1


def test_a_manifest_that_lost_its_hashes_does_not_pass(tmp_path: Path) -> None:
    keeper = _keeper(tmp_path, 1)
    manifest = keeper.path(1) / "manifest.json"
    for lost in ("hashes", "seal"):
        whole = manifest.read_text()
        read = json.loads(whole)
        del read[lost]
        manifest.write_text(json.dumps(read))
        with pytest.raises(DataError, match=r"manifest\.json is damaged"):
            verify(keeper.path(1))
        manifest.write_text(whole)


# At the end there are the last two, 9 and 12, the best, 12, and what was the best at 9: 8.
CONFIG = ToyConfig(replace(ToyConfig().loop, eval_every=4), dropout=0.2)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """A finished run for each number of ranks."""
    runs = {world: tmp_path_factory.mktemp("unbroken") / f"{world}" for world in (1, 2)}
    for world, run in runs.items():
        train_ranks(world, run, CONFIG)
    return runs


def _unfinished(run: Path, to: Path) -> list[Path]:
    """A copy of `run` that has not come to its result; the shards of its newest checkpoint."""
    shutil.copytree(run, to)
    (to / "result.json").unlink()
    shutil.rmtree(to / "model")
    return sorted((to / "checkpoints" / "step-00000012").glob("*.safetensors"))


def _without_events(run: Path) -> tuple[Any, list[dict[str, Any]]]:
    lines, weights, result = record(run)
    return ([line for line in lines if "event" not in line], weights, result), [l for l in lines if "event" in l]  # noqa: E741


@pytest.mark.parametrize("damage", [name for name in DAMAGES if name != "another state"])
@pytest.mark.parametrize("world", [1, 2])
def test_a_run_goes_on_from_the_older_one_bit_for_bit(
    unbroken: dict[int, Path], tmp_path: Path, world: int, damage: str
) -> None:
    run = tmp_path / "run"
    shards = _unfinished(unbroken[world], run)
    assert len(shards) == world
    harm, _ = DAMAGES[damage]
    harm(shards[-1])
    train_ranks(world, run, CONFIG, resume=True)
    found, events = _without_events(run)
    assert found == record(unbroken[world])
    (event,) = events
    assert event["step"] == 9
    assert shards[-1].name in event["event"]
    assert "goes on from step 9" in event["event"]
    assert verify(run / "checkpoints" / "step-00000012").step == 12
    assert "train/loss" in read_run(run).series  # the event is no number, and no curve


def test_damage_shows_on_every_rank_and_in_the_log(unbroken: dict[int, Path], tmp_path: Path) -> None:
    """Two ranks look at one shard each; if none is good, both stop with the same words."""
    run = tmp_path / "run"
    _unfinished(unbroken[2], run)
    for step in (run / "checkpoints").iterdir():
        _flip(max(step.glob("*.safetensors")), -1)
    outs = [tmp_path / f"{rank}.txt" for rank in range(2)]
    shared = (2, free_port(), run, CONFIG, True)
    ranks = [launch(reporting, outs[rank], train_rank, rank, *shared) for rank in range(2)]
    assert finish(*ranks) == [1, 1]
    for out in outs:
        assert "shard-00002-model-00001-of-00001.safetensors is damaged" in out.read_text()
        assert "no checkpoint in" in out.read_text()
    assert not (run / "result.json").exists()


def test_the_best_weights_are_lost(tmp_path: Path) -> None:
    """The run says so when it is taken up, and does not end, after all its steps, with weights that it cannot read."""
    config = replace(CONFIG, optim=replace(CONFIG.optim, lr=0.3), loop=replace(CONFIG.loop, steps=9, eval_every=4))
    run = tmp_path / "run"
    train(run, config)
    best = json.loads((run / "result.json").read_text())["best_step"]
    assert best < 9, "the test needs a best checkpoint that is not the last"
    (run / "result.json").unlink()
    _flip(next((run / "checkpoints" / f"step-{best:08d}").glob("*.safetensors")), -1)
    longer = replace(config, loop=replace(config.loop, steps=12))
    with pytest.warns(UserWarning, match=f"step-{best:08d}.*it is not used"):
        train(run, longer, resume=True)
    result = json.loads((run / "result.json").read_text())
    assert result["best_step"] > best
    assert any(f"step-{best:08d}" in line.get("event", "") for line in record(run)[0])


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_published_model_with_a_changed_byte_is_refused_by_name(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    publish(nn.Linear(3, 2), folder, {"width": 3})
    place = (folder / name).read_bytes().rindex(b"3") if name == "config.json" else -1
    _flip(folder / name, place, bit=0)
    with pytest.raises(DataError, match=rf"{name} is damaged: its hash is sha256.*remove .*SHA256SUMS"):
        load_published(folder)
    (folder / "SHA256SUMS").unlink()
    load_published(folder)  # older ones, and what was changed on purpose


def test_a_published_model_that_lacks_a_file_or_has_foreign_sums_is_refused(tmp_path: Path) -> None:
    publish(nn.Linear(3, 2), tmp_path / "model", {})
    sums = tmp_path / "model" / "SHA256SUMS"
    whole = sums.read_text()
    for text in ("rubbish", whole.replace("config.json", "../config.json")):
        sums.write_text(text)
        with pytest.raises(DataError, match="SHA256SUMS, line"):
            load_published(tmp_path / "model")
    sums.write_text(whole + f"{'0' * 64}  extra.json\n")
    with pytest.raises(DataError, match=r"extra\.json is missing"):
        load_published(tmp_path / "model")


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="needs sha256sum")
def test_the_sums_are_those_of_sha256sum(tmp_path: Path) -> None:
    for name, content in {"a": b"one", "b c": b""}.items():
        (tmp_path / name).write_bytes(content)
    write_sums(tmp_path)
    checked = subprocess.run(["sha256sum", "--strict", "-c", "SHA256SUMS"], cwd=tmp_path, capture_output=True)
    assert checked.returncode == 0, checked.stderr
    for flag in ("-b", "-t"):
        made = subprocess.run(["sha256sum", flag, "a", "b c"], cwd=tmp_path, capture_output=True, check=True)
        (tmp_path / "SHA256SUMS").write_bytes(made.stdout)
        check_sums(tmp_path)
