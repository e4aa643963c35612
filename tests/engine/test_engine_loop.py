"""The loop in one process: exact accumulation, clipping, early stop, the best weights, precision, compile."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_toys import Toy, ToyConfig, ToyTask, record, train
from torch import nn

from leafward.config import replace
from leafward.engine import Interrupted, LoopConfig, Loss, OptimConfig, RunDirectory, load_published, train_loop
from leafward.engine.blocks import activation_checkpoints, blocks
from leafward.engine.bookkeeping import Best, Guard
from leafward.engine.loop import to_device
from leafward.errors import DataError, UsageError
from leafward.files import write_json

QUIET = LoopConfig(steps=4, batch_size=8, log_every=1, device="cpu")


def _fit(path: Path, loop: LoopConfig, task: Any, optim: OptimConfig | None = None, model: nn.Module | None = None):
    torch.manual_seed(0)
    model = model or Toy()
    run = RunDirectory.create(path, {"loop": loop})
    result = train_loop(model, task, loop, optim or OptimConfig(lr=0.05), run)
    return model, result, [{k: v for k, v in line.items() if k != "time"} for line in run.metrics()]


@pytest.mark.parametrize(("precision", "close"), [("float32", 1e-4), ("float64", 1e-10)])
def test_the_update_is_adamw_on_the_mean_over_all_terms(tmp_path: Path, precision: Any, close: float) -> None:
    """Against a plain loop in float64 on the same samples: one mean over all counted terms, norm clipped."""
    task = ToyTask(noise=0.0)
    optim = OptimConfig(lr=0.05, clip_norm=0.3, warmup_steps=2)
    model, _, lines = _fit(tmp_path, replace(QUIET, micro_batch=2, precision=precision), task, optim)

    from leafward.engine.data import DataOrder
    from leafward.engine.optim import parameter_groups, schedule

    torch.manual_seed(0)
    plain = Toy().double()
    optimizer = torch.optim.AdamW(parameter_groups(plain, optim.weight_decay), lr=1.0, betas=optim.betas, eps=optim.eps)
    order = DataOrder(len(task.dataset), 8, 0)
    for step in range(4):
        chosen = order.indices(step)
        data = task.dataset
        loss = task.loss(plain, {"x": data.x[chosen].double(), "y": data.y[chosen], "n": data.n[chosen]})
        mean = loss.total / loss.count
        optimizer.zero_grad()
        mean.backward()
        norm = torch.cat([parameter.grad.flatten() for parameter in plain.parameters()]).square().sum().sqrt()
        for parameter in plain.parameters():  # not clip_grad_norm_, which divides by the norm + 1e-6
            parameter.grad *= min(1.0, optim.clip_norm / float(norm))
        for group in optimizer.param_groups:
            group["lr"] = optim.lr * schedule(optim, 4)(step)
        optimizer.step()
        assert lines[step]["train/loss"] == pytest.approx(mean.item(), abs=close / 100 + 1e-15)
        assert lines[step]["train/grad_norm"] == pytest.approx(float(norm), rel=close)
        assert lines[step]["train/accuracy"] == pytest.approx(float(loss.metrics["accuracy"] / loss.count))
        assert lines[step]["train/lr"] == pytest.approx(optim.lr * schedule(optim, 4)(step))
        assert float(norm) > optim.clip_norm
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).double(), parameter, rtol=10 * close, atol=close)


def test_a_log_line_is_the_mean_over_its_steps(tmp_path: Path) -> None:
    _, _, each = _fit(tmp_path / "each", replace(QUIET, steps=6), ToyTask())
    _, _, three = _fit(tmp_path / "three", replace(QUIET, steps=6, log_every=3), ToyTask())
    norms = [line["train/grad_norm"] for line in each if "train/loss" in line]
    logged = [line["train/grad_norm"] for line in three if "train/loss" in line]
    assert logged == pytest.approx([sum(norms[:3]) / 3, sum(norms[3:]) / 3])


class Scripted(ToyTask):
    """Evaluations that follow a script."""

    def __init__(self, values: list[float], mode: str):
        super().__init__()
        self.values, self.mode = iter(values), mode
        self.seen: list[torch.Tensor] = []

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        assert not model.training
        self.seen.append(torch.cat([parameter.flatten() for parameter in model.parameters()]))
        return {"loss": next(self.values)}


@pytest.mark.parametrize("ema", [None, 0.8])
def test_early_stop_gives_back_the_best_weights(tmp_path: Path, ema: float | None) -> None:
    loop = replace(QUIET, steps=50, eval_every=2, patience=3, keep_last=1, ema=ema)
    task = Scripted([1.0, 3.0, math.nan, 2.0, 1.0, 9.0], "max")
    model, result, _ = _fit(tmp_path, loop, task)
    assert (result.step, result.best, result.best_step, result.stopped_early) == (10, 3.0, 4, True)
    final = torch.cat([parameter.flatten() for parameter in model.parameters()])
    assert torch.equal(final, task.seen[1])
    assert sorted(entry.name for entry in (tmp_path / "checkpoints").iterdir()) == ["step-00000004", "step-00000010"]


def test_a_stopped_run_stays_stopped(tmp_path: Path) -> None:
    loop = replace(QUIET, steps=50, eval_every=2, patience=1)
    _fit(tmp_path, loop, Scripted([1.0, 2.0, 0.0], "min"))
    run = RunDirectory.create(tmp_path, {"loop": loop}, resume=True)
    result = train_loop(Toy(), Scripted([], "min"), loop, OptimConfig(lr=0.05), run)
    assert (result.step, result.best_step, result.stopped_early) == (4, 2, True)


def test_patience_needs_a_monitor_and_the_monitor_an_evaluation(tmp_path: Path) -> None:
    class Unmonitored(ToyTask):
        monitor = None

    with pytest.raises(UsageError, match="patience"):
        _fit(tmp_path / "a", replace(QUIET, patience=2), Unmonitored())

    class Misspelt(ToyTask):
        monitor = "lss"

    with pytest.raises(UsageError, match=r"'lss'.*did you mean 'loss'"):
        _fit(tmp_path / "b", QUIET, Misspelt())

    class Blind:
        monitor, dataset, loss = "loss", ToyTask().dataset, ToyTask.loss

    with pytest.raises(UsageError, match="monitors 'loss' but has no evaluate"):
        _fit(tmp_path / "c", QUIET, Blind())


def test_an_infinite_evaluation_is_not_the_best_and_a_resumed_run_agrees(tmp_path: Path) -> None:
    """JSON has no infinity, so that a best value of infinity would not be the same after a resume."""
    best = Best("loss", "min", None)
    resumed = Best("loss", "min", None)
    for step, value in enumerate((math.inf, -math.inf, 3.0, math.inf, 2.0)):
        assert best.update(step, {"loss": value}) == resumed.update(step, {"loss": value}) == math.isfinite(value)
        write_json(tmp_path / "best.json", best.state())
        resumed.restore(json.loads((tmp_path / "best.json").read_text()))
    assert best.state() == resumed.state() == {"value": 2.0, "step": 4, "stale": 0}


def test_a_signal_during_the_last_evaluation_is_not_lost(tmp_path: Path) -> None:
    class Late(ToyTask):
        def evaluate(self, model: nn.Module) -> dict[str, float]:
            os.kill(os.getpid(), signal.SIGTERM)
            return super().evaluate(model)

    with pytest.raises(Interrupted, match="SIGTERM after step 4"):
        _fit(tmp_path, QUIET, Late())
    run = RunDirectory.create(tmp_path, {"loop": QUIET}, resume=True)
    assert train_loop(Toy(), ToyTask(), QUIET, OptimConfig(lr=0.05), run).step == 4


def test_data_workers_and_activation_checkpoints_change_nothing(tmp_path: Path) -> None:
    base = ToyConfig(dropout=0.3)
    train(tmp_path / "plain", base)
    expected = record(tmp_path / "plain")
    train(tmp_path / "workers", replace(base, loop=replace(base.loop, workers=2)))
    assert record(tmp_path / "workers") == expected
    train(tmp_path / "recomputed", replace(base, loop=replace(base.loop, checkpoint_activations=True)))
    for line, other in zip(record(tmp_path / "recomputed")[0], expected[0], strict=True):
        assert line == pytest.approx(other, abs=1e-6)


@pytest.mark.slow
def test_compile(tmp_path: Path) -> None:
    _, _, eager = _fit(tmp_path / "eager", QUIET, ToyTask())
    _, _, compiled = _fit(tmp_path / "compiled", replace(QUIET, compile=True), ToyTask())
    for line, other in zip(compiled, eager, strict=True):
        assert line == pytest.approx(other, abs=1e-5)


def test_bfloat16_stays_near_float32_and_keeps_float32_weights(tmp_path: Path) -> None:
    _, _, full = _fit(tmp_path / "full", QUIET, ToyTask())
    model, _, half = _fit(tmp_path / "half", replace(QUIET, precision="bfloat16"), ToyTask())
    losses = [[line["train/loss"] for line in lines if "train/loss" in line] for lines in (full, half)]
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=0.03)
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


def test_activation_checkpoints_by_the_models_own_switch() -> None:
    class Timm(nn.Module):
        def set_grad_checkpointing(self, enable: bool) -> None:
            self.enabled = enable

    class Face(nn.Module):
        options: Any = None

        def gradient_checkpointing_enable(self, options: dict[str, Any]) -> None:
            self.options = options

        def gradient_checkpointing_disable(self) -> None:
            self.options = None

    timm, face = Timm(), Face()
    with activation_checkpoints(timm), activation_checkpoints(face):
        assert timm.enabled
        assert face.options == {"use_reentrant": False}
    assert not timm.enabled
    assert face.options is None


def test_activation_checkpoints_recompute_the_blocks_and_leave_no_trace() -> None:
    model = Toy()
    names = list(model.state_dict())
    calls = 0

    def count(module: nn.Module, inputs: Any) -> None:
        nonlocal calls
        calls += 1

    model.blocks[0].get_submodule("linear").register_forward_pre_hook(count)
    with activation_checkpoints(model):
        model(torch.randn(2, 4, 6)).sum().backward()
        assert calls == 2
        assert list(model.state_dict()) == names
    model(torch.randn(2, 4, 6)).sum().backward()
    assert calls == 3


def test_blocks_are_found() -> None:
    toy = Toy()
    assert blocks(toy) == list(toy.blocks)
    nested = nn.ModuleDict({"a": nn.ModuleList([nn.ModuleList([nn.Linear(1, 1)]), nn.Identity()]), "b": toy})
    assert blocks(nested) == [nested["a"][0][0], *toy.blocks]  # type: ignore[index]
    plain = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Sequential(nn.Linear(1, 1)))
    assert blocks(plain) == [plain[0], plain[2]]

    class Own(nn.Sequential):
        def shard_blocks(self) -> list[nn.Module]:
            return [self[1]]

    own = Own(nn.Linear(1, 1), nn.Linear(1, 1))
    assert blocks(own) == [own[1]]


def test_the_guard_reads_late_and_names_the_first_bad_step() -> None:
    guard = Guard(lag=1)
    flags = [(0, 0), (1, 0), (1, 1)]
    seen = []
    for step, flag in enumerate(flags, 1):
        guard.watch(step, [step], torch.tensor(flag, dtype=torch.float64))
        seen.append((guard.bad, guard.stop))
    assert seen == [(None, False), (None, False), ((2, [2]), False)]
    guard.settle()
    assert (guard.bad, guard.stop) == ((2, [2]), True)


def test_a_data_set_smaller_than_the_batch_works(tmp_path: Path) -> None:
    _, result, lines = _fit(tmp_path, QUIET, ToyTask(size=3))
    assert result.step == 4
    assert all(math.isfinite(line["train/loss"]) for line in lines if "train/loss" in line)


def test_a_batch_without_terms_changes_no_weight_by_its_gradient(tmp_path: Path) -> None:
    class Empty(ToyTask):
        def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> Loss:
            return Loss(model(batch["x"]).sum() * 0.0, 0)

    model, _, lines = _fit(tmp_path, replace(QUIET, steps=1), Empty(), OptimConfig(lr=0.05, weight_decay=0.0))
    torch.manual_seed(0)
    for name, parameter in Toy().named_parameters():
        assert torch.equal(parameter, model.get_parameter(name))
    assert lines[0]["train/loss"] == 0.0


def test_frozen_parameters_stay(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Toy()
    model.blocks.requires_grad_(False)
    before = model.blocks[0].linear.weight.detach().clone()
    head = model.head.weight.detach().clone()
    _fit(tmp_path, replace(QUIET, ema=0.5), ToyTask(), model=model)
    assert torch.equal(model.blocks[0].linear.weight, before)
    assert not torch.equal(model.head.weight, head)
    with pytest.raises(UsageError, match="no parameter to train"):
        _fit(tmp_path / "all", QUIET, ToyTask(), model=model.requires_grad_(False))


def test_wrong_losses_are_refused(tmp_path: Path) -> None:
    class Mean(ToyTask):
        def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
            return model(batch["x"]).mean()

    class Detached(ToyTask):
        def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> Loss:
            return Loss((batch["x"].sum() * torch.ones((), requires_grad=True)), 1)

    class Fickle(ToyTask):
        def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> Loss:
            self.calls = getattr(self, "calls", 0) + 1
            return Loss(model(batch["x"]).sum(), 1, {f"metric{self.calls}": torch.ones(())})

    for number, (task, words) in enumerate(
        [(Mean(), "must return a Loss"), (Detached(), "no parameter.*gradient"), (Fickle(), "keep the same names")]
    ):
        with pytest.raises(UsageError, match=words):
            _fit(tmp_path / str(number), QUIET, task)


class Tied(Toy):
    """Two blocks with one weight, a buffer that follows the data, and a convolution stored channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(6)
        self.blocks[1].linear.weight = self.blocks[0].linear.weight
        self.convolution = nn.Conv2d(6, 6, 2).to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.batch_norm(x.transpose(1, 2))
        x = x + self.convolution(nn.functional.pad(x[..., None], (1, 0, 1, 0)))[..., 0]
        return super().forward(x.transpose(1, 2))


def test_buffers_tied_weights_and_strides_survive_a_resume(tmp_path: Path) -> None:
    loop = replace(QUIET, steps=6, checkpoint_every=2, keep_last=3)
    whole, _, lines = _fit(tmp_path, loop, ToyTask(), model=Tied())
    # Take the last checkpoints away, as if the run had been killed before them.
    for step in (4, 6):
        shutil.rmtree(tmp_path / "checkpoints" / f"step-{step:08d}")
    resumed = Tied()
    run = RunDirectory.create(tmp_path, {"loop": loop}, resume=True)
    train_loop(resumed, ToyTask(), loop, OptimConfig(lr=0.05), run)
    assert [{k: v for k, v in line.items() if k != "time"} for line in run.metrics()] == lines
    assert resumed.blocks[1].linear.weight is resumed.blocks[0].linear.weight
    for name, tensor in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], tensor), name


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    _fit(tmp_path, QUIET, ToyTask())

    def resume() -> None:
        run = RunDirectory.create(tmp_path, {"loop": QUIET}, resume=True)
        train_loop(Toy(), ToyTask(), QUIET, OptimConfig(lr=0.05), run)

    good = (tmp_path / "metrics.jsonl").read_text()
    for line in ("[1]", '{"train/loss": 1.0}'):
        (tmp_path / "metrics.jsonl").write_text(f"{good}{line}\n")
        with pytest.raises(DataError, match=r"metrics\.jsonl: line 6 is not the record of a step"):
            resume()
    (tmp_path / "metrics.jsonl").write_text(good)
    manifest = tmp_path / "checkpoints" / "step-00000004" / "manifest.json"
    # As of another loop's checkpoint: with version 1 nothing but the sizes is compared.
    read = {name: value for name, value in json.loads(manifest.read_text()).items() if name not in ("hashes", "seal")}
    manifest.write_text(json.dumps(read | {"version": 1, "state": {}}))
    with pytest.raises(DataError, match=r"step-00000004 is not a checkpoint of this loop.*'window'"):
        resume()


def test_to_device_reaches_into_containers() -> None:
    from collections import namedtuple

    Pair = namedtuple("Pair", "a b")

    @dataclass(frozen=True, slots=True)
    class Sample:
        a: torch.Tensor
        size: int = field(init=False, default=2)

    batch = {"x": [torch.ones(2), "text"], "y": Pair(torch.zeros(1), 3), "z": (Sample(torch.ones(1)),)}
    moved = to_device(batch, torch.device("meta"))
    assert moved["z"][0].a.is_meta
    assert moved["z"][0].size == 2
    assert not batch["z"][0].a.is_meta
    assert moved["x"][0].is_meta
    assert moved["x"][1] == "text"
    assert moved["y"].a.is_meta
    assert moved["y"].b == 3


def test_published_weights_are_those_of_the_result(tmp_path: Path) -> None:
    train(tmp_path / "run", ToyConfig())
    config, tensors = load_published(tmp_path / "run" / "model")
    model = Toy()
    model.load_state_dict(tensors)
    model.eval()
    assert config["loop"]["batch_size"] == 8
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    with torch.no_grad():
        assert ToyTask().evaluate(model)["loss"] == pytest.approx(result["best"], abs=1e-6)
