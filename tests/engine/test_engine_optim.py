"""Optimiser parts against closed forms."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from leafward.engine.config import OptimConfig
from leafward.engine.optim import EMA, adamw, parameter_groups, schedule, squared_norm


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.norm = nn.LayerNorm((2, 4))
        self.batch = nn.BatchNorm1d(4)
        self.table = nn.Embedding(5, 3)
        self.position = nn.Parameter(torch.zeros(2, 3))
        self.log_curvature = nn.Parameter(torch.zeros(()))
        self.inner = Child()
        self.frozen = nn.Linear(2, 2).requires_grad_(False)

    def no_weight_decay(self) -> set[str]:
        return {"position", "table"}


class Child(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Parameter(torch.zeros(3, 3))
        self.weight = nn.Parameter(torch.zeros(3, 3))

    def no_weight_decay(self) -> list[str]:
        return ["code"]


def test_only_matrices_that_nobody_spared_are_decayed() -> None:
    model = Parts()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed, plain = parameter_groups(model, 0.1)
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    assert {names[id(p)] for p in decayed["params"]} == {"linear.weight", "inner.weight"}
    assert {names[id(p)] for p in plain["params"]} == {
        "linear.bias",
        "norm.weight",
        "norm.bias",
        "batch.weight",
        "batch.bias",
        "table.weight",
        "position",
        "log_curvature",
        "inner.code",
    }


@given(
    kind=st.sampled_from(["cosine", "linear", "poly", "constant"]),
    warmup=st.integers(0, 30),
    length=st.integers(1, 200),
    ratio=st.floats(0.0, 1.0),
    data=st.data(),
)
def test_schedule_follows_its_closed_form(kind, warmup: int, length: int, ratio: float, data: st.DataObject) -> None:
    total = warmup + length
    factor = schedule(OptimConfig(schedule=kind, warmup_steps=warmup, final_ratio=ratio), total)
    step = data.draw(st.integers(0, total - 1))
    if step < warmup:
        assert factor(step) == pytest.approx((step + 1) / warmup)
        return
    u = (step - warmup) / length
    expected = {
        "cosine": ratio + (1 - ratio) * math.cos(math.pi * u / 2) ** 2,
        "linear": (1 - u) + u * ratio,
        "poly": ratio + (1 - ratio) * (1 - u) ** 0.9,
        "constant": 1.0,
    }[kind]
    assert factor(step) == pytest.approx(expected, abs=1e-12)
    assert factor(warmup) == pytest.approx(1.0)
    assert factor(total) == pytest.approx(1.0 if kind == "constant" else ratio, abs=1e-12)


def test_the_step_schedule_falls_after_epochs_8_and_11_of_12() -> None:
    per_epoch = 7
    factor = schedule(OptimConfig(schedule="step", warmup_steps=3, final_ratio=0.0), 12 * per_epoch)
    epochs = [{round(factor(step), 9) for step in range(e * per_epoch, (e + 1) * per_epoch)} for e in range(1, 12)]
    assert epochs == [{1.0}] * 7 + [{0.1}] * 3 + [{0.01}]
    bounded = schedule(OptimConfig(schedule="step", final_ratio=0.05), 12)
    assert [bounded(step) for step in (0, 8, 11, 12)] == [1.0, 0.1, 0.05, 0.05]


def test_adamw_follows_the_formula_and_a_skipped_step_leaves_no_trace() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    bad = torch.zeros(())
    config = OptimConfig(lr=0.1, betas=(0.8, 0.9), weight_decay=0.3, eps=1e-6)
    optimizer = adamw(model, config, bad)
    weight, m, v = model.weight.detach().clone(), torch.zeros(2, 3).double(), torch.zeros(2, 3).double()
    for t in range(1, 5):
        gradient = torch.randn(2, 3).double()
        # A skipped step in between must not count as a step.
        model.weight.grad = torch.full((2, 3), math.nan).double()
        bad.fill_(1.0)
        optimizer.step()
        bad.fill_(0.0)
        model.weight.grad = gradient.clone()
        optimizer.step()
        m, v = 0.8 * m + 0.2 * gradient, 0.9 * v + 0.1 * gradient**2
        weight = weight - 0.1 * 0.3 * weight
        weight = weight - 0.1 * (m / (1 - 0.8**t)) / ((v / (1 - 0.9**t)).sqrt() + 1e-6)
        torch.testing.assert_close(model.weight.detach(), weight, rtol=1e-10, atol=1e-12)
    assert optimizer.state[model.weight]["step"] == 4
    assert optimizer.state[model.bias]["step"] == 0


def test_squared_norm() -> None:
    torch.manual_seed(0)
    parts = [torch.randn(3, 4), torch.randn(5), torch.randn(()), torch.zeros(0)]
    assert float(squared_norm(parts)) == pytest.approx(sum(float(part.double().square().sum()) for part in parts))


def test_ema_is_the_weighted_sum_and_swaps_without_a_trace() -> None:
    model = nn.Linear(2, 2, bias=False)
    history = [model.weight.detach().clone()]
    ema = EMA(model, 0.7)
    for _ in range(6):
        with torch.no_grad():
            model.weight.add_(torch.randn(2, 2))
        ema.update()
        history.append(model.weight.detach().clone())
    n = len(history) - 1
    expected = 0.7**n * history[0] + sum(0.3 * 0.7 ** (n - k) * history[k] for k in range(1, n + 1))
    before = model.weight.detach().clone()
    with ema.swapped_in():
        torch.testing.assert_close(model.weight.detach(), expected)
    assert torch.equal(model.weight, before)
    torch.testing.assert_close(ema.average["weight"], expected)


def test_a_module_may_have_a_part_of_the_learning_rate() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    model[1].lr_ratio = 0.5  # pyright: ignore[reportArgumentType]
    model[1][1].lr_ratio = 0.2  # pyright: ignore[reportIndexIssue]
    groups = parameter_groups(model, 0.1)
    assert [group.get("lr_ratio", 1.0) for group in groups] == [1.0, 1.0, 0.5, 0.5, 0.1, 0.1]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0] * 3
    assert sum(len(group["params"]) for group in groups) == 6
