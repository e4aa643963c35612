"""Fits of y = C / x^a, with offsets, groups, and several variables.

Three methods:

- `ols`: the straight line of ln y on ln x (no offset, no groups).
- `varpro`: variable projection; residuals relative to the fit (`weighting="relative"`) or absolute.
- `huber`: Huber loss on log residuals, robust to bad rows (see `huber.py`).

Two kinds of interval:

- `profile`: profile likelihood with an F quantile, for independent rows; for `ols` this is Student's t. It keeps
  its level with as few as six points, where percentiles of resamples do not, and is the default without clusters.
- `bootstrap`: whole clusters (rows, if none are given) are drawn with replacement and **everything** is refitted,
  offsets included. It is the default with clusters and for `huber`. Rows that share an error (the same model on
  several corpora, the same seed at several steps) must share a cluster, or the interval is too short.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from leafward.errors import DataError, UsageError
from leafward.stats.estimate import Interval
from leafward.stats.power_laws import checks
from leafward.stats.power_laws.huber import fit_huber, refit_huber
from leafward.stats.power_laws.intervals import bootstrap_interval, draw_counts, profile_likelihood, resample_exponents
from leafward.stats.power_laws.line import student_interval, weighted_line
from leafward.stats.power_laws.results import ALL_ROWS, JointFit, PowerLawFit
from leafward.stats.power_laws.separable import EXPONENT_RANGE, Array, Design, best_fit, minimise

Method = Literal["ols", "varpro", "huber"]
Weighting = Literal["relative", "absolute"]
IntervalKind = Literal["profile", "bootstrap"]


@dataclass(frozen=True)
class _Plan:
    """How to fit and how to state the uncertainty, checked."""

    method: str
    weighting: str
    kind: str
    cluster: NDArray[np.intp]
    unit: str
    level: float
    resamples: int
    seed: int

    @property
    def clusters(self) -> int:
        return int(self.cluster.max()) + 1


def fit_power_law(
    x: ArrayLike,
    y: ArrayLike,
    *,
    offset: bool = False,
    groups: Iterable[object] | None = None,
    coefficient: Literal["shared", "group"] = "shared",
    clusters: Iterable[object] | None = None,
    method: Method | None = None,
    weighting: Weighting = "relative",
    interval: IntervalKind | None = None,
    level: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> PowerLawFit:
    """Fit y = C / x^a, plus an offset if `offset`, to x (n,) and y (n,).

    `groups` (n labels) share the exponent; each has its own offset if `offset`, and its own C if
    `coefficient="group"`. `clusters` (n labels) name rows whose errors go together. `method`, `weighting` and
    `interval` are explained at the head of this module; left out, the method is "ols" for the plain law and
    "varpro" otherwise. Exponents of "varpro" and "huber" lie in (0.01, 10); "ols" takes any sign.
    """
    x = checks.positive_vector("x", x)
    y = checks.positive_vector("y", y, len(x))
    checks.choice("coefficient", coefficient, ("shared", "group"))
    plain = not offset and groups is None
    if groups is None and coefficient == "group":
        raise UsageError("coefficient 'group' needs groups")
    if groups is not None and not offset and coefficient == "shared":
        raise UsageError("groups make no difference without offset=True or coefficient='group'")
    plan = _plan(len(x), "ols" if plain else "varpro", method, weighting, interval, clusters, level, resamples, seed)
    if plan.method == "ols" and not plain:
        raise UsageError("method 'ols' fits the plain law only; use 'varpro' or 'huber' with offset or groups")
    checks.varied("x", x, 3 if offset else 2)
    if plan.method == "ols":
        checks.enough_rows("x", len(x), 2)
        return _fit_line(x, y, plan)

    names, index = ([ALL_ROWS], np.zeros(len(x), dtype=np.intp))
    if groups is not None:
        names, index = checks.labels("groups", groups, len(x))
    indicator = np.eye(len(names))[index]
    scale_names = names if coefficient == "group" else [ALL_ROWS]
    scales = indicator if coefficient == "group" else np.ones((len(x), 1))
    base = np.hstack([scales, indicator]) if offset else scales
    power = np.where(np.arange(base.shape[1]) < len(scale_names), 0, -1)
    exponents, c, f, intervals = _fit(["x"], np.log(x)[:, None], base, power, y, plan)
    return PowerLawFit(
        exponent=float(exponents[0]),
        interval=intervals[0],
        coefficients=dict(zip(scale_names, c[: len(scale_names)].tolist(), strict=True)),
        offsets=dict(zip(names, c[len(scale_names) :].tolist(), strict=True)) if offset else {},
        method=plan.method,
        weighting=plan.weighting,
        rows=len(x),
        **_quality(y, f),
    )


def fit_joint_law(
    variables: Mapping[str, ArrayLike],
    y: ArrayLike,
    *,
    offset: bool = True,
    groups: Iterable[object] | None = None,
    clusters: Iterable[object] | None = None,
    method: Literal["varpro", "huber"] = "varpro",
    weighting: Weighting = "relative",
    interval: IntervalKind | None = None,
    level: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> JointFit:
    """Fit y = E + Σ_k C_k / x_k^a_k to named variables, for instance {"m": …, "steps": …, "data": …}, (n,) each.

    `offset=False` leaves E out; `groups` (n labels) give each of them an E of its own. The other arguments are those of
    `fit_power_law`.
    """
    if not variables:
        raise UsageError("variables is empty; give at least one named array")
    y = checks.positive_vector("y", y)
    names = list(variables)
    columns = [checks.positive_vector(f"variables[{name!r}]", variables[name], len(y)) for name in names]
    checks.choice("method", method, ("varpro", "huber"))
    plan = _plan(len(y), "varpro", method, weighting, interval, clusters, level, resamples, seed)
    for name, column in zip(names, columns, strict=True):
        checks.varied(f"variables[{name!r}]", column, 3 if offset or len(names) > 1 else 2)
    log_x = np.log(np.stack(columns, axis=1))
    if np.linalg.matrix_rank(log_x - log_x.mean(axis=0), tol=1e-9 * np.sqrt(len(y))) < len(names):
        raise UsageError(f"variables {', '.join(names)} do not vary independently: one follows from the others")
    group_names, index = [ALL_ROWS], np.zeros(len(y), dtype=np.intp)
    if groups is not None:
        if not offset:
            raise UsageError("groups make no difference without offset=True")
        group_names, index = checks.labels("groups", groups, len(y))
    floors = np.eye(len(group_names))[index] if offset else np.empty((len(y), 0))
    base = np.hstack([np.ones((len(y), len(names))), floors])
    power = np.array([*range(len(names)), *[-1] * floors.shape[1]])
    exponents, c, f, intervals = _fit(names, log_x, base, power, y, plan)
    return JointFit(
        exponents=dict(zip(names, exponents.tolist(), strict=True)),
        intervals=dict(zip(names, intervals, strict=True)),
        coefficients=dict(zip(names, c.tolist(), strict=False)),
        offset=float(c[-1]) if offset and groups is None else 0.0,
        offsets=dict(zip(group_names, c[len(names) :].tolist(), strict=True)) if groups is not None else {},
        method=plan.method,
        weighting=plan.weighting,
        rows=len(y),
        **_quality(y, f),
    )


def _plan(
    rows: int,
    default_method: str,
    method: str | None,
    weighting: str,
    kind: str | None,
    clusters: Iterable[object] | None,
    level: float,
    resamples: int,
    seed: int,
) -> _Plan:
    method = checks.choice("method", method or default_method, ("ols", "varpro", "huber"))
    checks.choice("weighting", weighting, ("relative", "absolute"))
    if method != "varpro":
        if weighting == "absolute":
            raise UsageError(f"weighting 'absolute' needs method 'varpro'; {method!r} works on log residuals")
        weighting = "log"
    cluster = np.arange(rows)
    if clusters is not None:
        names, cluster = checks.labels("clusters", clusters, rows)
        if len(names) < 3:
            raise UsageError(f"clusters needs at least 3 different labels, got {len(names)}")
    kind = kind or ("bootstrap" if clusters is not None or method == "huber" else "profile")
    checks.choice("interval", kind, ("profile", "bootstrap"))
    if kind == "profile" and clusters is not None:
        raise UsageError("interval 'profile' takes rows as independent; use 'bootstrap' with clusters")
    if kind == "profile" and method == "huber":
        raise UsageError("interval 'profile' needs a likelihood; use 'bootstrap' with method 'huber'")
    if resamples < 100:
        raise UsageError(f"resamples must be at least 100, got {resamples}")
    unit = "rows" if clusters is None else "clusters"
    return _Plan(method, weighting, kind, cluster, unit, checks.fraction("level", level), resamples, seed)


def _fit_line(x: Array, y: Array, plan: _Plan) -> PowerLawFit:
    log_x, log_y = np.log(x), np.log(y)
    slope, intercept = (float(each[0]) for each in weighted_line(log_x, log_y, np.ones((1, len(x)))))
    interval = student_interval(log_x, log_y, plan.level)
    if plan.kind == "bootstrap":
        counts = draw_counts(plan.cluster, plan.resamples, plan.seed)
        draws = -weighted_line(log_x, log_y, counts)[0]
        draws = draws[np.isfinite(draws)]  # a resample of one x alone has no slope
        interval = bootstrap_interval(-slope, draws, plan.clusters, plan.level, plan.unit, logarithmic=False)
    return PowerLawFit(
        exponent=-slope,
        interval=interval,
        coefficients={ALL_ROWS: float(np.exp(intercept))},
        offsets={},
        method="ols",
        weighting=plan.weighting,
        rows=len(x),
        **_quality(y, np.exp(intercept + slope * log_x)),
    )


def _fit(
    names: list[str], log_x: Array, base: Array, power: NDArray[np.intp], y: Array, plan: _Plan
) -> tuple[Array, Array, Array, list[Interval]]:
    """Exponents (q,), coefficients (J,) in the units of x, fitted values (n,), one interval per exponent."""
    unit = np.exp(np.log(y).mean())  # y in units of its geometric mean, whose squares neither over- nor underflow
    y = y / unit
    centre = log_x.mean(axis=0)
    design = Design(log_x - centre, base, power)
    checks.enough_rows("y", len(y), design.n_parameters)
    if plan.method == "huber":
        c, a, intervals = _huber(design, y, plan)
    else:
        c, a, intervals = _varpro(design, y, plan)
    for k, name in enumerate(names):
        if not np.any(c[power == k] > 1e-12 * y.max()):
            raise DataError(f"y does not fall with {name}: the best coefficient of its power law is zero")
    f = (design.columns(a[None])[0] * c).sum(axis=1)
    shift = np.append(centre * a, 0.0)[power]  # undo the centring of ln x; power −1 picks the appended zero
    return a, unit * c * np.exp(shift), unit * f, intervals


def _varpro(design: Design, y: Array, plan: _Plan) -> tuple[Array, Array, list[Interval]]:
    rows = y[None]
    if plan.weighting == "relative":
        # Errors relative to the law, not to the noisy y: a first fit gives the weights of the second.
        first = best_fit(design, rows, 1 / rows**2)
        weight = 1 / first.f**2
        fit = minimise(design, first.a, rows, weight, steps=200)
    else:
        weight = np.full_like(rows, np.mean(y) ** -2)
        fit = best_fit(design, rows, weight)
    a = fit.a[0]
    if plan.kind == "bootstrap":
        counts = draw_counts(plan.cluster, plan.resamples, plan.seed)
        draws = resample_exponents(design, fit, rows, weight, counts)
        return fit.c[0], a, _bootstrap_intervals(a, draws, plan)
    low, high = profile_likelihood(design, fit, rows, weight, plan.level)
    errors = np.sqrt(fit.rss[0] / (len(y) - design.n_parameters)) * fit.unit_errors(weight)[0]
    ends = zip(low.tolist(), high.tolist(), errors.tolist(), strict=True)
    return (
        fit.c[0],
        a,
        [
            Interval(lo, hi, level=plan.level, method=_profile_words(lo, hi), standard_error=error)
            for lo, hi, error in ends
        ],
    )


def _profile_words(low: float, high: float) -> str:
    """The method, and which ends the data leave open."""
    lowest, highest = EXPONENT_RANGE
    below = ", open below" if low <= lowest * (1 + 1e-9) else ""
    above = ", open above" if high >= highest * (1 - 1e-9) else ""
    return f"profile likelihood, F quantile{below}{above}"


def _huber(design: Design, y: Array, plan: _Plan) -> tuple[Array, Array, list[Interval]]:
    c, a = fit_huber(design, y)
    counts = draw_counts(plan.cluster, plan.resamples, plan.seed)
    return c, a, _bootstrap_intervals(a, refit_huber(design, y, counts, c, a), plan)


def _bootstrap_intervals(a: Array, draws: Array, plan: _Plan) -> list[Interval]:
    return [
        bootstrap_interval(float(each), column, plan.clusters, plan.level, plan.unit, logarithmic=True)
        for each, column in zip(a, draws.T, strict=True)
    ]


def _quality(y: Array, f: Array) -> dict[str, float]:
    """R² and root mean square of log residuals."""
    log_y = np.log(y)
    residual = log_y - np.log(f)
    total = float(np.sum((log_y - log_y.mean()) ** 2))
    rss = float(residual @ residual)
    return {
        "r_squared": 1.0 - rss / total if total > 0 else float("nan"),
        "rms_log_error": float(np.sqrt(rss / len(y))),
    }
