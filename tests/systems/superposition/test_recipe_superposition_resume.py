"""A grid that is killed, stopped or partly fails: what was done is kept, and the result is the same."""

from __future__ import annotations

import json
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from leafward.config import replace
from leafward.errors import LeafwardError
from leafward.systems.superposition import packs
from leafward.systems.superposition import train as train_superposition
from leafward.systems.superposition.config import Config
from ranks import Stop, exiting, finish, launch

CONFIG = replace(
    Config(),
    features=30,
    widths=(3, 4, 6, 9),
    decays=(-1.0, 0.6),
    laws=("power:1", "power:2"),
    batch_size=32,
    steps=400,
    axis=("steps",),
    snapshots=3,
    pack=4,
    processes=0,
    device="cpu",
    eval_rows=64,
    checkpoint_every=50,
)
SAVES = "leafward.systems.superposition.fleet:Fleet.state_dict"
"""What each pack calls every 50 of its 400 steps."""


def without_time(path: Path) -> dict[str, Any]:
    return {key: value for key, value in json.loads((path / "result.json").read_text()).items() if key != "time"}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("unbroken") / "run"
    train_superposition.run(CONFIG, out)
    return out


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_stopped_in_the_middle_and_resumed(tmp_path, unbroken, number):
    out = tmp_path / "run"
    process = launch(partial(exiting, stop=Stop(SAVES, 10, number)), train_superposition.run, CONFIG, out)
    assert finish(process) == [143 if number == signal.SIGTERM else -signal.SIGKILL]
    assert len(list(out.glob("checkpoints/*/result.json"))) == 1
    assert len(list(out.glob("checkpoints/*/state.safetensors"))) == 2
    assert not (out / "result.json").exists()
    train_superposition.run(CONFIG, out, resume=True)
    assert without_time(out) == without_time(unbroken)
    assert (out / "metrics.jsonl").read_text() == (unbroken / "metrics.jsonl").read_text()
    assert not list(out.glob("checkpoints/*/state.safetensors"))


@pytest.mark.slow
def test_processes_stop_with_their_parent_and_give_the_same_result(tmp_path, unbroken):
    out = tmp_path / "run"
    config = replace(CONFIG, processes=2)
    process = launch(exiting, train_superposition.run, config, out)
    deadline = time.monotonic() + 240
    while not list(out.glob("checkpoints/*/state.safetensors")):
        assert process.is_alive(), "the run ended before it could be stopped"
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGTERM)
    assert finish(process) == [143]
    saved = [path.stat().st_mtime_ns for path in out.glob("checkpoints/*/state.safetensors")]
    time.sleep(1)
    assert saved == [path.stat().st_mtime_ns for path in out.glob("checkpoints/*/state.safetensors")]
    train_superposition.run(replace(config, processes=1), out, resume=True)
    assert without_time(out) == without_time(unbroken)


@pytest.mark.slow
def test_ray_gives_the_same_result(tmp_path, unbroken, monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    handler = signal.getsignal(signal.SIGTERM)
    train_superposition.run(replace(CONFIG, processes=2, executor="ray"), tmp_path / "run")
    assert without_time(tmp_path / "run") == without_time(unbroken)
    # Ray puts its own handler in place, which ends the process before it can save; it must not stay.
    assert signal.getsignal(signal.SIGTERM) is handler


def test_tables_are_enough_to_finish_elsewhere(tmp_path, unbroken):
    for name in ("config.yaml", "env.json", "checkpoints/table.json"):
        (tmp_path / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / name).write_bytes((unbroken / name).read_bytes())
    train_superposition.run(CONFIG, tmp_path / "run", resume=True)
    assert without_time(tmp_path / "run") == without_time(unbroken)


def test_failed_pack_is_reported_and_the_others_go_on(tmp_path):
    planned = packs.plan(replace(CONFIG, steps=20), "cpu")
    planned[0]["options"] = planned[0]["options"] | {"precision": "tf32"}
    table = packs.train(planned, tmp_path, workers=0)
    (failure,) = table["failures"]
    assert "tf32" in failure["message"]
    assert "tf32" in Path(failure["trace"]).read_text()
    assert len({(row["law"], row["decay"], row["width"]) for row in table["rows"]}) == 16 - 4
    # Nothing is final while a pack is missing: the next attempt trains that one and no other.
    assert not (tmp_path / "checkpoints" / "table.json").exists()
    planned[0]["options"] = planned[1]["options"]
    assert len(packs.train(planned, tmp_path, workers=0)["rows"]) == 16 * len(planned[0]["snapshots"])


def test_all_packs_failing_is_an_error(tmp_path):
    planned = packs.plan(replace(CONFIG, steps=20, laws=("power:1",), pack=8), "cpu")
    planned[0]["options"] = planned[0]["options"] | {"precision": "tf32"}
    with pytest.raises(LeafwardError, match=r"every pack failed.*tf32"):
        packs.train(planned, tmp_path, workers=0)


def test_damaged_state_is_named(tmp_path):
    (pack, *_) = packs.plan(replace(CONFIG, steps=20, laws=("power:1",), pack=8), "cpu")
    (tmp_path / "state.safetensors").write_bytes(b"not a state")
    with pytest.raises(LeafwardError, match=r"state\.safetensors"):
        packs._train(pack, tmp_path, lambda: False)
