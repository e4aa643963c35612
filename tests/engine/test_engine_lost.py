"""A rank that is lost or late is named as such, with the setting; the first rank alone may work for longer."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_toys import ToyConfig, ToyTask, reporting, train
from torch import nn

from leafward.config import checked, replace
from leafward.engine import LoopConfig, RankLostError, session
from leafward.engine.distributed import _broken_connection
from leafward.errors import LeafwardError, UsageError
from ranks import finish, started

CONFIG = ToyConfig()


class Failing(ToyTask):
    """On the second rank, the third step never ends, or the process dies in it."""

    def __init__(self, dies: bool) -> None:
        super().__init__()
        self.dies, self.calls = dies, 0

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
        self.calls += 1
        if self.calls == 3 and os.environ["RANK"] == "1":
            if self.dies:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(30)
        return super().loss(model, batch)


def _report(folder: Path, target: Any, *arguments: Any) -> None:
    reporting(folder / f"{os.environ['RANK']}.txt", target, *arguments)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("dies", [True, False], ids=["dead", "late"])
def test_a_lost_rank_is_named_with_the_setting(tmp_path: Path, strategy: Any, dies: bool) -> None:
    config = replace(CONFIG, loop=replace(CONFIG.loop, strategy=strategy, timeout=2.0))
    ranks = started(2, _report, tmp_path, train, tmp_path / "run", config, False, Failing(dies))
    assert finish(ranks[0]) == [1]
    ranks[1].kill()
    said = (tmp_path / "0.txt").read_text()
    assert said.startswith("RankLostError: rank 0 of 2 has lost another rank")
    assert "loop.timeout = 2 seconds" in said
    assert "--resume" in said
    assert "\n" not in said
    finish(*ranks)


def _first_works(folder: Path, seconds: float) -> None:
    with session("cpu", timeout=1.0) as cluster:
        found = cluster.on_main(lambda: (time.sleep(seconds), 5)[1])
        (folder / f"{cluster.rank}").write_text(str([found, *cluster.gather(cluster.rank)]))


def test_ranks_wait_for_the_first_longer_than_the_time_out(tmp_path: Path) -> None:
    assert finish(*started(2, _first_works, tmp_path, 3.0)) == [0, 0]
    assert [(tmp_path / name).read_text() for name in "01"] == ["[5, 0, 1]"] * 2


def _one_joins_late(folder: Path) -> None:
    if os.environ["RANK"] == "1":
        time.sleep(2.0)
    with session("cpu", timeout=0.5) as cluster:
        (folder / f"{cluster.rank}").write_text(str(cluster.gather(cluster.rank)))


def test_a_rank_that_is_started_late_is_waited_for(tmp_path: Path) -> None:
    """The time-out is for the steps of a training; on a loaded machine two processes may start far apart."""
    assert finish(*started(2, _one_joins_late, tmp_path)) == [0, 0]
    assert [(tmp_path / name).read_text() for name in "01"] == ["[0, 1]"] * 2


def _first_dies(folder: Path) -> None:
    def action() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with session("cpu") as cluster:
        cluster.on_main(action)


def test_ranks_that_wait_for_the_first_know_when_it_dies(tmp_path: Path) -> None:
    assert finish(*started(2, _report, tmp_path, _first_dies, tmp_path), seconds=60) == [-signal.SIGKILL, 1]
    assert (tmp_path / "1.txt").read_text().startswith("RankLostError: rank 1 of 2 has lost another rank")


def _another_error() -> None:
    with session("cpu") as cluster:
        raise ValueError(f"of rank {cluster.rank}")


def test_other_errors_stay_what_they_are(tmp_path: Path) -> None:
    assert finish(*started(2, _report, tmp_path, _another_error)) == [1, 1]
    assert (tmp_path / "1.txt").read_text() == "ValueError: of rank 1"
    assert _broken_connection(RuntimeError("shapes do not match")) is None
    assert issubclass(RankLostError, LeafwardError)


@pytest.mark.parametrize("timeout", [0.0, -1.0])
def test_a_time_out_is_positive(timeout: float) -> None:
    with pytest.raises(UsageError, match="timeout must be a finite number > 0"):
        checked(LoopConfig, {"timeout": timeout})
