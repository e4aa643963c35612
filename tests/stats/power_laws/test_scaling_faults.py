"""Faults of published analyses, each shown on the defective form and shown absent here."""

import numpy as np
import pytest
import scipy.optimize as opt
from scipy.stats import linregress

from leafward.stats.power_laws import fit_joint_law, fit_power_law, fit_width
from leafward.stats.power_laws.huber import DELTA, Objective, fit_huber
from leafward.stats.power_laws.separable import Design

# The 27 models of "Superposition Yields Robust Neural Scaling" (arXiv 2505.10465): OPT, Qwen2.5, GPT-2, Pythia.
FAMILY_WIDTHS = {
    "opt": [768, 1024, 2048, 2560, 4096, 5120, 7168, 9216],
    "qwen": [896, 1536, 2048, 3584, 5120, 5120, 8192],
    "gpt2": [768, 1024, 1280, 1600],
    "pythia": [512, 768, 1024, 2048, 2048, 2560, 4096, 5120],
}
CORPORA = ("wikitext", "pile", "c4", "books")
EXPONENT, COEFFICIENT, RESIDUAL_MSE, SHARED_ERROR = 0.9098, 476.1, 0.0052, 0.8

MODEL_WIDTHS = np.concatenate([np.array(each, dtype=float) for each in FAMILY_WIDTHS.values()])
FAMILY = np.repeat(list(FAMILY_WIDTHS), [len(each) for each in FAMILY_WIDTHS.values()])
M = np.repeat(MODEL_WIDTHS, 4)
MODEL = np.repeat(np.arange(27), 4)
GROUP = np.array([f"{family}/{corpus}" for family in FAMILY for corpus in CORPORA])
OFFSETS = dict(zip(dict.fromkeys(GROUP), np.random.default_rng(1).uniform(1.8, 3.2, 16), strict=True))


def simulate(seed: int) -> np.ndarray:
    """Losses of 27 models on 4 corpora; the corpora of a model share 80 % of the error's variance."""
    rng = np.random.default_rng(seed)
    size = np.sqrt(RESIDUAL_MSE * 108 / (108 - 18))
    shared = np.sqrt(SHARED_ERROR) * rng.standard_normal(27)[MODEL]
    own = np.sqrt(1 - SHARED_ERROR) * rng.standard_normal(108)
    return COEFFICIENT / M**EXPONENT + np.array([OFFSETS[each] for each in GROUP]) + size * (shared + own)


def published_error_bar(loss: np.ndarray, fit) -> float:
    """Offsets held at their fitted values, logarithms of negative differences replaced by 0, one regression."""
    above = loss - np.array([fit.offsets[each] for each in GROUP])
    log_above = np.where(above > 0, np.log(np.maximum(above, 1e-300)), 0.0)
    return float(np.array(linregress(np.log(M), log_above), dtype=float)[4])


def test_cluster_bootstrap_covers_where_bars_with_fixed_offsets_do_not():
    repeats = 200
    covered, covered_published, wider, negative = 0, 0, 0, 0
    for seed in range(repeats):
        loss = simulate(seed)
        fit = fit_width(M, loss, models=MODEL, corpora=GROUP, resamples=120, seed=seed).loss
        bar = published_error_bar(loss, fit)
        covered += EXPONENT in fit.interval
        covered_published += abs(fit.exponent - EXPONENT) <= 1.96 * bar
        wider += fit.interval.standard_error > bar
        negative += bool(np.any(loss < np.array([fit.offsets[each] for each in GROUP])))
    assert negative / repeats > 0.1  # the log of a negative number is no rarity in this design
    assert wider / repeats > 0.9
    assert covered_published / repeats < 0.85
    assert 0.90 <= covered / repeats <= 0.99


def test_rows_that_share_an_error_need_clusters():
    """Taking the 108 rows as independent covers too rarely: the error of a model is common to its corpora."""
    hits = [EXPONENT in fit_power_law(M, simulate(seed), offset=True, groups=GROUP).interval for seed in range(100)]
    assert np.mean(hits) < 0.88


def test_rows_below_the_offset_are_used_as_they_are():
    """Lowering one row below its offset moves the fit as least squares says; a log replaced by 0 would not see it."""
    x = np.geomspace(10, 1000, 10)
    y = 2 / x + 1.0
    y[-1] = 0.97
    fit = fit_power_law(x, y, offset=True, weighting="absolute")
    (c, a, e), _ = opt.curve_fit(lambda x, c, a, e: c * x**-a + e, x, y, p0=(2, 1, 1), xtol=1e-14, ftol=1e-14)
    assert y[-1] < fit.offsets["all"]
    assert (fit.coefficients["all"], fit.exponent, fit.offsets["all"]) == pytest.approx((c, a, e), rel=1e-5)


def chinchilla_like(seed: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    rng = np.random.default_rng(seed)
    table = {"N": rng.uniform(5e7, 1e10, 60), "D": rng.uniform(1e9, 5e11, 60)}
    y = 1.8 + 480 / table["N"] ** 0.35 + 2085 / table["D"] ** 0.37
    return table, y * np.exp(0.01 * rng.standard_t(3, 60))


def chinchilla_design(table: dict[str, np.ndarray]) -> Design:
    log_x = np.log(np.stack(list(table.values()), axis=1))
    return Design(log_x - log_x.mean(axis=0), np.ones((len(log_x), 3)), np.array([0, 1, -1]))


def test_mean_of_small_losses_stops_early_and_our_sum_does_not():
    """The original fit minimised a mean of δ-sized terms, which meets the default tolerance far from the optimum."""
    table, y = chinchilla_like(0)
    design = chinchilla_design(table)
    objective = Objective(design, y)
    scale = DELTA**2 / len(y)

    def small_mean(p):
        value, gradient = objective(p)
        return scale * value, scale * gradient

    early = opt.minimize(small_mean, np.array([-1.0, -1.0, 0.3, 0.5, 0.5]), jac=True, method="L-BFGS-B")
    c, a = fit_huber(design, y)
    assert early.success
    assert objective(np.concatenate([np.log(c), a]))[0] < 0.99 * objective(early.x)[0]


@pytest.mark.parametrize("scale", [1e-4, 1e3])
def test_fits_do_not_depend_on_the_scale_of_the_loss(scale):
    table, y = chinchilla_like(1)
    design = chinchilla_design(table)
    (c, a), (c_scaled, a_scaled) = fit_huber(design, y), fit_huber(design, scale * y)
    np.testing.assert_allclose(a_scaled, a, rtol=1e-4)
    np.testing.assert_allclose(c_scaled, scale * c, rtol=1e-3)
    plain, scaled = fit_joint_law(table, y), fit_joint_law(table, scale * y)
    assert scaled.exponents == pytest.approx(plain.exponents, rel=1e-6)
    assert scaled.offset == pytest.approx(scale * plain.offset, rel=1e-6)


def test_huber_fit_does_not_depend_on_how_often_the_table_is_repeated():
    table, y = chinchilla_like(2)
    _, once = fit_huber(chinchilla_design(table), y)
    repeated = {name: np.tile(x, 3) for name, x in table.items()}
    _, thrice = fit_huber(chinchilla_design(repeated), np.tile(y, 3))
    np.testing.assert_allclose(thrice, once, rtol=1e-4)
