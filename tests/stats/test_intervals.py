"""Intervals against their closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import spearmanr, ttest_1samp

from leafward.stats.intervals import mean_interval, rank_correlation_interval, share_interval

Z = 1.959963984540054


@pytest.mark.parametrize(
    ("count", "total"), [(0, 7), (3, 10), (10, 10), (57, 60), (0, 10), (7, 10), (333, 1000), (12, 341)]
)
def test_share_interval_is_wilsons(count, total):
    share = count / total
    centre = (share + Z**2 / (2 * total)) / (1 + Z**2 / total)
    reach = Z / (1 + Z**2 / total) * math.sqrt(share * (1 - share) / total + Z**2 / (4 * total**2))
    assert share_interval(count, total) == pytest.approx((centre - reach, centre + reach), abs=1e-6)


def test_mean_interval_is_students():
    values = [0.3, 0.5, 0.9, 1.4]
    expected = ttest_1samp(values, 0.0).confidence_interval(0.95)
    mean, interval = mean_interval(values)
    assert mean == pytest.approx(sum(values) / 4)
    assert interval == pytest.approx((expected.low, expected.high))
    assert mean_interval([1.0]) == (1.0, None)


def test_what_a_mean_cannot_be_is_cut_off_and_nothing_else():
    values = [0.9, 0.99, 1.0]
    _, whole = mean_interval(values)
    assert whole is not None
    assert whole[1] > 1.0
    assert mean_interval(values, 0.0, 1.0)[1] == (whole[0], 1.0)
    assert mean_interval([-value for value in values], -1.0)[1] == (-1.0, -whole[0])
    assert mean_interval([0.4, 0.5, 0.6], 0.0, 1.0) == mean_interval([0.4, 0.5, 0.6])


def test_cutting_keeps_the_coverage():
    """Of accuracies near 1, three seeds each: whatever the interval covers, the part that can be covers as well."""
    rng, true = np.random.default_rng(0), 0.97
    whole, cut = 0, 0
    for _ in range(300):
        values = rng.binomial(50, true, size=3) / 50
        low, high = mean_interval(values)[1] or (0, 0)
        whole += low <= true <= high
        low, high = mean_interval(values, 0.0, 1.0)[1] or (0, 0)
        assert 0.0 <= low <= high <= 1.0
        cut += low <= true <= high
    assert whole == cut > 0.85 * 300


def test_rank_correlation_interval_covers():
    """Of 400 samples of 60 pairs, 95 % intervals hold the true ρ_s = 6/π asin(r/2) about as often as they say."""
    rng, r = np.random.default_rng(0), 0.5
    true = 6 / math.pi * math.asin(r / 2)
    covered = 0
    for _ in range(400):
        x = rng.normal(size=60)
        found = float(spearmanr(x, r * x + math.sqrt(1 - r**2) * rng.normal(size=60))[0])  # pyright: ignore[reportArgumentType]
        interval = rank_correlation_interval(found, 60)
        assert interval is not None
        assert interval[0] < found < interval[1]
        covered += interval[0] < true < interval[1]
    assert 0.91 <= covered / 400 <= 0.985
    assert rank_correlation_interval(0.5, 3) is None
    assert rank_correlation_interval(1.0, 60) is None
