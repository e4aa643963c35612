"""The packed optimisers against loops written by hand on dense data, and against torch's own."""

import math
from typing import Any

import pytest
import torch

from leafward.systems.superposition import Fleet, ModelSpec, frequencies
from leafward.systems.superposition.optim import orthogonalise, schedule
from leafward.systems.superposition.sampler import Stream

N, B, STEPS = 40, 64, 24
SETTINGS: dict[str, Any] = {"features": N, "batch": B, "steps": STEPS, "warmup": 0.25, "precision": "float64"}


def data_of(fleet: Fleet, index: int = 0) -> list[torch.Tensor]:
    model = fleet.models[index]
    stream = Stream(frequencies(model.law, N, model.density), model.seed, B, dtype=torch.float64)
    return [batch.dense() for batch in stream.training(0, STEPS)]


def gradients(weights: torch.Tensor, bias: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weights, bias = weights.clone().requires_grad_(), bias.clone().requires_grad_()
    loss = torch.nn.functional.mse_loss(torch.relu(x @ weights @ weights.t() + bias), x)
    grad_weights, grad_bias = torch.autograd.grad(loss, (weights, bias))
    return grad_weights, grad_bias


def decayed(weights: torch.Tensor, rate: float, gamma: float) -> torch.Tensor:
    if gamma >= 0:
        return weights * (1 - rate * gamma)
    norm = weights.norm(dim=1, keepdim=True)
    return weights * (1 + rate * gamma * (1 - 1 / (norm + 1e-8)))


def by_hand(fleet: Fleet, gamma: float, order: str = "gradient, decay, adam", lr: float = 0.01) -> torch.Tensor:
    """AdamW with signed decay; `order` also allows two wrong ones."""
    weights, bias = fleet.weights(0)
    moments = [[torch.zeros_like(t), torch.zeros_like(t)] for t in (weights, bias)]
    for step, x in enumerate(data_of(fleet)):
        rate = lr * schedule(step, STEPS, STEPS // 4)
        if order == "decay, gradient, adam":
            weights = decayed(weights, rate, gamma)
        grads = gradients(weights, bias, x)
        if order == "gradient, decay, adam":
            weights = decayed(weights, rate, gamma)
        updates = []
        for grad, moment in zip(grads, moments, strict=True):
            moment[0] = 0.9 * moment[0] + 0.1 * grad
            moment[1] = 0.999 * moment[1] + 0.001 * grad**2
            corrected = [m / (1 - beta ** (step + 1)) for m, beta in zip(moment, (0.9, 0.999), strict=True)]
            updates.append(rate * corrected[0] / (corrected[1].sqrt() + 1e-8))
        weights, bias = weights - updates[0], bias - updates[1]
        if order == "gradient, adam, decay":
            weights = decayed(weights, rate, gamma)
    return torch.cat([weights, bias[:, None]], dim=1)


def trained(fleet: Fleet) -> torch.Tensor:
    fleet.run()
    weights, bias = fleet.weights(0)
    return torch.cat([weights, bias[:, None]], dim=1)


@pytest.mark.parametrize("gamma", [-1.0, -0.3, 0.0, 0.7])
def test_signed_decay_in_the_order_of_the_experiment(gamma):
    fleet = Fleet([ModelSpec(width=6, decay=gamma)], **SETTINGS)
    expected = by_hand(fleet, gamma)
    wrong = [by_hand(fleet, gamma, order) for order in ("decay, gradient, adam", "gradient, adam, decay")]
    found = trained(fleet)
    assert (found - expected).abs().max() < 1e-12
    if gamma:
        assert all((found - other).abs().max() > 1e-6 for other in wrong)


def test_torch_refuses_the_negative_decay_that_the_fleet_allows():
    with pytest.raises(ValueError):
        torch.optim.AdamW([torch.zeros(1)], weight_decay=-1.0)
    Fleet([ModelSpec(width=3, decay=-1.0)], **SETTINGS).run()


@pytest.mark.parametrize("gamma", [0.0, 0.5])
@pytest.mark.parametrize("optimiser", ["adamw", "sgd"])
def test_against_torch_optimisers(optimiser, gamma):
    lr, bias_lr = (0.02, 0.05) if optimiser == "adamw" else (2.0, 0.5)
    fleet = Fleet([ModelSpec(6, gamma, lr=lr, bias_lr=bias_lr)], optimiser=optimiser, **SETTINGS)
    weights, bias = (t.requires_grad_() for t in fleet.weights(0))
    kind = torch.optim.AdamW if optimiser == "adamw" else torch.optim.SGD
    # torch's SGD has coupled decay only: the decoupled one is applied by hand below.
    groups = [{"params": [weights], "lr": lr, "weight_decay": gamma if optimiser == "adamw" else 0.0}]
    reference = kind([*groups, {"params": [bias], "lr": bias_lr, "weight_decay": 0.0}])
    scheduler = torch.optim.lr_scheduler.LambdaLR(reference, lambda step: schedule(step, STEPS, STEPS // 4))
    for x in data_of(fleet):
        reference.zero_grad()
        torch.nn.functional.mse_loss(torch.relu(x @ weights @ weights.t() + bias), x).backward()
        if optimiser == "sgd":
            with torch.no_grad():
                weights.mul_(1 - reference.param_groups[0]["lr"] * gamma)
        reference.step()
        scheduler.step()
    found = trained(fleet)
    assert (found - torch.cat([weights, bias[:, None]], dim=1)).abs().max() < 1e-12


def test_adam_is_adamw_without_decay():
    one, other = (Fleet([ModelSpec(6)], optimiser=name, **SETTINGS) for name in ("adam", "adamw"))
    assert torch.equal(trained(one), trained(other))


def test_muon_by_hand():
    fleet = Fleet([ModelSpec(6, -0.5, lr=0.02, bias_lr=0.01)], optimiser="muon", **SETTINGS)
    weights, bias = fleet.weights(0)
    momentum, first, second = torch.zeros_like(weights), torch.zeros_like(bias), torch.zeros_like(bias)
    for step, x in enumerate(data_of(fleet)):
        factor = schedule(step, STEPS, STEPS // 4)
        grad_weights, grad_bias = gradients(weights, bias, x)
        weights = decayed(weights, 0.02 * factor, -0.5)
        momentum = 0.95 * momentum + grad_weights
        direction = orthogonalise((grad_weights + 0.95 * momentum)[None])[0]
        weights = weights - 0.02 * factor * math.sqrt(N / 6) * direction
        first, second = 0.9 * first + 0.1 * grad_bias, 0.999 * second + 0.001 * grad_bias**2
        denominator = (second / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8
        bias = bias - 0.01 * factor * first / (1 - 0.9 ** (step + 1)) / denominator
    assert (trained(fleet) - torch.cat([weights, bias[:, None]], dim=1)).abs().max() < 1e-11


@pytest.mark.parametrize("shape", [(50, 8), (8, 50), (20, 20)])
def test_orthogonalise_keeps_singular_vectors_and_levels_singular_values(shape):
    torch.manual_seed(1)
    matrix = torch.randn(3, *shape, dtype=torch.float64) + 0.1
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    inner = left.transpose(1, 2) @ orthogonalise(matrix) @ right.transpose(1, 2)
    diagonal = inner.diagonal(dim1=1, dim2=2)
    assert (inner - torch.diag_embed(diagonal)).abs().max() < 1e-9
    large = values > 0.05 * values.amax(1, keepdim=True)
    assert 0.6 < diagonal[large].min() <= diagonal[large].max() < 1.3


@pytest.mark.parametrize("optimiser", ["adam", "sgd", "muon"])
def test_sphere_constraint_is_the_step_followed_by_normalisation(optimiser):
    settings = SETTINGS | {"optimiser": optimiser}
    fleet = Fleet([ModelSpec(6)], constraint="sphere", **settings)
    start = fleet.weights(0)[0]
    assert (start.norm(dim=1) - 1).abs().max() < 1e-14
    free = Fleet([ModelSpec(6)], **settings)
    free.load_state_dict(fleet.state_dict())
    fleet.run(1)
    free.run(1)
    after = free.weights(0)[0]
    assert (after.norm(dim=1) - 1).abs().max() > 1e-7
    torch.testing.assert_close(fleet.weights(0)[0], after / after.norm(dim=1, keepdim=True))
    fleet.run()
    assert (fleet.weights(0)[0].norm(dim=1) - 1).abs().max() < 1e-14


def test_schedule_rises_linearly_and_falls_to_five_percent():
    factors = [schedule(step, 1000, 100) for step in range(1000)]
    assert factors[:100] == pytest.approx([(step + 1) / 100 for step in range(100)])
    assert factors[100] == 1.0
    assert factors[550] == pytest.approx(0.525)
    assert factors[-1] == pytest.approx(0.05, abs=1e-5)
    assert schedule(0, 10, 0) == 1.0
