"""One, two and four ranks, DDP and FSDP2, compute the same and read each other's checkpoints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import engine_toys
import pytest
from engine_toys import SparingTask, ToyConfig, record, reporting, train_rank, train_rank_some, train_ranks
from safetensors.torch import load
from torch import nn

from leafward.config import replace, save_yaml
from leafward.engine import Cluster, session
from leafward.engine.distributed import share
from leafward.errors import LeafwardError, UsageError
from ranks import finish, free_port, launch

BASE = ToyConfig()


def _config(**loop: Any) -> ToyConfig:
    return replace(BASE, loop=replace(BASE.loop, **loop))


def _assert_same(path: Path, reference: Path) -> None:
    """Metrics (losses, norms, accuracies) and weights equal to 1e-6."""
    lines, weights, result = record(path)
    expected_lines, expected_weights, expected_result = record(reference)
    assert result == pytest.approx(expected_result, abs=1e-6)
    assert [line.keys() for line in lines] == [line.keys() for line in expected_lines]
    for line, expected in zip(lines, expected_lines, strict=True):
        assert line == pytest.approx(expected, abs=1e-6)
    found, expected_tensors = load(weights), load(expected_weights)
    for name, tensor in expected_tensors.items():
        assert (found[name] - tensor).abs().max() < 1e-5, name


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("alone") / "run"
    train_ranks(1, path, BASE)
    return path


@pytest.mark.parametrize(
    ("world", "loop"),
    [
        (1, {"micro_batch": 2}),
        (2, {"strategy": "ddp"}),
        (2, {"strategy": "fsdp"}),
        (2, {"strategy": "ddp", "micro_batch": 2}),
        (2, {"strategy": "fsdp", "micro_batch": 1, "checkpoint_activations": True}),
        (4, {"strategy": "ddp"}),
        (4, {"strategy": "fsdp"}),
    ],
    ids=str,
)
def test_any_split_of_the_work_gives_the_same_run(
    alone: Path, tmp_path: Path, world: int, loop: dict[str, Any]
) -> None:
    train_ranks(world, tmp_path / "run", _config(**loop))
    _assert_same(tmp_path / "run", alone)


def test_dropout_does_not_depend_on_the_split(tmp_path: Path) -> None:
    layouts: dict[str, tuple[int, dict[str, Any]]] = {
        "one": (1, {}),
        "micro": (1, {"micro_batch": 2}),
        "two": (2, {"strategy": "fsdp", "micro_batch": 2, "checkpoint_activations": True}),
    }
    for name, (world, loop) in layouts.items():
        train_ranks(world, tmp_path / name, replace(_config(**loop), dropout=0.3))
    _assert_same(tmp_path / "micro", tmp_path / "one")
    _assert_same(tmp_path / "two", tmp_path / "one")


def test_a_checkpoint_of_two_ranks_resumes_on_one_and_four(alone: Path, tmp_path: Path) -> None:
    """The stages together are the run of one rank; each ends when one rank alone gets SIGTERM, between checkpoints."""
    run = tmp_path / "run"
    for end, calls, world, strategy in ((4, 4, 2, "fsdp"), (5, 1, 1, "auto"), (8, 3, 2, "ddp"), (11, 3, 4, "fsdp")):
        arguments = (world, free_port(), run, _config(strategy=strategy))
        ranks = [launch(train_rank_some, calls, rank, *arguments) for rank in range(world)]
        assert finish(*ranks) == [0] * world
        assert (run / "checkpoints" / f"step-{end:08d}" / "manifest.json").is_file()
    train_ranks(4, run, _config(strategy="ddp"), resume=True)
    _assert_same(run, alone)


@pytest.mark.slow
def test_torchrun(alone: Path, tmp_path: Path) -> None:
    save_yaml(BASE, tmp_path / "config.yaml")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        engine_toys.__file__,
    ]
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    command += [str(tmp_path / "run"), str(tmp_path / "config.yaml")]
    subprocess.run(command, check=True, timeout=120, env=os.environ | {"PYTHONPATH": path})
    _assert_same(tmp_path / "run", alone)
    assert json.loads((tmp_path / "run" / "result.json").read_text())["step"] == 12


def test_a_refusal_on_the_first_rank_reaches_all(alone: Path, tmp_path: Path) -> None:
    shared, outs = (2, free_port(), alone, BASE, False), [tmp_path / f"{rank}.txt" for rank in range(2)]
    ranks = [launch(reporting, outs[rank], train_rank, rank, *shared) for rank in range(2)]
    assert finish(*ranks) == [1, 1]
    assert all("holds a finished run" in out.read_text() for out in outs)


def test_parameters_without_a_gradient_on_some_ranks(tmp_path: Path) -> None:
    for world in (1, 2):
        shared = (world, free_port(), tmp_path / f"{world}", BASE, False, SparingTask())
        assert finish(*[launch(train_rank, rank, *shared) for rank in range(world)]) == [0] * world
    _assert_same(tmp_path / "2", tmp_path / "1")


@pytest.mark.parametrize(
    ("variables", "device", "words"),
    [
        ({"RANK": "first"}, "cpu", "RANK must be an integer, not 'first'"),
        ({"WORLD_SIZE": "2"}, "cpu", "rank 0 of 2 cannot join the others"),
        ({}, "tpu", "device must be auto, cpu or cuda, not 'tpu'"),
    ],
)
def test_a_wrong_set_up_is_named(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], device: str, words: str
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LeafwardError, match=words), session(device):
        pass


def test_sharding_refuses_unused_parameters() -> None:
    with pytest.raises(UsageError, match="unused_parameters"):
        share(nn.Linear(1, 1), nn.Identity(), "fsdp", Cluster(0, 2), unused_parameters=True)
