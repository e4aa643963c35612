"""Checkpoints: whole or not there, refused when damaged or foreign, and never unpickled."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_toys import Toy, ToyConfig, record, reporting, train, train_as_nobody, train_limited
from torch import nn

from leafward.config import replace
from leafward.engine.checkpoint import Checkpointer, load_published, load_weights, publish, verify
from leafward.errors import DataError, LeafwardError, UsageError
from ranks import finish, free_port, launch


def _saved(directory: Path, steps: int = 3, **options) -> Checkpointer:
    keeper = Checkpointer(directory, "me", **options)
    for step in range(1, steps + 1):
        keeper.save(step, {"a": torch.full((3,), float(step)), "b": torch.tensor(step)}, {"step": step})
    return keeper


def _without_hashes(manifest: Path, **change: Any) -> None:
    """Make a manifest that of the version before, which knew the sizes alone."""
    read = json.loads(manifest.read_text())
    read = {name: value for name, value in read.items() if name not in ("hashes", "seal")}
    manifest.write_text(json.dumps(read | {"version": 1} | change))


def test_round_trip_and_keep_last(tmp_path: Path) -> None:
    keeper = _saved(tmp_path, 5, keep_last=2)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-00000004", "step-00000005"]
    found = keeper.latest()
    assert found is not None
    assert (found.step, found.state) == (5, {"step": 5})
    tensors = {"a": torch.zeros(3), "b": torch.tensor(0)}
    keeper.load(5, tensors)
    assert tensors["a"].tolist() == [5.0] * 3
    assert tensors["b"] == 5


def test_the_best_is_kept(tmp_path: Path) -> None:
    keeper = Checkpointer(tmp_path, "me", keep_last=1)
    for step in range(1, 5):
        keeper.save(step, {"a": torch.zeros(1)}, {}, best=2 if step >= 2 else None)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-00000002", "step-00000004"]


def test_all_dtypes_and_shapes(tmp_path: Path) -> None:
    tensors = {
        "half": torch.randn(2, 3).half(),
        "bf16": torch.randn(5).bfloat16(),
        "double": torch.randn(()).double(),
        "int": torch.arange(4),
        "bool": torch.tensor([True, False]),
        "empty": torch.zeros(0, 3),
        "strided": torch.randn(4, 6).t()[::2],
    }
    keeper = Checkpointer(tmp_path, "me")
    keeper.save(1, tensors, {})
    loaded = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    keeper.load(1, loaded)
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name], tensor), name


@pytest.mark.parametrize("damage", ["truncated", "missing", "manifest", "no manifest", "extra"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path: Path, damage: str) -> None:
    keeper = _saved(tmp_path)
    newest = keeper.path(3)
    (tensors,) = newest.glob("*.safetensors")
    if damage == "truncated":
        os.truncate(tensors, tensors.stat().st_size - 5)
    elif damage == "missing":
        tensors.unlink()
    elif damage == "manifest":
        (newest / "manifest.json").write_text('{"format": "leafward-checkp')
    elif damage == "no manifest":
        (newest / "manifest.json").unlink()
    else:
        shutil.copy(tensors, newest / "other.safetensors")
    with pytest.raises(DataError, match="step-00000003"):
        verify(newest)
    with pytest.warns(UserWarning, match="step-00000003.*trying the checkpoint before"):
        found = keeper.latest()
    assert found is not None
    assert found.step == 2
    keeper.save(3, {"a": torch.zeros(3), "b": torch.tensor(3)}, {})
    assert verify(newest).step == 3
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]


def test_if_all_are_damaged_nothing_starts_from_zero(tmp_path: Path) -> None:
    keeper = _saved(tmp_path, 1)
    (keeper.path(1) / "manifest.json").unlink()
    with pytest.warns(UserWarning, match="step-00000001"), pytest.raises(DataError, match="step-00000001"):
        keeper.latest()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": "other"}, "not a leafward checkpoint"),
        ({"version": 99}, "version 99"),
        ({"surprise": 1}, "damaged"),
        ({"files": {"../../secret": 1}}, "missing"),
        ({"files": {}}, "does not know"),
    ],
)
def test_a_foreign_checkpoint_is_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    keeper = _saved(tmp_path, 1)
    _without_hashes(keeper.path(1) / "manifest.json", **change)
    with pytest.raises(DataError, match=words):
        verify(keeper.path(1))


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    _saved(tmp_path, 1)
    with pytest.raises(DataError, match=r"step-00000001 belongs to a run with another configuration"):
        Checkpointer(tmp_path, "you").latest()


def test_remains_of_killed_writes_are_removed(tmp_path: Path) -> None:
    keeper = _saved(tmp_path, 1)
    (tmp_path / ".partial-step-00000002").mkdir()
    (tmp_path / ".partial-step-00000002" / "half").write_bytes(b"1")
    assert keeper.latest() is not None
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000001"]


class Trap:
    """Unpickling this makes a directory."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_nothing_is_ever_unpickled(tmp_path: Path) -> None:
    trap = tmp_path / "sprung"
    bomb = pickle.dumps(Trap(trap))
    keeper = _saved(tmp_path / "a", 1)
    # Where DCP's own format keeps its pickled metadata: it is there and nobody reads it.
    (keeper.path(1) / ".metadata").write_bytes(bomb)
    assert keeper.latest() is not None
    keeper.load(1, {"a": torch.zeros(3)})
    # In the place of the tensors, with a manifest that agrees: refused by name.
    torch_file = io.BytesIO()
    torch.save({"a": Trap(trap)}, torch_file)
    for number, content in enumerate((bomb, torch_file.getvalue())):
        keeper = _saved(tmp_path / f"b{number}", 1)
        (tensors,) = keeper.path(1).glob("*.safetensors")
        tensors.write_bytes(content)
        _without_hashes(keeper.path(1) / "manifest.json", files={tensors.name: len(content)})
        assert keeper.latest() is not None
        with pytest.raises(DataError, match=tensors.name):
            keeper.load(1, {"a": torch.zeros(3)})
    publish(nn.Linear(1, 1), tmp_path / "model", {})
    (tmp_path / "model" / "model.safetensors").write_bytes(bomb)
    (tmp_path / "model" / "SHA256SUMS").unlink()
    with pytest.raises(DataError, match="published model"):
        load_published(tmp_path / "model")
    assert not trap.exists()
    pickle.loads(bomb)
    assert trap.exists(), "the trap itself must work"


def test_another_model_is_refused_by_the_name_of_a_tensor(tmp_path: Path) -> None:
    keeper = _saved(tmp_path, 1)
    with pytest.raises(DataError, match="no tensor 'c'"):
        keeper.load(1, {"a": torch.zeros(3), "c": torch.zeros(1)})
    with pytest.raises(DataError, match=r"step-00000001"):
        keeper.load(1, {"a": torch.zeros(4)})


def test_weights_of_a_larger_model_are_refused(tmp_path: Path) -> None:
    keeper = Checkpointer(tmp_path, "me")
    keeper.save(1, {"model.weight": torch.ones(1, 1), "model.bias": torch.ones(1)}, {})
    with pytest.raises(DataError, match=r"this one has no tensor 'model\.bias'"):
        load_weights(keeper.path(1), nn.Linear(1, 1, bias=False))


def test_load_weights_prefers_the_average(tmp_path: Path) -> None:
    model = nn.BatchNorm1d(2)
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    keeper = Checkpointer(tmp_path, "me")
    keeper.save(1, tensors | {"ema.weight": torch.tensor([5.0, 6.0])}, {})
    other = nn.BatchNorm1d(2)
    load_weights(keeper.path(1), other)
    assert other.weight.tolist() == [5.0, 6.0]
    assert torch.equal(other.bias, model.bias)


def test_publish_keeps_tied_weights_and_replaces_in_one_step(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(4, 3)
            self.head = nn.Linear(3, 4, bias=False)
            self.head.weight = self.table.weight

    model = Tied()
    for _ in range(2):
        publish(model, tmp_path / "model", {"width": 3})
        config, tensors = load_published(tmp_path / "model")
        assert config == {"width": 3}
        Tied().load_state_dict(tensors)
        assert torch.equal(tensors["head.weight"], model.table.weight)
        with torch.no_grad():
            model.table.weight.add_(1.0)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["model"]
    left = sorted(entry.name for entry in (tmp_path / "model").iterdir())
    assert left == ["SHA256SUMS", "config.json", "model.safetensors"]


def test_publish_of_a_module_registered_twice_with_a_buffer_that_is_not_kept(tmp_path: Path) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(2, 2)
            self.one.register_buffer("places", torch.arange(2), persistent=False)
            self.other = self.one

    model = Twice()
    publish(model, tmp_path / "model", {})
    _, tensors = load_published(tmp_path / "model")
    assert "other.places" not in tensors
    Twice().load_state_dict(tensors)


def test_publish_never_replaces_other_things(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UsageError, match="not empty"):
        publish(Toy(), tmp_path, {})
    # A model that somebody else keeps there with its tokenizer is not ours to replace either.
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    for name in ("model.safetensors", "tokenizer.json"):
        (theirs / name).write_text("theirs")
    with pytest.raises(UsageError, match=r"theirs is not empty.*tokenizer\.json"):
        publish(Toy(), theirs, {})
    assert {file.read_text() for file in theirs.iterdir()} == {"theirs"}
    shutil.rmtree(theirs)
    (tmp_path / "file").write_text("")
    with pytest.raises(LeafwardError, match="file/model"):
        publish(Toy(), tmp_path / "file" / "model", {})
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file", "thesis.tex"]


def test_a_full_disk_gives_a_clear_error_and_keeps_the_last_good_checkpoint(tmp_path: Path) -> None:
    """The kernel refuses to let files grow beyond 4096 bytes, as a full disk would."""
    run, out, config = tmp_path / "run", tmp_path / "error.txt", ToyConfig()
    short = replace(config, loop=replace(config.loop, ema=None))
    assert finish(launch(reporting, out, train_limited, 4096, 0, 1, 0, run, short, False)) == [1]
    assert "LeafwardError" in out.read_text()
    assert "cannot write the checkpoint" in out.read_text()
    assert "File too large" in out.read_text()
    assert list((run / "checkpoints").iterdir()) == []
    # With room again the run goes on; then a limit once more, and the good checkpoint stays.
    assert finish(launch(train, run, short, True)) == [0]
    before, kept = record(run), sorted((run / "checkpoints").iterdir())
    (run / "result.json").unlink()
    longer = replace(short, loop=replace(short.loop, steps=20))
    assert finish(launch(reporting, out, train_limited, 4096, 0, 1, 0, run, longer, True)) == [1]
    assert f"the last good checkpoint is {run / 'checkpoints' / 'step-00000012'}" in out.read_text()
    assert sorted((run / "checkpoints").iterdir()) == kept
    assert verify(run / "checkpoints" / "step-00000012").step == 12
    assert finish(launch(train, run, longer, True)) == [0]
    assert record(run)[0][: len(before[0]) - 2] == before[0][:-2]


def test_a_full_disk_stops_every_rank(tmp_path: Path) -> None:
    outs = [tmp_path / f"{rank}.txt" for rank in range(2)]
    shared = (2, free_port(), tmp_path / "run", ToyConfig(), False)
    ranks = [launch(reporting, outs[rank], train_limited, 3000, rank, *shared) for rank in range(2)]
    assert finish(*ranks) == [1, 1]
    for out in outs:
        assert "LeafwardError: cannot write the checkpoint" in out.read_text()
        assert "File too large" in out.read_text()
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


def test_a_read_only_directory_gives_a_clear_error() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, out = Path(name), Path(name) / "error.txt"
        out.touch()
        out.chmod(0o666)
        folder.chmod(0o555)
        assert finish(launch(reporting, out, train_as_nobody, folder / "run", ToyConfig(), False)) == [1]
        assert "LeafwardError: cannot make the run directory" in out.read_text()
        assert "Permission denied" in out.read_text()
        assert not (folder / "run").exists()
        folder.chmod(0o755)
