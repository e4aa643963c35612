"""Refit of the Chinchilla points, as read off the published figure."""

import csv

import numpy as np
import pytest

from leafward.stats.power_laws import fit_joint_law, fit_power_law

# Table A9 of Hoffmann et al. (2022): millions of parameters, d_model, key size, heads, layers.
SHAPES = np.array(
    """44 512 64 8 8, 57 576 64 9 9, 74 640 64 10 10, 90 640 64 10 13, 106 640 64 10 16, 117 768 64 12 12,
    140 768 64 12 15, 163 768 64 12 18, 175 896 64 14 14, 196 896 64 14 16, 217 896 64 14 18, 251 1024 64 16 16,
    278 1024 64 16 18, 306 1024 64 16 20, 425 1280 128 10 18, 489 1280 128 10 21, 509 1408 128 11 18,
    552 1280 128 10 24, 587 1408 128 11 21, 632 1536 128 12 19, 664 1408 128 11 24, 724 1536 128 12 22,
    816 1536 128 12 25, 893 1792 128 14 20, 1018 1792 128 14 23, 1143 1792 128 14 26, 1266 2048 128 16 22,
    1424 2176 128 17 22, 1429 2048 128 16 25, 1593 2048 128 16 28, 1609 2176 128 17 25, 1731 2304 128 18 24,
    1794 2176 128 17 28, 2007 2304 128 18 28, 2283 2304 128 18 32, 2298 2560 128 20 26, 2639 2560 128 20 30,
    2980 2560 128 20 34, 3530 2688 128 22 36, 3802 2816 128 22 36, 4084 2944 128 22 36, 4516 3072 128 24 36,
    6796 3584 128 28 40, 9293 4096 128 32 42, 11452 4352 128 32 47, 12295 4608 128 36 44, 12569 4608 128 32 47,
    13735 4864 128 32 47, 14940 4992 128 32 49, 16183 5120 128 40 47""".replace(",", "").split(),
    dtype=float,
).reshape(-1, 5)


def test_shapes_agree_with_their_parameter_counts():
    """Five attention matrices (with the relative-position one), two feed-forward ones, 32,000 embeddings."""
    millions, d, key, heads, layers = SHAPES.T
    count = (5 * d * key * heads + 8 * d**2) * layers + 32_000 * d
    np.testing.assert_allclose(count / 1e6, millions, rtol=0.01)


@pytest.fixture(scope="module")
def points(shared_data):
    """N, D, m, depth and loss of 245 runs, lowest loss first."""
    path = shared_data / "scaling_tables" / "chinchilla_svg_extracted_data.csv"
    if not path.is_file():
        pytest.skip("the Chinchilla points are not on this machine")
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    n, flop, loss = (np.array([float(row[name]) for row in rows]) for name in ("Model Size", "Training FLOP", "loss"))
    shape = np.abs(np.log(n[:, None] / (1e6 * SHAPES[:, 0]))).argmin(axis=1)
    assert np.abs(np.log(n / (1e6 * SHAPES[shape, 0]))).max() < 0.01
    order = np.argsort(loss)
    table = {"N": n, "D": flop / (6 * n), "m": SHAPES[shape, 1], "depth": SHAPES[shape, 4], "loss": loss}
    return {name: column[order] for name, column in table.items()}


def refit(points, names: tuple[str, ...], rows: int):
    variables = {name: points[name][:rows] for name in names}
    return fit_joint_law(variables, points["loss"][:rows], method="huber", resamples=200)


def test_replication_of_besiroglu(points):
    """Besiroglu et al. (2404.10102), 240 points: α = .3478 ± .02, β = .3658 ± .02, E = 1.8172, A = 482, B = 2085."""
    fit = refit(points, ("N", "D"), 240)
    assert fit.exponents == pytest.approx({"N": 0.3478, "D": 0.3658}, abs=0.003)
    assert fit.offset == pytest.approx(1.8172, abs=0.005)
    assert fit.coefficients == pytest.approx({"N": 482, "D": 2085}, rel=0.05)
    assert fit.intervals["N"].standard_error == pytest.approx(0.02, rel=0.4)
    assert fit.intervals["D"].standard_error == pytest.approx(0.02, rel=0.4)


def test_law_in_parameters_and_data_without_the_40_highest_losses(points):
    fit = refit(points, ("N", "D"), 205)
    assert fit.exponents["N"] == pytest.approx(0.375, abs=0.014)
    assert fit.exponents["D"] == pytest.approx(0.295, abs=0.026)


@pytest.mark.parametrize("method", ["huber", "varpro"])
def test_law_in_width_depth_and_data_without_the_40_highest_losses(points, method):
    """Published refit: .92 ± .05 in width, 1.32 ± .22 in depth, .30 ± .02 in data, E = 1.74."""
    variables = {name: points[name][:205] for name in ("m", "depth", "D")}
    fit = fit_joint_law(variables, points["loss"][:205], method=method, interval="bootstrap", resamples=200)
    for name, exponent, error in (("m", 0.92, 0.05), ("depth", 1.32, 0.22), ("D", 0.30, 0.02)):
        combined = np.hypot(error, fit.intervals[name].standard_error)
        assert abs(fit.exponents[name] - exponent) < combined
        assert exponent in fit.intervals[name]
    assert fit.offset == pytest.approx(1.74, abs=0.02)


def test_parameters_grow_as_width_to_the_five_halves(points):
    m, n = np.unique(np.stack([points["m"], points["depth"]], axis=1), axis=0, return_index=True)
    assert len(n) == 43
    fit = fit_power_law(m[:, 0], points["N"][n])
    assert -fit.exponent == pytest.approx(2.50, abs=0.03)
    assert fit.interval.standard_error == pytest.approx(0.03, abs=0.01)
