"""A NaN or an infinity stops the run before it spoils anything, and the error says where it came from."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_toys import Toy, ToyConfig, ToyTask, reporting, train_rank
from safetensors.torch import load_file
from torch import nn

from leafward.config import replace
from leafward.engine import LoopConfig, Loss, NonFiniteError, OptimConfig, RunDirectory, train_loop
from ranks import finish, free_port, launch

LOOP = LoopConfig(steps=9, batch_size=4, micro_batch=2, checkpoint_every=2, log_every=3, device="cpu", ema=0.9)


class BadBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * math.inf


class Faulty(nn.Module):
    """An identity that goes wrong in the way that `fault` says, once it is armed."""

    def __init__(self, fault: str):
        super().__init__()
        self.fault, self.armed = fault, False
        self.root = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.armed and self.fault == "output":
            return x / 0.0
        if self.armed and self.fault == "gradient":
            return BadBackward.apply(x)
        if self.armed and self.fault == "parameter gradient":
            return x + self.root.detach().sqrt() + BadBackward.apply(self.root) * 0.0
        return x + 0.0 * self.root


class FaultyTask(ToyTask):
    """Arms its fault in the fifth step (two micro-batches each)."""

    def __init__(self, fault: str):
        super().__init__()
        self.fault, self.calls = fault, 0

    def loss(self, model: Any, batch: dict[str, torch.Tensor]) -> Loss:
        self.calls += 1
        armed = self.calls > 8
        model.blocks[1].dropout.armed = armed
        if armed and self.fault == "batch":
            batch["x"][1, 0, 0] = math.nan
        loss = super().loss(model, batch)
        if armed and self.fault == "loss":
            loss.total = loss.total * math.inf
        if armed and self.fault == "constant loss":
            loss.total = loss.total + math.nan
        if armed and self.fault == "loss gradient":
            loss.total = loss.total + BadBackward.apply(loss.total) * 1.0
        return loss


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("output", "module 'blocks.1.dropout' (Faulty) gave a non-finite output"),
        ("gradient", "module 'blocks.1.dropout' (Faulty) gave a non-finite gradient"),
        ("parameter gradient", "the gradient of parameter 'blocks.1.dropout.root'"),
        ("batch", "the batch itself has a non-finite value in '0.x'"),
        ("loss", "the loss function gave a non-finite value"),
        ("constant loss", "the loss function gave a non-finite value"),
        ("loss gradient", "a non-finite gradient flows back into the output of"),
    ],
)
def test_the_cause_is_named_and_the_last_checkpoint_is_good(tmp_path: Path, fault: str, words: str) -> None:
    torch.manual_seed(0)
    model = Toy()
    model.blocks[1].dropout = Faulty(fault)
    run = RunDirectory.create(tmp_path, {"fault": fault})
    with pytest.raises(NonFiniteError) as caught:
        train_loop(model, FaultyTask(fault), LOOP, OptimConfig(lr=0.05), run)
    error = caught.value
    assert error.step == 5
    assert words in str(error)
    assert "at step 5" in str(error)
    assert error.batch_file is not None
    assert str(error.batch_file) in str(error)
    batch = load_file(error.batch_file)
    assert {name: tuple(tensor.shape) for name, tensor in batch.items()} == {
        "0.x": (2, 4, 6), "0.y": (2, 4), "0.n": (2,), "1.x": (2, 4, 6), "1.y": (2, 4), "1.n": (2,),
    }  # fmt: skip
    # Nothing that is not finite has reached the weights, and the run goes on from its last checkpoint.
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    assert sorted(entry.name for entry in run.checkpoints.iterdir()) == ["step-00000002", "step-00000004"]
    healthy = Toy()
    healthy.blocks[1].dropout = Faulty("none")
    assert train_loop(healthy, ToyTask(), LOOP, OptimConfig(lr=0.05), run).step == 9


def test_a_bad_parameter_is_named(tmp_path: Path) -> None:
    model = Toy()
    with torch.no_grad():
        model.head.bias[2] = math.nan
    with pytest.raises(NonFiniteError, match=r"step 1: the parameter 'head\.bias'"):
        train_loop(model, ToyTask(), LOOP, OptimConfig(), RunDirectory.create(tmp_path, {}))


def test_buffers_are_not_blamed(tmp_path: Path) -> None:
    """The bad step spoils running statistics, and masks hold infinities by right; neither is the cause."""
    model = Toy()
    model.register_buffer("mask", torch.full((2,), -math.inf))
    fault = Faulty("output")
    fault.armed = True
    model.blocks[0].dropout = nn.Sequential(nn.Linear(6, 6), fault, nn.BatchNorm1d(4))
    with pytest.raises(
        NonFiniteError, match=r"step 1: module 'blocks\.0\.dropout\.1' \(Faulty\) gave a non-finite out"
    ):
        train_loop(model, ToyTask(), LOOP, OptimConfig(), RunDirectory.create(tmp_path, {}))


def test_in_place_activations_do_not_hide_the_cause(tmp_path: Path) -> None:
    model = Toy()
    fault = Faulty("gradient")
    fault.armed = True
    model.blocks[1].dropout = nn.Sequential(nn.Linear(6, 6), fault, nn.Linear(6, 6), nn.ReLU(inplace=True))

    with pytest.raises(NonFiniteError, match=r"'blocks\.1\.dropout\.1' \(Faulty\) gave a non-finite gradient"):
        train_loop(model, ToyTask(), LOOP, OptimConfig(), RunDirectory.create(tmp_path, {}))
    assert model.blocks[1].dropout[3].inplace


def test_a_replay_that_cannot_be_still_stops_with_the_step_and_the_batch(tmp_path: Path) -> None:
    model = Toy()
    fault = Faulty("gradient")
    fault.armed = True
    model.blocks[1].dropout = nn.Sequential(fault, Doubled())
    with pytest.raises(NonFiniteError, match=r"(?s)step 1: the replay .* failed .*the batch is in"):
        train_loop(model, ToyTask(), LOOP, OptimConfig(), RunDirectory.create(tmp_path, {}))


class Doubled(nn.Module):
    """Changes its input in place, which backward hooks do not allow."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2.0)


class OneRankBad(ToyTask):
    """The batch of rank 1 is bad in the third step."""

    def __init__(self, rank: int):
        super().__init__()
        self.bad_call = 3 if rank == 1 else -1

    def loss(self, model: Any, batch: dict[str, torch.Tensor]) -> Loss:
        self.bad_call -= 1
        if self.bad_call == 0:
            batch["x"][0, 0, 0] = math.inf
        return super().loss(model, batch)


def train_bad_rank(rank: int, port: int, path: Path, config: ToyConfig) -> None:
    train_rank(rank, 2, port, path, config, False, OneRankBad(rank))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_every_rank_stops_when_one_goes_wrong(tmp_path: Path, strategy: Any) -> None:
    config = ToyConfig()
    config = replace(config, loop=replace(config.loop, strategy=strategy))
    port, outs = free_port(), [tmp_path / f"{rank}.txt" for rank in range(2)]
    ranks = [launch(reporting, outs[rank], train_bad_rank, rank, port, tmp_path / "run", config) for rank in range(2)]
    assert finish(*ranks) == [1, 1]
    for rank, out in enumerate(outs):
        assert "NonFiniteError" in out.read_text()
        assert "at step 3: rank 1: the batch itself has a non-finite value in '0.x'" in out.read_text()
        assert (tmp_path / "run" / f"nonfinite-step-00000003-rank-{rank}.safetensors").is_file()
