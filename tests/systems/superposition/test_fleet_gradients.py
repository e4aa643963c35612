"""Loss and gradient of the packed step against autograd on the dense definition."""

import itertools

import pytest
import torch

from leafward.systems.superposition import frequencies, step
from leafward.systems.superposition.sampler import Stream
from leafward.systems.superposition.step import Layout, Objective

N, B = 60, 48


def dense_loss(x: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor, loss: str) -> torch.Tensor:
    z = x @ weights @ weights.t() + bias
    if loss == "mse":
        return (torch.relu(z) - x).square().sum(1).mean()
    kept = x.sum(1) > 0
    targets = x[kept] / x[kept].sum(1, keepdim=True)
    return torch.nn.functional.cross_entropy(z[kept], targets)


def training_factor(loss: str, scale: float) -> float:
    return scale / N if loss == "mse" else scale


@pytest.fixture(params=["power:1", "power:2", "uniform"])
def batch_of(request):
    def make(dtype: torch.dtype, density: float | None = 1.0):
        p = frequencies(request.param, N, density)
        return next(Stream(p, 3, B, dtype=dtype).training(5, 6))

    return make


@pytest.mark.parametrize("loss", ["mse", "ce"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-6)])
@pytest.mark.parametrize("tile_rows", [7, 1000])
def test_gradient_equals_autograd(monkeypatch, batch_of, loss, dtype, tolerance, tile_rows):
    monkeypatch.setitem(step.TILE_BYTES, "cpu", tile_rows * N * torch.finfo(dtype).bits // 8)
    widths = [3, 3, 8, 17]
    layout = Layout(widths, torch.device("cpu"))
    torch.manual_seed(0)
    packed = torch.randn(N, layout.columns, dtype=dtype) * 0.3
    batch = batch_of(dtype)
    grad, losses = Objective(layout, N, loss, loss_scale=100.0).gradient(packed, batch)
    x = batch.dense().double()
    for k, columns in enumerate(layout.model_columns()):
        joined = packed[:, columns].double().requires_grad_()
        expected = dense_loss(x, joined[:, :-1], joined[:, -1], loss)
        (exact,) = torch.autograd.grad(expected * training_factor(loss, 100.0), joined)
        assert (grad[:, columns] - exact).norm() / exact.norm() < tolerance
        assert abs(float(losses[k]) / expected.item() - 1) < tolerance
    assert Objective(layout, N, loss, 1.0).evaluate(packed, batch).tolist() == pytest.approx(
        [
            float(dense_loss(x, packed[:, c.start : c.stop - 1].double(), packed[:, c.stop - 1].double(), loss))
            for c in layout.model_columns()
        ],
        rel=tolerance,
    )


@pytest.mark.parametrize("loss", ["mse", "ce"])
def test_blocks_of_several_models_as_on_a_gpu(monkeypatch, batch_of, loss):
    """The GPU layout (equal widths in one block, padded columns) gives the CPU layout's numbers."""
    widths = [3, 3, 3, 8, 17, 17]
    plain = Layout(widths, torch.device("cpu"))
    grouped = Layout(widths, torch.device("cpu"), grouped=True)
    assert [b.models.stop - b.models.start for b in grouped.blocks] == [3, 1, 2]
    assert all(block.stride % 4 == 0 for block in grouped.blocks)
    packed = torch.randn(N, plain.columns, dtype=torch.float64)
    padded = torch.zeros(N, grouped.columns, dtype=torch.float64)
    pairs = list(zip(plain.model_columns(), grouped.model_columns(), strict=True))
    for here, there in pairs:
        padded[:, there] = packed[:, here]
    batch = batch_of(torch.float64)
    grad, losses = Objective(plain, N, loss, 1.0).gradient(packed, batch)
    padded_grad, padded_losses = Objective(grouped, N, loss, 1.0).gradient(padded, batch)
    torch.testing.assert_close(losses, padded_losses)
    for here, there in pairs:
        torch.testing.assert_close(grad[:, here], padded_grad[:, there])
    used = set(itertools.chain.from_iterable(range(c.start, c.stop) for _, c in pairs))
    padding = [c for c in range(grouped.columns) if c not in used]
    assert padding
    assert padded_grad[:, padding].abs().max() == 0
    torch.testing.assert_close(plain.norms(packed), grouped.norms(padded))


@pytest.mark.parametrize("loss", ["mse", "ce"])
@pytest.mark.parametrize("first", [None, 1.0])
def test_padding_changes_nothing(loss, first):
    """Also where the padding holds more rows than the batch (p = 1: none is empty)."""
    p = frequencies("power:1", N)
    p[0] = first or p[0]
    layout = Layout([4, 9], torch.device("cpu"))
    packed = torch.randn(N, layout.columns, dtype=torch.float64)
    objective = Objective(layout, N, loss, 1.0)
    plain, padded = (next(Stream(p, 0, 400, pad=pad, dtype=torch.float64).training(0, 1)) for pad in (False, True))
    assert padded.rows > plain.rows
    assert len(padded.cells) > len(plain.cells)
    assert (padded.empty < 0) == (first is not None)
    for one, other in zip(objective.gradient(packed, plain), objective.gradient(packed, padded), strict=True):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(objective.evaluate(packed, plain), objective.evaluate(packed, padded))


@pytest.mark.parametrize("loss", ["mse", "ce"])
def test_copying_buffers_is_enough_to_change_the_batch(loss):
    """What a recorded step relies on: everything that differs between padded batches is in the two buffers."""
    stream = Stream(frequencies("power:1", N), 0, 400, pad=True, dtype=torch.float64)
    first, *others = stream.training(0, 6)
    layout = Layout([4, 4, 9], torch.device("cpu"), grouped=True)
    packed = torch.randn(N, layout.columns, dtype=torch.float64)
    objective = Objective(layout, N, loss, 1.0)
    static = first.clone()
    for batch in others:
        assert static.like(batch)
        static.whole.copy_(batch.whole)
        static.real.copy_(batch.real)
        for one, other in zip(objective.gradient(packed, static), objective.gradient(packed, batch), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("loss", ["mse", "ce"])
def test_batch_without_any_active_feature(loss):
    p = frequencies("uniform", N, density=1e-9)
    batch = next(Stream(p, 0, B, dtype=torch.float64).training(0, 1))
    assert (batch.rows, batch.empty) == (0, B)
    layout = Layout([4], torch.device("cpu"))
    packed = torch.randn(N, layout.columns, dtype=torch.float64)
    objective = Objective(layout, N, loss, 1.0)
    grad, losses = objective.gradient(packed, batch)
    bias = packed[:, -1].relu() if loss == "mse" else torch.zeros(N, dtype=torch.float64)
    assert float(losses) == pytest.approx(float(bias.square().sum()))
    assert float(objective.evaluate(packed, batch)) == pytest.approx(float(losses))
    torch.testing.assert_close(grad[:, -1], 2 * bias / N)
    assert grad[:, :-1].abs().max() == 0


def test_dense_rows_with_p_one(batch_of):
    """Every row active in the first feature: no empty rows, and the loss is still that of the definition."""
    p = frequencies([1.0] + [0.01] * (N - 1), N, density=None)
    batch = next(Stream(p, 0, B, dtype=torch.float64).training(0, 1))
    assert batch.empty == 0
    layout = Layout([5], torch.device("cpu"))
    packed = torch.randn(N, 6, dtype=torch.float64)
    _, losses = Objective(layout, N, "mse", 1.0).gradient(packed, batch)
    assert float(losses) == pytest.approx(float(dense_loss(batch.dense(), packed[:, :5], packed[:, 5], "mse")))
