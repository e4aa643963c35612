"""Compute-optimal size and data (Hoffmann et al. 2022): their approaches 1 to 3, with C = 6 N D unless told.

1. The lowest loss at each compute, N* = G·C^a through those points.
2. IsoFLOP: runs of nearly equal compute, a parabola of L in ln N for each, N* at its lowest point.
3. The law L = E + A/N^α + B/D^β by variable projection or the Huber loss; minimised under C = 6 N D it gives

       N* = G (C/6)^{β/(α+β)},  D* = (C/6)^{α/(α+β)} / G,  G = (αA/(βB))^{1/(α+β)}.

Intervals are those of a bootstrap that refits everything: whole runs are drawn with replacement.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from leafward.errors import DataError
from leafward.stats.estimate import Interval
from leafward.stats.power_laws import checks
from leafward.stats.power_laws.huber import fit_huber, refit_huber_whole
from leafward.stats.power_laws.results import Told
from leafward.stats.power_laws.separable import Array, Design, best_fit, minimise

FLOP_PER_TOKEN = 6.0
BAND = 1.2  # runs whose compute differs by at most this factor are one IsoFLOP curve
LEAST_CURVE = 6
BINS = 24


@dataclass(frozen=True)
class Allocation:
    """At a compute C: the size N*, the tokens D*, and the loss there, with intervals where the law has a loss."""

    compute: float
    size: float
    size_interval: tuple[float, float]
    tokens: float
    tokens_interval: tuple[float, float]
    loss: float | None = None
    loss_interval: tuple[float, float] | None = None


@dataclass(frozen=True)
class ComputeLaw(Told):
    """N* ∝ C^a by one approach; `points` are the (C, N*) it was drawn through; 3 has the law's parameters too."""

    approach: str
    exponent: float
    interval: Interval
    allocations: tuple[Allocation, ...]
    points: tuple[tuple[float, float], ...] = ()
    parameters: dict[str, float] | None = None
    intervals: dict[str, tuple[float, float]] | None = None

    def summary(self) -> str:
        words = f"approach {self.approach}: N* ∝ C^{self.exponent:.3f} {self.interval}"
        return words if not self.points else f"{words}, through {len(self.points)} points"


def compute_laws(
    size: ArrayLike,
    tokens: ArrayLike,
    loss: ArrayLike,
    *,
    budgets: ArrayLike = (),
    resamples: int = 400,
    level: float = 0.95,
    seed: int = 0,
) -> tuple[list[ComputeLaw], list[str]]:
    """All approaches that the table of runs N, D, L (n,) each allows, and a sentence on each that it does not."""
    n = checks.positive_vector("N", size)
    d = checks.positive_vector("D", tokens, len(n))
    y = checks.positive_vector("loss", loss, len(n))
    targets = np.asarray(budgets, dtype=np.float64)
    found, missing = [], []
    for approach in (_lowest, _isoflop, varpro_law, huber_law):
        try:
            found.append(approach(n, d, y, targets, resamples, level, seed))
        except DataError as error:
            missing.append(str(error))
    return found, missing


def varpro_law(n: Array, d: Array, y: Array, budgets: Array, resamples: int, level: float, seed: int) -> ComputeLaw:
    """Approach 3 by variable projection, residuals relative to the law."""
    design, shift, unit = _design(n, d, y)
    rows = (y / unit)[None]
    first = best_fit(design, rows, 1 / rows**2)
    weight = 1 / first.f**2
    fit = minimise(design, first.a, rows, weight, steps=200)
    counts = _draws(len(y), resamples, seed)
    refits = minimise(design, np.repeat(fit.a, resamples, axis=0), rows, weight * counts)
    own = _parameters(fit.a, fit.c, shift, unit)[0]
    return _law("3, variable projection", own, _parameters(refits.a, refits.c, shift, unit), budgets, level)


def huber_law(n: Array, d: Array, y: Array, budgets: Array, resamples: int, level: float, seed: int) -> ComputeLaw:
    """Approach 3 as published: the Huber loss of log residuals (δ = 1e-3), summed."""
    design, shift, unit = _design(n, d, y)
    c, a = fit_huber(design, y / unit)
    count = min(resamples, 200)
    drawn_c, drawn_a = refit_huber_whole(design, y / unit, _draws(len(y), count, seed), c, a)
    own = _parameters(a[None], c[None], shift, unit)[0]
    return _law("3, Huber", own, _parameters(drawn_a, drawn_c, shift, unit), budgets, level)


def _design(n: Array, d: Array, y: Array) -> tuple[Design, Array, float]:
    """Columns N^−α, D^−β, 1 with centred logarithms; the centre (2,), and the unit of y."""
    checks.enough_rows("loss", len(y), 5)
    for name, column in (("N", n), ("D", d)):
        if len(np.unique(column)) < 3:
            raise DataError(f"approach 3 needs at least 3 different values of {name}, got {len(np.unique(column))}")
    logs = np.log(np.stack([n, d], axis=1))
    centre = logs.mean(0)
    if np.linalg.matrix_rank(logs - centre, tol=1e-9 * len(y) ** 0.5) < 2:
        raise DataError("approach 3 needs N and D that vary independently: here one follows from the other")
    return Design(logs - centre, np.ones((len(y), 3)), np.array([0, 1, -1])), centre, float(np.exp(np.log(y).mean()))


def _parameters(a: Array, c: Array, centre: Array, unit: float) -> Array:
    """(α, β, A, B, E) of each row (P, 5), in the units of N, D and y; a term that vanished has coefficient 0."""
    scale = unit * c[:, :2] * np.exp(a * centre)
    return np.concatenate([a, scale, unit * c[:, 2:]], axis=1)


def _law(approach: str, own: Array, drawn: Array, budgets: Array, level: float) -> ComputeLaw:
    alpha, beta, a, b, _ = own
    if not (a > 0 and b > 0):
        raise DataError(f"approach {approach}: the loss does not fall with {'N' if not a > 0 else 'D'} in this table")
    drawn = drawn[(drawn[:, 2] > 0) & (drawn[:, 3] > 0)]
    names = ("α", "β", "A", "B", "E")
    ends = {name: _ends(column, level) for name, column in zip(names, drawn.T, strict=True)}
    shares = drawn[:, 1] / (drawn[:, 0] + drawn[:, 1])
    low, high = _ends(shares, level)
    method = f"bootstrap of {len(drawn)} resamples of runs"
    return ComputeLaw(
        approach=approach,
        exponent=float(beta / (alpha + beta)),
        interval=Interval(low, high, level=level, method=method, standard_error=float(shares.std(ddof=1))),
        allocations=tuple(_allocated(float(c), own, drawn, level) for c in budgets),
        parameters=dict(zip(names, map(float, own), strict=True)),
        intervals=ends,
    )


def _allocated(compute: float, own: Array, drawn: Array, level: float) -> Allocation:
    sizes, tokens, losses = optimum(compute, drawn)
    size, token, loss = (float(each[0]) for each in optimum(compute, own[None]))
    return Allocation(
        compute, size, _ends(sizes, level), token, _ends(tokens, level), loss, _ends(losses, level)
    )  # fmt: skip


def optimum(compute: float, parameters: Array) -> tuple[Array, Array, Array]:
    """N*, D* and L there (P,) for laws (α, β, A, B, E) (P, 5): the least loss with 6 N D = C."""
    alpha, beta, a, b, e = parameters.T
    balance = (alpha * a / (beta * b)) ** (1 / (alpha + beta))
    size = balance * (compute / FLOP_PER_TOKEN) ** (beta / (alpha + beta))
    tokens = compute / FLOP_PER_TOKEN / size
    return size, tokens, e + a * size**-alpha + b * tokens**-beta


def _lowest(n: Array, d: Array, y: Array, budgets: Array, resamples: int, level: float, seed: int) -> ComputeLaw:
    """Approach 1: of each of `BINS` ranges of compute the run of least loss."""

    def points(rows: np.ndarray) -> tuple[Array, Array]:
        compute = FLOP_PER_TOKEN * n[rows] * d[rows]
        edges = np.geomspace(compute.min(), compute.max() * (1 + 1e-9), BINS + 1)
        place = np.clip(np.searchsorted(edges, compute, side="right") - 1, 0, BINS - 1)
        best = [np.flatnonzero(place == each)[y[rows][place == each].argmin()] for each in np.unique(place)]
        return compute[best], n[rows][best]

    return _through("1", points, len(n), budgets, resamples, level, seed)


def _isoflop(n: Array, d: Array, y: Array, budgets: Array, resamples: int, level: float, seed: int) -> ComputeLaw:
    """Approach 2: runs of nearly equal compute, and the lowest point of a parabola of the loss in ln N."""
    compute = FLOP_PER_TOKEN * n * d
    curves = _curves(compute, n)
    label = np.full(len(n), -1)
    for place, each in enumerate(curves):
        label[each] = place

    def points(rows: np.ndarray) -> tuple[Array, Array]:
        found = [_lowest_point(n[own], y[own]) for k in range(len(curves)) if len(own := rows[label[rows] == k]) > 3]
        where = [k for k in range(len(curves)) if np.sum(label[rows] == k) > 3]
        middle = np.array([np.exp(np.log(compute[curves[k]]).mean()) for k in where])
        size = np.array(found)
        return middle[np.isfinite(size)], size[np.isfinite(size)]

    return _through("2", points, len(n), budgets, resamples, level, seed)


def _curves(compute: Array, n: Array) -> list[np.ndarray]:
    """Disjoint groups of runs whose compute differs by at most `BAND`, those with the most sizes first."""
    left, found = compute.argsort(), []
    while len(left) >= LEAST_CURVE:
        logs = np.log(compute[left])
        ends = np.searchsorted(logs, logs + np.log(BAND), side="right")
        sizes = [len(np.unique(n[left[start:end]])) for start, end in enumerate(ends)]
        best = int(np.argmax(sizes))
        if sizes[best] < LEAST_CURVE:
            break
        found.append(left[best : ends[best]])
        left = np.concatenate([left[:best], left[ends[best] :]])
    return found


def _lowest_point(n: Array, y: Array) -> float:
    """exp of where a parabola of y in ln N is least; NaN where it has no lowest point among the runs."""
    x = np.log(n)
    if len(np.unique(x)) < 3:
        return float("nan")
    square, slope, _ = np.polyfit(x - x.mean(), y, 2)
    at = -slope / (2 * square) + x.mean() if square > 0 else np.nan
    return float(np.exp(at)) if x.min() <= at <= x.max() else float("nan")


def _through(
    approach: str,
    points: Callable[[np.ndarray], tuple[Array, Array]],
    runs: int,
    budgets: Array,
    resamples: int,
    level: float,
    seed: int,
) -> ComputeLaw:
    """The straight line of ln N* on ln C, and its bootstrap over runs."""
    compute, size = points(np.arange(runs))
    if len(np.unique(compute)) < 3:
        what = "runs of different compute" if approach == "1" else "IsoFLOP curves with a lowest point"
        raise DataError(f"approach {approach} needs at least 3 {what}, this table has {len(np.unique(compute))}")
    own = np.polyfit(np.log(compute), np.log(size), 1)
    rng = np.random.default_rng(seed)
    drawn = []
    for _ in range(resamples):
        c, s = points(rng.integers(0, runs, runs))
        if len(np.unique(c)) >= 3:
            drawn.append(np.polyfit(np.log(c), np.log(s), 1))
    lines = np.array(drawn)
    low, high = _ends(lines[:, 0], level)
    method = f"bootstrap of {len(lines)} resamples of runs"
    return ComputeLaw(
        approach=approach,
        exponent=float(own[0]),
        interval=Interval(low, high, level=level, method=method, standard_error=float(lines[:, 0].std(ddof=1))),
        allocations=tuple(_on_line(float(c), own, lines, level) for c in budgets),
        points=tuple(zip(compute.tolist(), size.tolist(), strict=True)),
    )


def _on_line(compute: float, own: Array, lines: Array, level: float) -> Allocation:
    sizes = np.exp(lines @ [np.log(compute), 1])
    size = float(np.exp(own @ [np.log(compute), 1]))
    total = compute / FLOP_PER_TOKEN
    return Allocation(compute, size, _ends(sizes, level), total / size, _ends(total / sizes, level))


def _draws(rows: int, resamples: int, seed: int) -> Array:
    return np.random.default_rng(seed).multinomial(rows, np.full(rows, 1 / rows), size=resamples).astype(np.float64)


def _ends(values: Array, level: float) -> tuple[float, float]:
    low, high = np.quantile(values, [0.5 - level / 2, 0.5 + level / 2])
    return float(low), float(high)
