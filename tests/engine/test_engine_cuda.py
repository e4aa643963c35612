"""What is different on a GPU: flags read one step late, no waiting for the host, and the same numbers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_toys import Toy, ToyTask
from torch import nn

from leafward.config import replace
from leafward.engine import LoopConfig, Loss, NonFiniteError, OptimConfig, RunDirectory, train_loop

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LOOP = LoopConfig(steps=8, batch_size=8, log_every=1, checkpoint_every=2, ema=0.9, keep_last=4, device="cuda")


def _fit(path: Path, task: ToyTask, loop: LoopConfig = LOOP, resume: bool = False) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    run = RunDirectory.create(path, {}, resume=resume)
    train_loop(Toy(dropout=0.1 if loop.device == "cuda" else 0.0), task, loop, OptimConfig(lr=0.05), run)
    return [{key: value for key, value in line.items() if key != "time"} for line in run.metrics()]


def test_the_numbers_are_those_of_the_cpu(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Toy()
    run = RunDirectory.create(tmp_path / "gpu", {})
    train_loop(model, ToyTask(), LOOP, OptimConfig(lr=0.05), run)
    assert next(model.parameters()).is_cuda
    expected = _fit(tmp_path / "cpu", ToyTask(), replace(LOOP, device="cpu"))
    for line, other in zip(run.metrics(), expected, strict=True):
        line.pop("time", None)
        assert line == pytest.approx(other, abs=1e-4)


def test_a_resumed_run_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    whole = _fit(tmp_path, ToyTask())
    for step in (6, 8):
        shutil.rmtree(tmp_path / "checkpoints" / f"step-{step:08d}")
    assert _fit(tmp_path, ToyTask(), resume=True) == whole


class Failing(ToyTask):
    """Divides by zero in the fifth step and never again, so that only reading in order can blame it."""

    calls = 0

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> Loss:
        self.calls += 1
        if self.calls == 5:
            batch["x"] = batch["x"] / 0.0
        return super().loss(model, batch)


@pytest.mark.parametrize("log_every", [1, 100])
def test_a_bad_step_is_named_though_its_flag_is_read_late(tmp_path: Path, log_every: int) -> None:
    with pytest.raises(NonFiniteError) as caught:
        _fit(tmp_path, Failing(), replace(LOOP, log_every=log_every))
    assert caught.value.step == 5
    assert caught.value.batch_file is not None
    assert sorted(entry.name for entry in (tmp_path / "checkpoints").iterdir()) == ["step-00000002", "step-00000004"]


class Watched(ToyTask):
    """From the third step to the last but one, every implicit wait for the GPU is an error."""

    calls = 0

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> Loss:
        self.calls += 1
        torch.cuda.set_sync_debug_mode("error" if 3 <= self.calls < 8 else "default")
        return super().loss(model, batch)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_step_does_not_wait_for_the_host(tmp_path: Path, precision: Any) -> None:
    try:
        _fit(tmp_path, Watched(), replace(LOOP, log_every=100, checkpoint_every=100, precision=precision))
    finally:
        torch.cuda.set_sync_debug_mode("default")
