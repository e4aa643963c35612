"""Bad input is refused by name."""

import numpy as np
import pytest

from leafward.errors import DataError, UsageError
from leafward.stats.power_laws import (
    choose_range,
    compare_laws,
    fit_joint_law,
    fit_power_law,
    fit_ranges,
    fit_width,
    leave_largest_out,
)

X = np.array([10, 15, 25, 39, 63, 100.0])
Y = 3 / X + 0.05


@pytest.mark.parametrize(
    ("x", "y", "options", "words"),
    [
        ([0, *X[1:]], Y, {}, "x must be finite and positive, got 0.0 at position 0"),
        (X, [*Y[:5], -1], {}, "y must be finite and positive, got -1.0 at position 5"),
        (X, [*Y[:5], np.nan], {}, "y must be finite and positive, got nan"),
        ([*X[:5], np.inf], Y, {}, "x must be finite and positive, got inf"),
        (X, Y[:5], {}, "y must have one entry per row: 6 rows, got 5"),
        (X[None], Y, {}, "x must have one dimension"),
        (["wide"], [1.0], {}, "x must be a list of numbers"),
        (X[:2], Y[:2], {}, "x has too few points"),
        (X[:3], Y[:3], {"offset": True}, "y has too few points: the law has 3 parameters"),
        (np.full(6, 7.0), Y, {}, "x needs at least 2 different values"),
        (np.repeat([1.0, 2.0], 3), Y, {"offset": True}, "x needs at least 3 different values"),
        (X, Y, {"method": "hubr"}, "method 'hubr' is unknown; did you mean 'huber'"),
        (X, Y, {"offset": True, "method": "ols"}, "method 'ols' fits the plain law only"),
        (X, Y, {"offset": True, "interval": "profil"}, "interval 'profil' is unknown; did you mean 'profile'"),
        (X, Y, {"weighting": "absolut", "offset": True}, "weighting 'absolut' is unknown"),
        (X, Y, {"weighting": "absolute"}, "weighting 'absolute' needs method 'varpro'"),
        (X, Y, {"coefficient": "group", "offset": True}, "coefficient 'group' needs groups"),
        (X, Y, {"coefficient": "own"}, "coefficient 'own' is unknown"),
        (X, Y, {"groups": list("aabbcc")}, "groups make no difference"),
        (X, Y, {"groups": list("aab"), "offset": True}, "groups must have one entry per row"),
        (X, Y, {"clusters": list("aaabbb")}, "clusters needs at least 3 different labels, got 2"),
        (X, Y, {"clusters": list("aabbcc"), "interval": "profile"}, "interval 'profile' takes rows as independent"),
        (X, Y, {"method": "huber", "interval": "profile"}, "interval 'profile' needs a likelihood"),
        (X, Y, {"level": 95}, "level must lie strictly between 0 and 1, got 95"),
        (X, Y, {"resamples": 10}, "resamples must be at least 100, got 10"),
    ],
)
def test_power_law_refuses(x, y, options, words):
    with pytest.raises(UsageError, match=words):
        fit_power_law(x, y, **options)


def test_a_rising_table_has_no_falling_law():
    with pytest.raises(DataError, match="y does not fall with x"):
        fit_power_law(X, 1 + 0.1 * X, offset=True)


def test_joint_law_refuses():
    with pytest.raises(UsageError, match="variables is empty"):
        fit_joint_law({}, Y)
    with pytest.raises(UsageError, match=r"variables.'m'. must have one entry per row"):
        fit_joint_law({"m": X[:4]}, Y)
    with pytest.raises(UsageError, match=r"variables.'t'. needs at least 3 different values"):
        fit_joint_law({"m": X, "t": np.ones(6)}, Y)
    with pytest.raises(UsageError, match="variables m, t do not vary independently"):
        fit_joint_law({"m": X, "t": X**2}, Y)
    with pytest.raises(UsageError, match="method 'ols' is unknown"):
        fit_joint_law({"m": X}, Y, method="ols")  # type: ignore[arg-type]


def test_prediction_refuses():
    fit = fit_joint_law({"m": X}, Y)
    with pytest.raises(UsageError, match="variables: 'mm' is not in the law; did you mean 'm'"):
        fit.predict({"mm": X})
    with pytest.raises(UsageError, match="variables: 'm' is missing"):
        fit.predict({})
    plain = fit_power_law(X, Y)
    with pytest.raises(UsageError, match="groups given, the law has none"):
        plain.predict(X, groups=list("aabbcc"))
    grouped = fit_power_law(X, Y, offset=True, groups=list("aaabbb"))
    with pytest.raises(UsageError, match="groups is needed"):
        grouped.predict(X)
    with pytest.raises(UsageError, match="groups: 'z' was not in the fit"):
        grouped.predict([5.0], groups=["z"])


def test_ranges_and_comparisons_refuse():
    with pytest.raises(UsageError, match="min_points must be at least 4"):
        choose_range(X, Y, min_points=3)
    with pytest.raises(UsageError, match="significance must lie"):
        choose_range(X, Y, significance=1.5)
    with pytest.raises(UsageError, match="x needs at least 5 different values"):
        choose_range(X[:4], Y[:4])
    with pytest.raises(UsageError, match=r"hand range .* holds 2 points"):
        fit_ranges(X, Y, hand=(60, 100))
    with pytest.raises(UsageError, match="x has too few points"):
        compare_laws(X[:4], Y[:4])
    with pytest.raises(UsageError, match="groups: 'b' was not in the fit"):
        leave_largest_out(X, Y, offset=True, groups=list("aaaaab"))
    with pytest.raises(UsageError, match="groups must have one entry per row"):
        leave_largest_out(X, Y, offset=True, groups=list("aa"))


def test_width_table_must_not_contradict_itself():
    models = list("aabbcc")
    corpora = ["c4", "pile"] * 3
    with pytest.raises(DataError, match="m: model 'a' has 10 in one row and 15 in another"):
        fit_width(X, Y, models=models, corpora=corpora, resamples=100)
    m = np.repeat([10.0, 30.0, 90.0], 2)
    loss = 3 / m + np.tile([1.0, 2.0], 3)
    with pytest.raises(DataError, match="params: model 'b' has 5 in one row and 6 in another"):
        fit_width(m, loss, models=models, corpora=corpora, params=[1, 1, 5, 6, 9, 9], resamples=100)
    with pytest.raises(UsageError, match="models must have one entry per row"):
        fit_width(m, loss, models=list("ab"), corpora=corpora)


def test_width_table_needs_three_models_and_one_corpus_per_row():
    with pytest.raises(UsageError, match="models needs at least 3 different labels, got 2"):
        fit_width(X, Y, models=list("aaabbb"), corpora=["c4"] * 6)
    with pytest.raises(UsageError, match="corpora must have one entry per row"):
        fit_width(X, Y, models=list("abcdef"), corpora=["c4"])


def test_joint_prediction_needs_columns_of_one_length():
    rng = np.random.default_rng(0)
    m, t = rng.uniform(10, 100, 20), rng.uniform(10, 100, 20)
    fit = fit_joint_law({"m": m, "t": t}, 1 + 2 / m + 3 / t**0.5)
    with pytest.raises(UsageError, match=r"variables.'t'. must have one entry per row: 2 rows, got 1"):
        fit.predict({"m": [10, 20], "t": [5]})
