"""The control-variate estimator: unbiased, far better than plain sampling, honest about its error."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch

from leafward.measure.audit_pairs import regression_estimate

ROWS, PROBES, REPEATS = 3000, 128, 300


@cache
def population(shape: str) -> dict[str, np.ndarray]:
    """Per-row means over partners of o², o⁴ and |o|, from the whole Gram matrix."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 48, generator=generator, dtype=torch.float64)
    if shape == "anisotropic":
        x = x * torch.arange(1, 49).pow(-0.7)
    elif shape == "cone":
        x = x * 0.4 + 1
    elif shape == "uneven":  # two groups, one tight: scatter and slope differ between them
        x[: ROWS // 10] = x[: ROWS // 10] * 0.2 + 1
    x = x / x.norm(dim=1, keepdim=True)
    g = (x @ x.T).fill_diagonal_(0)
    return {name: (f.sum(1) / (ROWS - 1)).numpy() for name, f in
            {"square": g**2, "fourth": g**4, "absolute": g.abs()}.items()}  # fmt: skip


def repeats(shape: str, quantity: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(errors of the estimator, its stated errors, errors of the plain mean) over many samples."""
    rows = population(shape)
    truth = rows[quantity].mean()
    generator = np.random.default_rng(0)
    ours, stated, plain = [], [], []
    for _ in range(REPEATS):
        index = generator.choice(ROWS, PROBES, replace=False)
        estimate = regression_estimate(rows[quantity][index], rows["square"][index], rows["square"])
        ours.append(estimate.value - truth)
        stated.append(estimate.error)
        plain.append(rows[quantity][index].mean() - truth)
    return np.array(ours), np.array(stated), np.array(plain)


@pytest.mark.parametrize("shape", ["random", "anisotropic", "cone", "uneven"])
@pytest.mark.parametrize("quantity", ["fourth", "absolute"])
def test_stated_error_covers_the_truth_and_bias_is_small(shape: str, quantity: str) -> None:
    ours, stated, _ = repeats(shape, quantity)
    covered = np.mean(np.abs(ours) <= 1.96 * stated)
    assert 0.90 <= covered <= 0.995
    assert abs(ours.mean()) < 0.25 * ours.std()
    assert 0.8 < np.sqrt(np.mean(stated**2)) / ours.std() < 1.4


@pytest.mark.parametrize(("shape", "gain"), [("anisotropic", 8), ("cone", 20), ("uneven", 8)])
def test_error_is_far_below_that_of_plain_sampling(shape: str, gain: float) -> None:
    ours, _, plain = repeats(shape, "fourth")
    assert plain.std() / ours.std() > gain


def test_a_quadratic_function_of_the_control_is_estimated_without_error() -> None:
    generator = np.random.default_rng(0)
    control = generator.gamma(2.0, size=5000)
    index = generator.choice(5000, 60, replace=False)
    value = 3 - control + 0.5 * control**2
    estimate = regression_estimate(value[index], control[index], control)
    assert estimate.value == pytest.approx(value.mean(), rel=1e-12)
    assert estimate.error < 1e-12
    assert not estimate.exact


def test_all_members_give_the_exact_mean() -> None:
    value = np.random.default_rng(0).normal(size=100)
    estimate = regression_estimate(value, value**2, value**2)
    assert estimate.exact
    assert estimate.error == 0
    assert estimate.value == value.mean()


def test_a_constant_control_falls_back_to_the_plain_mean() -> None:
    value = np.random.default_rng(0).normal(size=50)
    estimate = regression_estimate(value, np.full(50, 0.25), np.full(1000, 0.25))
    assert estimate.value == pytest.approx(value.mean())
    plain = value.std(ddof=1) / np.sqrt(50) * np.sqrt(1 - 50 / 1000)
    assert estimate.error == pytest.approx(plain, rel=0.03)


@pytest.mark.parametrize("count", [0, 1])
def test_too_few_rows_have_no_stated_error(count: int) -> None:
    estimate = regression_estimate(np.ones(count), np.ones(count), np.linspace(0, 1, 30))
    assert np.isnan(estimate.error)
    assert not estimate.exact
