"""Known laws without noise are recovered to 1e-6; results predict, explain themselves and turn into JSON."""

import json
import subprocess
import sys

import numpy as np
import pytest
from scipy.stats import linregress

import leafward.stats.power_laws as scaling
from leafward.stats.power_laws import fit_joint_law, fit_power_law, fit_width

WIDTHS = np.array([10, 15, 25, 39, 63, 100.0])
METHODS = ("varpro", "huber")


def options(method: str) -> dict:
    return {"method": method, **({"resamples": 100} if method == "huber" else {})}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("scale", [1e-300, 1e-160, 1e160, 1e300])
def test_the_unit_of_y_does_not_matter(method, scale):
    fit = fit_power_law(WIDTHS, scale * (3.0 / WIDTHS**0.8 + 0.2), offset=True, **options(method))
    assert fit.exponent == pytest.approx(0.8, abs=1e-6)
    assert fit.coefficients["all"] == pytest.approx(3.0 * scale, rel=1e-5)
    assert fit.offsets["all"] == pytest.approx(0.2 * scale, rel=1e-5)


@pytest.mark.parametrize("exponent", [-0.7, 0.02, 1.0, 2.3])
def test_plain_law(exponent):
    fit = fit_power_law(WIDTHS, 3.0 / WIDTHS**exponent)
    assert fit.method == "ols"
    assert fit.exponent == pytest.approx(exponent, abs=1e-9)
    assert fit.coefficients["all"] == pytest.approx(3.0, rel=1e-9)
    assert fit.interval.high - fit.interval.low < 1e-6


@pytest.mark.parametrize(
    ("method", "offset", "exponent"),
    [("huber", 0.02, 0.3), ("huber", 2.0, 2.1), *(("varpro", e, a) for e in (0.0, 0.01, 2.0) for a in (0.3, 1.0, 2.1))],
)
def test_offset_law(method, offset, exponent):
    fit = fit_power_law(WIDTHS, 3.0 / WIDTHS**exponent + offset, offset=True, **options(method))
    assert fit.exponent == pytest.approx(exponent, abs=1e-6)
    assert fit.coefficients["all"] == pytest.approx(3.0, rel=1e-5)
    assert fit.offsets["all"] == pytest.approx(offset, abs=1e-6)
    assert fit.exponent in fit.interval


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("coefficient", ["shared", "group"])
def test_groups_share_the_exponent(method, coefficient):
    x, g = np.tile(WIDTHS, 3), np.repeat(["pile", "c4", "books"], 6)
    scale = {"shared": np.full(3, 4.0), "group": np.array([4.0, 5.0, 7.0])}[coefficient]
    offset = np.array([2.0, 2.5, 1.7])
    y = np.repeat(scale, 6) / x**0.8 + np.repeat(offset, 6)
    fit = fit_power_law(x, y, offset=True, groups=g, coefficient=coefficient, **options(method))
    assert fit.exponent == pytest.approx(0.8, abs=1e-6)
    np.testing.assert_allclose(list(fit.offsets.values()), offset, rtol=1e-5)
    np.testing.assert_allclose(list(fit.coefficients.values()), np.unique(scale), rtol=1e-4)
    np.testing.assert_allclose(fit.predict(x, g), y, rtol=1e-6)


def test_groups_without_offset_equal_a_regression_with_group_intercepts():
    rng = np.random.default_rng(0)
    x, g = np.tile(WIDTHS, 2), np.repeat([0, 1], 6)
    y = np.where(g == 0, 2.0, 9.0) / x**0.6 * np.exp(1e-4 * rng.standard_normal(12))
    fit = fit_power_law(x, y, groups=g, coefficient="group")
    design = np.stack([-np.log(x), g == 0, g == 1], axis=1).astype(float)
    expected = np.linalg.lstsq(design, np.log(y), rcond=None)[0]
    # Relative and logarithmic residuals agree to second order in the noise.
    assert fit.exponent == pytest.approx(expected[0], abs=1e-7)
    assert fit.offsets == {}


@pytest.mark.parametrize("method", METHODS)
def test_joint_law_in_three_variables(method):
    rng = np.random.default_rng(1)
    table = {
        "m": rng.uniform(100, 5000, 60),
        "depth": rng.uniform(4, 48, 60),
        "data": rng.uniform(1e9, 1e12, 60),
    }
    y = 1.7 + 90 / table["m"] ** 0.9 + 3 / table["depth"] ** 1.2 + 500 / table["data"] ** 0.3
    fit = fit_joint_law(table, y, **options(method))
    assert fit.exponents == pytest.approx({"m": 0.9, "depth": 1.2, "data": 0.3}, abs=1e-6)
    assert fit.coefficients == pytest.approx({"m": 90, "depth": 3, "data": 500}, rel=1e-4)
    assert fit.offset == pytest.approx(1.7, abs=1e-6)
    np.testing.assert_allclose(fit.predict(table), y, rtol=1e-7)


def test_joint_law_of_one_variable_is_the_offset_law():
    rng = np.random.default_rng(2)
    y = (3 / WIDTHS + 0.05) * np.exp(0.03 * rng.standard_normal(6))
    joint, single = fit_joint_law({"m": WIDTHS}, y), fit_power_law(WIDTHS, y, offset=True)
    assert joint.exponents["m"] == pytest.approx(single.exponent)
    assert tuple(joint.intervals["m"]) == pytest.approx(tuple(single.interval))


def test_joint_law_without_offset():
    rng = np.random.default_rng(3)
    m, t = rng.uniform(10, 100, 40), rng.uniform(1e2, 1e4, 40)
    fit = fit_joint_law({"m": m, "steps": t}, 2 / m + 5 / t**0.33, offset=False)
    assert fit.exponents == pytest.approx({"m": 1.0, "steps": 0.33}, abs=1e-6)
    assert fit.offset == 0.0


def test_line_equals_linregress_with_its_standard_error():
    rng = np.random.default_rng(4)
    y = 3 / WIDTHS * np.exp(0.1 * rng.standard_normal(6))
    fit = fit_power_law(WIDTHS, y)
    slope, _, r, _, error = np.array(linregress(np.log(WIDTHS), np.log(y)), dtype=float)
    assert fit.exponent == pytest.approx(-slope)
    assert fit.interval.standard_error == pytest.approx(error)
    assert fit.r_squared == pytest.approx(r**2)
    assert fit.interval.high - fit.exponent == pytest.approx(2.7764451 * error)


def test_width_fit_with_parameter_counts():
    m = np.repeat([512, 768, 1024, 2048, 4096], 2)
    models, corpora = np.repeat(list("abcde"), 2), np.tile(["c4", "pile"], 5)
    loss = 476 / m**0.91 + np.where(corpora == "c4", 2.4, 1.9)
    fit = fit_width(m, loss, models=models, corpora=corpora, params=5.0 * m**2.5, resamples=100)
    assert fit.loss.exponent == pytest.approx(0.91, abs=1e-6)
    assert fit.growth == pytest.approx(2.5)
    assert fit.growth_interval is not None
    assert tuple(fit.growth_interval) == pytest.approx((2.5, 2.5))
    assert "5 clusters" in fit.loss.interval.method
    assert fit.models == 5
    np.testing.assert_allclose(fit.predict(m, corpora), loss, rtol=1e-6)
    assert fit_width(m, loss, models=models, corpora=corpora, resamples=100).growth is None


def test_results_are_json_and_words():
    rng = np.random.default_rng(5)
    y = (3 / WIDTHS + 0.05) * np.exp(0.03 * rng.standard_normal(6))
    results = [
        fit_power_law(WIDTHS, y),
        fit_power_law(WIDTHS, y, offset=True),
        fit_joint_law({"m": WIDTHS}, y),
        scaling.compare_laws(WIDTHS, y),
        scaling.fit_ranges(WIDTHS, y, hand=(15, 100)),
        scaling.leave_largest_out(WIDTHS, y),
        fit_width(WIDTHS, y, models=range(6), corpora=["c4"] * 6, params=WIDTHS**2, resamples=100),
    ]
    for result in results:
        stored = json.loads(json.dumps(result.to_dict(), allow_nan=False))
        assert stored["summary"] == result.summary()
        assert "\n" not in result.summary()
    assert results[1].to_dict()["interval"]["method"].startswith("profile likelihood")
    low, high = results[1].interval
    assert low < results[1].exponent < high


def test_same_seed_same_interval_other_seed_other():
    rng = np.random.default_rng(6)
    y = (3 / WIDTHS + 0.05) * np.exp(0.03 * rng.standard_normal(6))
    one, two, other = (
        fit_power_law(WIDTHS, y, offset=True, interval="bootstrap", resamples=200, seed=seed).interval
        for seed in (1, 1, 2)
    )
    assert one == two != other


def test_importing_the_package_needs_neither_numpy_nor_scipy():
    code = (
        "import sys, leafward.stats.power_laws\n"
        "assert not {'numpy', 'scipy', 'torch'} & set(sys.modules)\n"
        "from leafward.stats.power_laws import fit_power_law, compare_laws, fit_ranges, fit_width\n"
        "assert not {'scipy', 'torch'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_exists():
    assert set(scaling.__all__) == set(dir(scaling))
    for name in scaling.__all__:
        assert getattr(scaling, name).__module__.startswith("leafward.stats.")
    with pytest.raises(AttributeError, match="fit_powerlaw"):
        scaling.fit_powerlaw  # noqa: B018
