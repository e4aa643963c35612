"""The claims of the paper in small: n = 200, three widths, 4000 steps."""

from typing import Any

import numpy as np
import pytest

from leafward.systems.superposition import Fleet, ModelSpec

WIDTHS, STRONG, WEAK = (6, 12, 24), -1.0, 0.556


@pytest.fixture(scope="module")
def table() -> list[dict[str, Any]]:
    models = [
        ModelSpec(width, decay, law=f"power:{alpha}")
        for alpha in (1, 2)
        for decay in (STRONG, WEAK)
        for width in WIDTHS
    ]
    fleet = Fleet(models, features=200, batch=256, steps=4000)
    fleet.run()
    return fleet.measure()


def rows(table: list[dict[str, Any]], alpha: int, decay: float) -> list[dict[str, Any]]:
    return [row for row in table if row["law"] == f"power:{alpha}" and row["decay"] == decay]


def exponent(table: list[dict[str, Any]], alpha: int, decay: float) -> float:
    chosen = rows(table, alpha, decay)
    slope, _ = np.polyfit(np.log([row["width"] for row in chosen]), np.log([row["loss"] for row in chosen]), 1)
    return -float(slope)


pytestmark = pytest.mark.slow


@pytest.mark.parametrize("alpha", [1, 2])
def test_decay_sets_the_degree_of_superposition(table, alpha):
    assert all(row["phi_half"] >= 0.99 for row in rows(table, alpha, STRONG))
    for row in rows(table, alpha, WEAK):
        assert row["width"] / 400 <= row["phi_half"] <= 2.5 * row["width"] / 200


def test_strong_superposition_scales_faster_than_weak(table):
    assert exponent(table, 1, STRONG) == pytest.approx(1.0, abs=0.25)
    assert exponent(table, 2, STRONG) == pytest.approx(2.0, abs=0.6)
    assert exponent(table, 2, WEAK) == pytest.approx(1.0, abs=0.5)
    for alpha in (1, 2):
        assert exponent(table, alpha, STRONG) > exponent(table, alpha, WEAK) + 0.3


def test_strong_rows_overlap_like_random_vectors(table):
    """Mean squared overlap of rows with norm > 1 falls as 1/m, near the Welch bound of that many vectors."""
    for row in rows(table, 1, STRONG)[1:]:
        assert row["width"] * row["strong_overlap_mean"] == pytest.approx(1.0, abs=0.25)
        assert row["strong_overlap_mean"] >= row["strong_welch_bound"]
        assert row["strong_overlap_variance"] < row["random_overlap_variance"]


def test_weak_loss_lies_on_or_above_its_theory(table):
    for alpha in (1, 2):
        for row in rows(table, alpha, WEAK):
            assert row["loss"] >= 0.95 * row["weak_loss"]
