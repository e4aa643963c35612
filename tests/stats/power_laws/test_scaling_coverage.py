"""The 95 % interval that is the default covers the truth in 90–99 % of 200 repeats."""

import numpy as np
import pytest

from leafward.stats.power_laws import fit_joint_law, fit_power_law

WIDTHS = np.array([10, 15, 25, 39, 63, 100.0])
REPEATS = 200


def coverage(hits) -> float:
    hits = np.array(list(hits))
    assert len(hits) == REPEATS
    return float(hits.mean())


def test_plain_law_six_widths_student_t():
    def hit(seed):
        y = 3 / WIDTHS * np.exp(0.1 * np.random.default_rng(seed).standard_normal(6))
        return 1.0 in fit_power_law(WIDTHS, y).interval

    assert 0.90 <= coverage(map(hit, range(REPEATS))) <= 0.99


@pytest.mark.parametrize(("offset", "noise"), [(0.02, 0.03), (0.0, 0.05)])
def test_offset_law_six_widths_profile_likelihood(offset, noise):
    """Also where the offset is zero, the edge of what is allowed."""

    def hit(seed):
        y = (3 / WIDTHS + offset) * np.exp(noise * np.random.default_rng(seed).standard_normal(6))
        return 1.0 in fit_power_law(WIDTHS, y, offset=True).interval

    assert 0.90 <= coverage(map(hit, range(REPEATS))) <= 0.99


def test_shared_exponent_with_offsets_profile_likelihood():
    x, g = np.tile(WIDTHS, 4), np.repeat(np.arange(4), 6)

    def hit(seed):
        rng = np.random.default_rng(seed)
        y = (3 / x + 0.05 * (1 + g)) * np.exp(0.03 * rng.standard_normal(24))
        return 1.0 in fit_power_law(x, y, offset=True, groups=g).interval

    assert 0.90 <= coverage(map(hit, range(REPEATS))) <= 0.99


@pytest.mark.parametrize("seeds", [5, 12])
def test_offset_law_with_few_clusters_bootstrap(seeds):
    """Six widths for each training seed; a seed shifts and tilts its whole curve."""
    x, seed_of = np.tile(WIDTHS, seeds), np.repeat(np.arange(seeds), 6)

    def hit(seed):
        rng = np.random.default_rng(seed)
        shift, tilt = 0.05 * rng.standard_normal(seeds), 0.08 * rng.standard_normal(seeds)
        noise = 0.05 * rng.standard_normal(len(x)) + shift[seed_of] + tilt[seed_of] * np.log(x / 30)
        y = (3 / x + 0.03) * np.exp(noise)
        return 1.0 in fit_power_law(x, y, offset=True, clusters=seed_of, resamples=200, seed=seed).interval

    assert 0.90 <= coverage(map(hit, range(REPEATS))) <= 0.99


def test_joint_law_profile_likelihood():
    n, d = (axis.ravel() for axis in np.meshgrid(np.geomspace(5e7, 1e10, 6), np.geomspace(1e9, 1e12, 6)))

    def hit(seed):
        rng = np.random.default_rng(seed)
        y = (1.7 + 400 / n**0.34 + 410 / d**0.28) * np.exp(0.01 * rng.standard_normal(36))
        fit = fit_joint_law({"n": n, "d": d}, y)
        return 0.34 in fit.intervals["n"], 0.28 in fit.intervals["d"]

    hits = np.array([hit(seed) for seed in range(REPEATS)])
    for variable in hits.T:
        assert 0.90 <= coverage(variable) <= 0.99


def test_percentile_intervals_of_few_clusters_would_not_cover():
    """Why the bootstrap interval uses Student's t and not percentiles."""
    seeds = 5
    x, seed_of = np.tile(WIDTHS, seeds), np.repeat(np.arange(seeds), 6)
    inside, hits = 0, 0
    for seed in range(REPEATS):
        rng = np.random.default_rng(seed)
        tilt = 0.1 * rng.standard_normal(seeds)
        log_y = -np.log(x) + tilt[seed_of] * np.log(x / 30) + 0.02 * rng.standard_normal(len(x))
        slopes = -np.polyfit(np.log(WIDTHS), log_y.reshape(seeds, 6).T, 1)[0]
        draws = slopes[rng.integers(0, seeds, (400, seeds))].mean(axis=1)
        low, high = np.quantile(draws, [0.025, 0.975])
        inside += low <= 1.0 <= high
        hits += 1.0 in fit_power_law(x, np.exp(log_y), clusters=seed_of, resamples=400, seed=seed).interval
    assert inside / REPEATS < 0.90 <= hits / REPEATS <= 0.99
