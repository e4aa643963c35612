"""Intervals against their closed forms."""

from __future__ import annotations

import math

import pytest
from scipy.stats import ttest_1samp

from leafward.intervals import mean_interval, share_interval

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
