"""Comparison of laws, ranges and extrapolation."""

import numpy as np
import pytest
import scipy.optimize as opt

from leafward.stats.power_laws import choose_range, compare_laws, fit_power_law, fit_ranges, leave_largest_out

X = 2.0 ** np.arange(3, 11)
LAWS = {
    "power": 3 / X**0.7,
    "exponential": 2 * np.exp(-X / 300),
    "logarithmic": 2.0 - 0.25 * np.log(X),
}
# Losses of the large toy models digitised from arXiv 2505.10465, m = 8…1024, with the exponents printed there:
# (losses, hand-chosen first width, exponent, standard error, R²).
PUBLISHED = {
    "strong exponential": ([1.290, 0.941, 0.564, 0.187, 0.114, 0.0461, 0.0334, 0.0102], 8, 1.01, 0.05, 0.984),
    "strong power": ([0.547, 0.414, 0.312, 0.157, 0.0882, 0.029, 0.0307, 0.0088], 32, 0.98, 0.10, 0.963),
    "strong linear": ([1.332, 1.242, 0.956, 0.670, 0.335, 0.166, 0.0752, 0.0554], 32, 0.89, 0.05, 0.987),
    "weak power": ([0.683, 0.880, 0.927, 0.942, 0.681, 0.557, 0.384, 0.267], 64, 0.446, 0.025, 0.991),
}


@pytest.mark.parametrize("truth", LAWS)
@pytest.mark.parametrize("offset", [False, True])
def test_the_true_law_wins(truth, offset):
    rng = np.random.default_rng(0)
    floor = 0.3 if offset and truth != "logarithmic" else 0.0
    y = (LAWS[truth] + floor) * np.exp(0.005 * rng.standard_normal(8))
    result = compare_laws(X, y, offset=offset)
    assert result.best.name == truth
    assert result.verdict.startswith(f"{truth} is favoured over")
    assert "R² alone does not identify" in result.verdict
    assert [each.delta_aicc for each in result.candidates] == sorted(e.delta_aicc for e in result.candidates)
    assert min(result.candidates, key=lambda each: each.bic).name == truth
    assert min(result.candidates, key=lambda each: each.held_out_error).name == truth


@pytest.mark.parametrize("truth", LAWS)
def test_exact_laws_are_recovered_and_predicted(truth):
    best = compare_laws(X, LAWS[truth]).best
    assert best.name == truth
    np.testing.assert_allclose(best.predict(X), LAWS[truth], rtol=1e-8)
    assert best.held_out_error < 1e-6


def test_power_with_offset_equals_a_direct_fit_on_logarithms():
    rng = np.random.default_rng(1)
    y = (3 / X**0.7 + 0.1) * np.exp(0.02 * rng.standard_normal(8))
    power = next(each for each in compare_laws(X, y, offset=True).candidates if each.name == "power")
    (c, a, e), _ = opt.curve_fit(
        lambda x, c, a, e: np.log(c * x**-a + e), X, np.log(y), p0=(3, 0.7, 0.1), xtol=1e-14, ftol=1e-14
    )
    assert power.parameters == pytest.approx({"log_C": np.log(c), "a": a, "E": e}, rel=1e-5)
    rss = np.sum((np.log(y) - np.log(c * X**-a + e)) ** 2)
    assert power.aicc == pytest.approx(8 * np.log(rss / 8) + 8 + 40 / 3, rel=1e-6)
    assert power.bic == pytest.approx(8 * np.log(rss / 8) + 4 * np.log(8), rel=1e-6)


def test_an_exponential_far_from_zero_does_not_overflow():
    x = 1e6 + 1e3 * np.arange(8)
    best = compare_laws(x, np.exp(-0.5 * np.arange(8))).best
    assert best.parameters["r"] == pytest.approx(5e-4)
    assert best.parameters["log_C"] == pytest.approx(500)


def test_high_r_squared_does_not_make_a_power_law():
    """A logarithm over a short range: the power law reaches R² > .98 and is still told to be wrong."""
    x = np.geomspace(10, 100, 12)
    y = (2.0 - 0.3 * np.log(x)) * np.exp(0.003 * np.random.default_rng(2).standard_normal(12))
    result = compare_laws(x, y)
    power = next(each for each in result.candidates if each.name == "power")
    assert power.r_squared > 0.97
    assert result.best.name == "logarithmic"
    assert power.delta_aicc > 10


def test_noise_leaves_laws_undecided():
    x = np.geomspace(10, 20, 6)
    y = 3 / x**0.2 * np.exp(0.05 * np.random.default_rng(3).standard_normal(6))
    assert "are not told apart" in compare_laws(x, y).verdict


def test_a_straight_law_keeps_its_range_at_the_stated_rate():
    kept = [
        choose_range(X, 3 / X * np.exp(0.1 * np.random.default_rng(seed).standard_normal(8))).kept == 8
        for seed in range(400)
    ]
    assert 0.92 <= np.mean(kept) <= 0.98


def test_a_bent_start_is_left_out():
    x = np.geomspace(1, 1000, 16)
    y = 5 / (10 + x) * np.exp(0.01 * np.random.default_rng(4).standard_normal(16))
    choice = choose_range(x, y)
    assert choice.stable
    assert choice.low > 20
    assert choice.high == 1000
    assert abs(choice.fit.exponent - 1) < 0.1 < abs(fit_power_law(x, y).exponent - 1)
    np.testing.assert_allclose(choice.predict(x), choice.fit.predict(x))


def test_a_law_bent_everywhere_is_reported():
    x = np.geomspace(1, 1000, 16)
    choice = choose_range(x, np.exp(-(np.log(x) ** 2) / 10))
    assert not choice.stable
    assert choice.kept == 5
    assert "not straight anywhere" in choice.summary()


def test_an_exact_line_is_straight():
    choice = choose_range(X, 3 / X)
    assert choice.stable
    assert choice.kept == 8


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_exponents_of_the_large_toy_models(name):
    losses, first, exponent, error, r_squared = PUBLISHED[name]
    report = fit_ranges(X, losses, hand=(first, 1024))
    assert report.hand is not None
    assert report.hand.exponent == pytest.approx(exponent, abs=0.006)
    assert report.hand.interval.standard_error == pytest.approx(error, abs=0.006)
    assert report.hand.r_squared == pytest.approx(r_squared, abs=0.0015)
    assert report.automatic.fit.interval.low < exponent < report.automatic.fit.interval.high


def test_automatic_range_finds_the_published_cut_of_the_weak_power_law():
    losses, first, exponent, *_ = PUBLISHED["weak power"]
    report = fit_ranges(X, losses)
    assert report.automatic.low == first
    assert report.automatic.fit.exponent == pytest.approx(exponent, abs=0.001)
    assert report.hand is None


def test_leave_largest_out_of_an_exact_law_and_of_a_wrong_one():
    y = 3 / X + 0.1
    right, wrong = leave_largest_out(X, y, offset=True), leave_largest_out(X, y)
    assert right.x == 1024
    assert right.error < 1e-6
    slope, intercept = np.polyfit(np.log(X[:-1]), np.log(y[:-1]), 1)
    assert wrong.predicted[0] == pytest.approx(np.exp(intercept + slope * np.log(1024)))
    assert wrong.error == pytest.approx(np.log(y[-1] / wrong.predicted[0]))


def test_leave_largest_out_with_groups_holds_out_every_row_at_the_largest_x():
    x, g = np.tile(X, 2), np.repeat(["a", "b"], 8)
    y = 3 / x + np.where(g == "a", 1.0, 2.0)
    result = leave_largest_out(x, y, offset=True, groups=g)
    assert len(result.observed) == 2
    assert result.fit.rows == 14
    assert result.error < 1e-6
