"""Random numbers of a micro-batch are rows of what the whole batch would draw at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from timm.layers import DropPath
from torch import Tensor, nn

from leafward.engine.data import DataOrder
from leafward.engine.draws import BatchDraws

BATCH = 8
X = torch.linspace(-1.0, 2.0, BATCH * 3 * 5, dtype=torch.float64).view(BATCH, 3, 5)
CHANCES = torch.rand(BATCH, 3, generator=torch.Generator().manual_seed(1))

DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "randn": lambda x: torch.randn(len(x), 4),
    "randn of a shape": lambda x: torch.randn((len(x), 4), dtype=torch.float64),
    "rand of size": lambda x: torch.rand(size=(len(x), 2)),
    "randn_like": torch.randn_like,
    "rand_like": lambda x: torch.rand_like(x, dtype=torch.float32),
    "normal_": lambda x: torch.empty_like(x).normal_(1.0, std=2.0),
    "uniform_": lambda x: x.new_empty(len(x)).uniform_(-1.0, 3.0),
    "bernoulli_": lambda x: x.new_empty(len(x), 1, 1).bernoulli_(0.3),
    "bernoulli": lambda x: torch.bernoulli(CHANCES[(x[:, 0, 0, None] == X[:, 0, 0]).nonzero()[:, 1]]),
    "dropout": lambda x: F.dropout(x, 0.4),
    "dropout in place": lambda x: F.dropout(x.clone(), 0.4, inplace=True),
    "channels": lambda x: nn.Dropout1d(0.4)(x),
    "stochastic depth": DropPath(0.5),
    "two rows a sample": lambda x: F.dropout(torch.cat([x, -x], dim=1).reshape(2 * len(x), 3, 5), 0.5),
    "several": lambda x: DropPath(0.5)(F.dropout(x, 0.2) + torch.randn_like(x)),
}


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("split", [(1, 1), (1, 4), (2, 4), (4, 2), (2, 1)], ids=str)
def test_any_split_draws_what_the_whole_batch_draws(name: str, split: tuple[int, int]) -> None:
    draw, (world, micro_batch) = DRAWS[name], split
    torch.manual_seed(3)
    whole = draw(X)
    found = torch.zeros_like(whole).unflatten(0, (BATCH, -1))
    order = DataOrder(BATCH, BATCH, 0)
    for rank in range(world):
        for places in order.places(rank, world, micro_batch):
            torch.manual_seed(3)
            with BatchDraws(places, BATCH):
                found[places] = draw(X[places]).unflatten(0, (len(places), -1))
    assert found.unflatten(0, (world, -1)).shape[0] == world
    assert torch.equal(found.flatten(0, 1), whole)
    assert whole.unique().numel() > 1


def test_a_gradient_goes_through_dropout() -> None:
    torch.manual_seed(0)
    x = X.clone().requires_grad_()
    with BatchDraws([2, 5], BATCH):
        y = F.dropout(x[[2, 5]], 0.5)
    y.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad[[2, 5]], (y / X[[2, 5]]).detach())
    assert x.grad[[0, 1, 3, 4, 6, 7]].abs().sum() == 0


def test_what_has_no_dimension_for_samples_is_the_same_for_all() -> None:
    for draw in (lambda: torch.rand(()), lambda: torch.randn(7), lambda: torch.empty(5, 2).uniform_()):
        torch.manual_seed(0)
        expected = draw()
        for places in ([0, 7], [3, 4]):
            torch.manual_seed(0)
            with BatchDraws(places, BATCH):
                assert torch.equal(draw(), expected)


@given(places=st.lists(st.integers(0, BATCH - 1), min_size=1, max_size=BATCH, unique=True), rest=st.integers(0, 3))
def test_nothing_else_changes(places: list[int], rest: int) -> None:
    with BatchDraws(places, BATCH):
        assert F.dropout(X, 0.5, training=False).equal(X)
        assert torch.zeros(len(places), rest).shape == (len(places), rest)
        assert torch.randn(len(places), rest, requires_grad=True).requires_grad


def run_model(model: Any, x: Tensor) -> Tensor:
    return model(x)


@pytest.mark.parametrize("recompute", [False, True])
def test_recomputed_blocks_draw_the_same_again(recompute: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    model = nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.5), nn.Tanh(), nn.Linear(5, 5), nn.Dropout(0.5)).double()
    grads = []
    for part in ([list(range(BATCH))], [[0, 7, 1, 6], [2, 5, 3, 4]]):
        model.zero_grad()
        for places in part:
            torch.manual_seed(0)
            with BatchDraws(places, BATCH):
                x = X[places]
                y = checkpoint(model, x, use_reentrant=False) if recompute else model(x)
                y.square().sum().backward()
        grads.append([parameter.grad.clone() for parameter in model.parameters()])
    for one, two in zip(*grads, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)
