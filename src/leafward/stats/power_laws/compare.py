"""Is it a power law? The same table under a power law, an exponential and a logarithm.

All candidates are fitted by least squares on ln y, so they share one likelihood and their criteria compare. A high
R² says that a curve goes down smoothly, not which curve it is: R² alone does not identify a power law.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from leafward.stats.power_laws import checks
from leafward.stats.power_laws.line import weighted_line
from leafward.stats.power_laws.results import Told
from leafward.stats.power_laws.separable import Array

_BEND = 0.3  # width of a break in ln x
_BROKEN_LEAST = 8  # different x for a broken law: four parameters, the error's size, and something held out
# Differences of AICc below this are not evidence (Burnham & Anderson 2002, §2.6).
_UNDECIDED = 2.0


@dataclass(frozen=True)
class Candidate(Told):
    """One fitted law. `held_out_error`: root mean square of ln(observed / predicted) over the largest x, each
    predicted from the smaller ones alone; infinite where the law goes to zero or below. The coefficient is given
    as its logarithm, which an exponential far from x = 0 needs."""

    name: str
    formula: str
    parameters: Mapping[str, float]
    aicc: float
    bic: float
    delta_aicc: float
    r_squared: float
    held_out_error: float

    def predict(self, x: ArrayLike) -> Array:
        """The fitted y at x (k,)."""
        x = checks.positive_vector("x", x)
        return _LAWS[self.name].curve(x, *self.parameters.values())

    def summary(self) -> str:
        return (
            f"{self.name}: AICc {self.aicc:.1f} (+{self.delta_aicc:.1f}), BIC {self.bic:.1f}, "
            f"R² {self.r_squared:.3f}, held-out error {self.held_out_error:.1%}"
        )


@dataclass(frozen=True)
class Comparison(Told):
    """Candidates in order of AICc, best first, and what that amounts to."""

    candidates: tuple[Candidate, ...]
    verdict: str

    @property
    def best(self) -> Candidate:
        return self.candidates[0]

    def summary(self) -> str:
        return self.verdict


@dataclass(frozen=True)
class _Law:
    formula: str
    parameters: tuple[str, ...]
    curve: Callable[..., Array]
    fit: Callable[[Array, Array, bool], tuple[float, ...]]


def compare_laws(x: ArrayLike, y: ArrayLike, *, offset: bool = False, broken: bool = False) -> Comparison:
    """Fit power, exponential and logarithmic laws to x (n,), y (n,) and compare them; a broken power law if `broken`.

    `offset=True` gives the power law and the exponential a non-negative offset; the logarithm has one by nature.
    """
    x = checks.positive_vector("x", x)
    y = checks.positive_vector("y", y, len(x))
    parameters = 3 if offset else 2
    checks.varied("x", x, parameters + 1)
    checks.enough_rows("x", len(x), parameters + 2)  # AICc counts the error's size as a parameter
    order = np.argsort(x, kind="stable")
    x, y = x[order], y[order]
    if broken:
        checks.varied("x", x, _BROKEN_LEAST)
    scored = [_score(name, x, y, offset) for name in _LAWS if broken or name != "broken"]
    lowest = min(each["aicc"] for each in scored)
    ranked = sorted(scored, key=lambda each: each["aicc"])
    candidates = tuple(Candidate(**each, delta_aicc=each["aicc"] - lowest) for each in ranked)
    return Comparison(candidates, _verdict(candidates))


def _score(name: str, x: Array, y: Array, offset: bool) -> dict[str, Any]:
    law = _LAWS[name]
    values = law.fit(x, y, offset)
    residual = np.log(y) - np.log(law.curve(x, *values))
    n, k = len(x), len(values) + 1
    # Rounding bounds the error of an exact law from below, so that its criteria stay finite.
    rss = max(float(residual @ residual), n * 1e-30)
    fit_term = n * np.log(rss / n)
    total = float(np.sum((np.log(y) - np.log(y).mean()) ** 2))
    return {
        "name": name,
        "formula": law.formula if len(values) == 2 or name == "broken" else f"{law.formula} + E",
        "parameters": dict(zip(law.parameters, values, strict=False)),
        "aicc": float(fit_term + 2 * k + 2 * k * (k + 1) / (n - k - 1)),
        "bic": float(fit_term + k * np.log(n)),
        "r_squared": 1.0 - rss / total if total > 0 else float("nan"),
        "held_out_error": _held_out_error(law, x, y, offset),
    }


def _held_out_error(law: _Law, x: Array, y: Array, offset: bool) -> float:
    """Predict each of the largest quarter of the x values (at least one) from all smaller ones."""
    values = np.unique(x)
    cuts = values[-max(1, min(len(values) // 4, len(values) - 4)) :]
    errors = []
    for cut in cuts:
        seen, next_up = x < cut, x == cut
        predicted = law.curve(cut, *law.fit(x[seen], y[seen], offset))
        if predicted <= 0:
            return float("inf")
        errors.append(np.log(y[next_up] / predicted))
    return float(np.sqrt(np.mean(np.concatenate(errors) ** 2)))


def _verdict(candidates: tuple[Candidate, ...]) -> str:
    best, second = candidates[:2]
    most_exact = min(candidates, key=lambda each: each.held_out_error)
    r_squared = ", ".join(f"{each.name} {each.r_squared:.3f}" for each in candidates)
    if second.delta_aicc < _UNDECIDED:
        words = f"{best.name} and {second.name} are not told apart (ΔAICc {second.delta_aicc:.1f})"
    else:
        words = f"{best.name} is favoured over {second.name} (ΔAICc {second.delta_aicc:.1f})"
    agreement = "agrees" if most_exact is best else f"favours {most_exact.name}"
    return (
        f"{words}; held-out error {agreement} ({most_exact.held_out_error:.1%}); "
        f"R² alone does not identify the law ({r_squared})"
    )


def _fit_falling(u: Array, y: Array, offset: bool) -> tuple[float, ...]:
    """ln C, rate (and E ≥ 0) of C·exp(−rate·u) + E by least squares on ln y."""
    from scipy.optimize import least_squares

    log_y, ones = np.log(y), np.ones((1, len(y)))
    centre, scale = u.mean(), u.std()
    z = (u - centre) / scale
    starts = []
    for share in (0.0, 0.5, 0.9, 0.99) if offset else (0.0,):
        slope, intercept = weighted_line(z, np.log(y - share * y.min()), ones)
        starts.append((float(intercept[0]), -float(slope[0]), share))
    if not offset:
        log_c, rate, _ = starts[0]
        return _uncentred(log_c, rate, centre, scale)

    def residual(p: Array) -> Array:
        return np.logaddexp(p[0] - p[1] * z, np.log(max(p[2], 1e-300) * y.min())) - log_y

    def jacobian(p: Array) -> Array:
        power, floor = np.exp(p[0] - p[1] * z), p[2] * y.min()
        total = power + floor
        return np.stack([power, -z * power, np.full_like(z, y.min())], axis=1) / total[:, None]

    bounds = ([-np.inf, -np.inf, 0.0], [np.inf, np.inf, np.inf])
    options = _exact(jacobian) | {"bounds": bounds, "x_scale": "jac"}
    fits = [least_squares(residual, start, **options) for start in starts]
    log_c, rate, share = min(fits, key=lambda fit: fit.cost).x
    return *_uncentred(log_c, rate, centre, scale), float(share * y.min())


def _broken_curve(x: Array, log_c: float, a: float, b: float, log_break: float) -> Array:
    """C·x^−a below the break and steeper or flatter, with exponent b, beyond it; the bend is `_BEND` wide in ln x."""
    u = np.log(x)
    return np.exp(log_c - a * u - (b - a) * _BEND * np.logaddexp(0, (u - log_break) / _BEND))


def _fit_broken(x: Array, y: Array, offset: bool) -> tuple[float, ...]:
    """ln C, a, b and the break's ln x by least squares on ln y, from breaks at several places inside the data."""
    from scipy.optimize import least_squares

    u, log_y = np.log(x), np.log(y)
    low, high = np.quantile(u, [0.15, 0.85])
    slope, intercept = weighted_line(u, log_y, np.ones((1, len(y))))
    line = (float(intercept[0]), -float(slope[0]), -float(slope[0]))
    bounds = ([-np.inf, -np.inf, -np.inf, low], [np.inf, np.inf, np.inf, high + 1e-9])
    fits = [
        least_squares(lambda p: np.log(_broken_curve(x, *p)) - log_y, [*line, at], bounds=bounds, max_nfev=500)
        for at in np.linspace(low, high, 5)
    ]
    return tuple(map(float, min(fits, key=lambda fit: fit.cost).x))


def _uncentred(log_c: float, rate: float, centre: float, scale: float) -> tuple[float, float]:
    """ln C and rate in the units of u, from those in z = (u − centre)/scale."""
    return float(log_c + rate * centre / scale), float(rate / scale)


def _fit_logarithm(x: Array, y: Array, offset: bool) -> tuple[float, ...]:
    """A, B of A − B ln x by least squares on ln y; its parameters are the logarithms of the values at both ends,
    which keeps it positive over the data."""
    from scipy.optimize import least_squares

    log_x = np.log(x)
    span = np.ptp(log_x)
    share = (log_x - log_x.min()) / span
    ends = np.stack([1 - share, share], axis=1)

    def jacobian(p: Array) -> Array:
        terms = ends * np.exp(p)
        return terms / terms.sum(axis=1, keepdims=True)

    start = np.log([y[np.argmin(x)], y[np.argmax(x)]])
    fit = least_squares(lambda p: np.log(ends @ np.exp(p)) - np.log(y), start, **_exact(jacobian))
    first, last = np.exp(fit.x)
    slope = (first - last) / span
    return float(first + slope * log_x.min()), float(slope)


def _exact(jacobian: Callable[[Array], Array]) -> dict[str, Any]:
    """Options of `least_squares`: converge to rounding, with the analytic Jacobian."""
    return {"jac": jacobian, "xtol": 1e-15, "ftol": 1e-15, "gtol": 1e-15, "max_nfev": 2000}


_LAWS = {
    "power": _Law(
        "C / x^a",
        ("log_C", "a", "E"),
        lambda x, log_c, a, e=0.0: np.exp(log_c - a * np.log(x)) + e,
        lambda x, y, offset: _fit_falling(np.log(x), y, offset),
    ),
    "exponential": _Law(
        "C exp(-r x)",
        ("log_C", "r", "E"),
        lambda x, log_c, r, e=0.0: np.exp(log_c - r * x) + e,
        lambda x, y, offset: _fit_falling(x, y, offset),
    ),
    "logarithmic": _Law("A - B ln x", ("A", "B"), lambda x, a, b: a - b * np.log(x), _fit_logarithm),
    "broken": _Law("C / x^a, then ^b", ("log_C", "a", "b", "log_break"), _broken_curve, _fit_broken),
}
