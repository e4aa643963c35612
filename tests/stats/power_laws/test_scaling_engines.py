"""The two fitting engines against scipy, finite differences and brute force."""

import numpy as np
import pytest
import scipy.optimize as opt
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import f as f_distribution

from leafward.stats.power_laws import fit_joint_law, fit_power_law
from leafward.stats.power_laws.huber import DELTA, Objective, fit_huber
from leafward.stats.power_laws.separable import Design, best_fit, nnls, project

WIDTHS = np.array([10, 15, 25, 39, 63, 100.0])


def joint_design(columns: list[np.ndarray]) -> Design:
    log_x = np.log(np.stack(columns, axis=1))
    q = len(columns)
    return Design(log_x - log_x.mean(axis=0), np.ones((len(log_x), q + 1)), np.array([*range(q), -1]))


def noisy_table(seed: int, noise: float = 0.02) -> tuple[Design, np.ndarray]:
    rng = np.random.default_rng(seed)
    n, d = rng.uniform(1e7, 1e10, 30), rng.uniform(1e9, 1e12, 30)
    y = (1.7 + 400 / n**0.34 + 410 / d**0.28) * np.exp(noise * rng.standard_normal(30))
    return joint_design([n, d]), y


@pytest.mark.parametrize("columns", [1, 2, 5, 17])
def test_nnls_equals_scipy(columns):
    rng = np.random.default_rng(columns)
    a, b = rng.standard_normal((200, 30, columns)), rng.standard_normal((200, 30))
    ours = nnls(np.einsum("pnj,pnk->pjk", a, a), np.einsum("pnj,pn->pj", a, b))
    theirs = np.array([opt.nnls(each, target)[0] for each, target in zip(a, b, strict=True)])
    assert (theirs == 0).any()
    np.testing.assert_allclose(ours, theirs, atol=1e-10)


def test_nnls_leaves_absent_columns_at_zero():
    gram = np.diag([2.0, 0.0, 1.0])[None]
    np.testing.assert_allclose(nnls(gram, np.array([[4.0, 0.0, 3.0]])), [[2.0, 0.0, 3.0]])


def test_projected_slope_gives_the_gradient_of_the_projected_sum_of_squares():
    design, y = noisy_table(0)
    weight = 1 / y[None] ** 2
    a = np.array([0.5, 0.4])

    def rss(at):
        return float(project(design, at[None], y[None], weight).rss[0])

    at = project(design, a[None], y[None], weight)
    gradient = -2 * np.einsum("n,n,nk->k", weight[0], y - at.f[0], at.slope[0])
    numeric = [(rss(a + h) - rss(a - h)) / 2e-5 for h in 1e-5 * np.eye(2)]
    np.testing.assert_allclose(gradient, numeric, rtol=1e-6)


def test_best_fit_equals_scipy_least_squares_over_all_parameters():
    design, y = noisy_table(1, noise=0.003)
    weight = 1 / y[None] ** 2

    def residual(p):
        return (y - p[2] - p[3] * np.exp(-p[0] * design.u[:, 0]) - p[4] * np.exp(-p[1] * design.u[:, 1])) / y

    ours = best_fit(design, y[None], weight)
    assert (ours.c > 0).all()
    theirs = opt.least_squares(residual, [0.3, 0.3, 1.5, 0.3, 0.3], xtol=1e-15, ftol=1e-15, gtol=1e-15)
    assert ours.rss[0] == pytest.approx(2 * theirs.cost, rel=1e-9)
    np.testing.assert_allclose(ours.a[0], theirs.x[:2], rtol=1e-5)


def test_offset_law_with_absolute_errors_equals_curve_fit():
    rng = np.random.default_rng(2)
    y = 3 / WIDTHS**1.1 + 0.05 + 0.002 * rng.standard_normal(6)
    expected, covariance = opt.curve_fit(
        lambda x, c, a, e: c * x**-a + e, WIDTHS, y, p0=(3, 1, 0.05), xtol=1e-14, ftol=1e-14
    )
    fit = fit_power_law(WIDTHS, y, offset=True, weighting="absolute")
    assert fit.exponent == pytest.approx(expected[1], rel=1e-6)
    assert fit.coefficients["all"] == pytest.approx(expected[0], rel=1e-5)
    assert fit.offsets["all"] == pytest.approx(expected[2], rel=1e-5)
    assert fit.interval.standard_error == pytest.approx(np.sqrt(covariance[1, 1]), rel=1e-3)


def test_profile_ends_lie_on_the_likelihood_threshold():
    """At each end, minimising over everything else (by scipy) gives exactly the F threshold."""
    rng = np.random.default_rng(3)
    y = 3 / WIDTHS + 0.05 + 0.003 * rng.standard_normal(6)
    fit = fit_power_law(WIDTHS, y, offset=True, weighting="absolute", level=0.9)

    def rss(a):
        design = np.stack([WIDTHS**-a, np.ones(6)], axis=1)
        return opt.nnls(design, y)[1] ** 2

    threshold = rss(fit.exponent) * (1 + f_distribution.ppf(0.9, 1, 3) / 3)
    assert rss(fit.interval.low) == pytest.approx(threshold, rel=1e-4)
    assert rss(fit.interval.high) == pytest.approx(threshold, rel=1e-4)
    assert fit.interval.low < fit.exponent < fit.interval.high


def test_joint_profile_ends_lie_on_the_likelihood_threshold():
    design, y = noisy_table(4, noise=0.003)
    n, d = np.exp(design.u).T
    fit = fit_joint_law({"n": n, "d": d}, y, weighting="absolute")

    def conditional(a_n):
        def residual(p):
            return y - p[1] - p[2] * n**-a_n - p[3] * d ** -p[0]

        start = [fit.exponents["d"], fit.offset, fit.coefficients["n"], fit.coefficients["d"]]
        return 2 * opt.least_squares(residual, start, xtol=1e-15, ftol=1e-15, gtol=1e-15).cost

    threshold = conditional(fit.exponents["n"]) * (1 + f_distribution.ppf(0.95, 1, 25) / 25)
    for end in fit.intervals["n"]:
        assert conditional(end) == pytest.approx(threshold, rel=1e-4)


def test_an_end_that_the_data_leave_open_is_said_to_be_open():
    rng = np.random.default_rng(0)
    y = (3 / WIDTHS**3 + 2.0) * np.exp(0.01 * rng.standard_normal(6))
    interval = fit_power_law(WIDTHS, y, offset=True).interval
    assert interval.high == pytest.approx(10.0)
    assert interval.method.endswith("open below, open above")
    assert interval.low == pytest.approx(0.01)


def test_huber_gradient_equals_finite_differences():
    design, y = noisy_table(5)
    grouped = Design(
        design.u[:, :1], np.hstack([np.ones((30, 1)), np.eye(3)[np.arange(30) % 3]]), np.array([0, -1, -1, -1])
    )
    rng = np.random.default_rng(5)
    for shape in (design, grouped):
        objective = Objective(shape, y, counts=rng.integers(0, 3, 30).astype(float))
        point = rng.uniform(0.1, 0.6, shape.n_parameters)
        numeric = np.asarray(opt.approx_fprime(point, lambda p, of=objective: of(p)[0], 1e-7))
        np.testing.assert_allclose(objective(point)[1], numeric, rtol=1e-4, atol=1e-2)


def test_huber_objective_is_the_stated_sum():
    design, y = noisy_table(6)
    b, a = np.array([-1.0, -1.2, 0.4]), np.array([0.3, 0.2])
    prediction = np.exp(b[0] - a[0] * design.u[:, 0]) + np.exp(b[1] - a[1] * design.u[:, 1]) + np.exp(b[2])
    r = np.log(y) - np.log(prediction)
    huber = np.where(np.abs(r) <= DELTA, 0.5 * r**2, DELTA * (np.abs(r) - 0.5 * DELTA))
    assert Objective(design, y)(np.concatenate([b, a]))[0] == pytest.approx(huber.sum() / DELTA**2)


def test_huber_is_no_worse_than_the_customary_grid_of_starts():
    design, y = noisy_table(7)
    objective = Objective(design, y)
    c, a = fit_huber(design, y)
    ours = objective(np.concatenate([np.log(c), a]))[0]
    for a0 in (0.25, 0.5, 1.0):
        for e0 in (-1.0, 0.0, 0.5):
            for b0 in (-3.0, -1.0):
                start = np.array([b0, b0, e0, a0, a0])
                found = opt.minimize(objective, start, jac=True, method="L-BFGS-B", options={"maxiter": 5000})
                assert ours <= found.fun * (1 + 1e-6)


def test_huber_ignores_a_bad_row_that_moves_least_squares():
    x = np.geomspace(10, 1000, 12)
    y = 5 / x**0.5 + 0.2
    y[4] *= 1.3
    robust = fit_power_law(x, y, offset=True, method="huber", resamples=100)
    squares = fit_power_law(x, y, offset=True)
    assert abs(robust.exponent - 0.5) < 1e-3 < abs(squares.exponent - 0.5)


@given(scale_x=st.floats(1e-6, 1e9), scale_y=st.floats(1e-6, 1e6))
def test_units_do_not_matter(scale_x, scale_y):
    rng = np.random.default_rng(8)
    y = (3 / WIDTHS + 0.05) * np.exp(0.03 * rng.standard_normal(6))
    plain = fit_power_law(WIDTHS, y, offset=True)
    scaled = fit_power_law(scale_x * WIDTHS, scale_y * y, offset=True)
    assert scaled.exponent == pytest.approx(plain.exponent, rel=1e-6)
    assert scaled.interval.low == pytest.approx(plain.interval.low, rel=1e-5)
    assert scaled.interval.high == pytest.approx(plain.interval.high, rel=1e-5)
    assert scaled.offsets["all"] == pytest.approx(scale_y * plain.offsets["all"], rel=1e-5)
