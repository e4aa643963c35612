"""Measures against brute force on the full Gram matrix."""

import math

import pytest
import torch

from leafward.systems.superposition import Fleet, ModelSpec, frequencies, measures, weak_loss, weak_loss_leading

N, M = 37, 6


@pytest.fixture
def weights() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(N, M, dtype=torch.float64) / M**0.5


def brute_force(rows: torch.Tensor) -> tuple[float, float]:
    units = rows / rows.norm(dim=1, keepdim=True)
    pairs = torch.triu_indices(len(rows), len(rows), 1)
    squared = (units @ units.t())[pairs[0], pairs[1]].square()
    return float(squared.mean()), float(squared.var(correction=0))


@pytest.mark.parametrize("block", [5, 1024])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_squared_overlap(monkeypatch, weights, block, dtype, tolerance):
    monkeypatch.setattr(measures, "GRAM_ROWS", block)
    assert measures.squared_overlap(weights.to(dtype)) == pytest.approx(brute_force(weights), rel=tolerance)


def test_squared_overlap_leaves_out_zero_rows(weights):
    weights[3] = 0
    kept = weights[weights.norm(dim=1) > 0]
    assert measures.squared_overlap(weights) == pytest.approx(brute_force(kept))
    assert all(math.isnan(value) for value in measures.squared_overlap(weights[:1]))


@pytest.mark.parametrize("shape", [(N, M), (8, 6)])
def test_ambiguity_is_the_spectral_norm(shape):
    torch.manual_seed(1)
    weights = torch.randn(shape, dtype=torch.float64)
    target = torch.zeros(shape[0], shape[0], dtype=torch.float64)
    target[: shape[1], : shape[1]] = torch.eye(shape[1])
    expected = torch.linalg.matrix_norm(weights @ weights.t() - target, ord=2)
    assert measures.ambiguity(weights) == pytest.approx(float(expected))
    assert measures.ambiguity(torch.eye(*shape)) == pytest.approx(0.0, abs=1e-12)


def test_describe(weights):
    p = torch.from_numpy(frequencies("power:1", N))
    found = measures.describe(weights, p)
    norms = weights.norm(dim=1)
    represented = int((norms > 0.5).sum())
    assert found["phi_half"] == represented / N
    assert found["phi_one"] == float((norms > 1).double().mean())
    assert 0 < found["phi_one"] < found["phi_half"] < 1
    expected = [norms.mean(), norms.std(correction=0), norms.min(), norms.max()]
    assert [found[f"norm_{name}"] for name in ("mean", "std", "min", "max")] == pytest.approx(
        list(map(float, expected))
    )
    strong = found["strong_overlap_mean"], found["strong_overlap_variance"]
    assert strong == pytest.approx(brute_force(weights[norms > 1]))
    assert found["overlap_mean"] >= found["welch_bound"] > 0
    assert found["weak_loss"] == weak_loss(p, represented)
    assert found["weak_loss_leading"] == weak_loss_leading(p, represented) > found["weak_loss"] > 0


def test_loss_on_fresh_data_agrees_with_a_dense_evaluation():
    fleet = Fleet([ModelSpec(4, -0.5), ModelSpec(7, 0.5)], features=N, batch=256, steps=50, precision="float64")
    fleet.run()
    table = fleet.measure()
    generator = torch.Generator().manual_seed(0)
    p = torch.from_numpy(frequencies("power:1", N))
    x = 2 * torch.rand(100_000, N, generator=generator, dtype=torch.float64)
    x = x * (torch.rand(100_000, N, generator=generator, dtype=torch.float64) < p)
    for index, row in enumerate(table):
        weights, bias = fleet.weights(index)
        losses = (torch.relu(x @ weights @ weights.t() + bias) - x).square().sum(1)
        spread = math.hypot(float(losses.std()) / math.sqrt(len(x)), row["loss_error"])
        assert abs(row["loss"] - float(losses.mean())) < 4 * spread
        assert 0 < row["loss_error"] < 0.02 * row["loss"]
        assert row["loss_floor"] == 0.0


def test_cross_entropy_stays_above_the_entropy_of_its_targets():
    fleet = Fleet([ModelSpec(8, -0.5)], features=N, batch=256, steps=300, loss="ce")
    before = fleet.measure()[0]
    fleet.run()
    after = fleet.measure()[0]
    assert math.isnan(before["train_loss"])
    assert 0 < after["loss_floor"] == before["loss_floor"] < after["loss"] < before["loss"]
