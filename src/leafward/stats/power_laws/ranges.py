"""Which points to fit, and how far the fit carries: automatic and hand-chosen ranges, leave-largest-out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from leafward.errors import UsageError
from leafward.stats.power_laws import checks
from leafward.stats.power_laws.laws import fit_power_law
from leafward.stats.power_laws.results import PowerLawFit, Told
from leafward.stats.power_laws.separable import Array


@dataclass(frozen=True)
class RangeChoice(Told):
    """The range [low, high] of x over which ln y is straight in ln x, and the fit there.

    `curvature_p`: p-value of the quadratic term in that range; `stable` is False when no range passed the test
    and the shortest one allowed was taken. The fit's interval takes the range as given.
    """

    low: float
    high: float
    kept: int
    rows: int
    curvature_p: float
    stable: bool
    fit: PowerLawFit

    def predict(self, x: ArrayLike) -> Array:
        """The fitted y at x (k,)."""
        return self.fit.predict(x)

    def summary(self) -> str:
        straight = "straight" if self.stable else "not straight anywhere; shortest range taken"
        return (
            f"x from {self.low:.4g} to {self.high:.4g} ({self.kept} of {self.rows} rows, {straight}, "
            f"curvature p = {self.curvature_p:.2g}): {self.fit.summary()}"
        )


@dataclass(frozen=True)
class RangeReport(Told):
    """Fits over all points, over the automatic range, and over the hand-chosen one where given."""

    full: PowerLawFit
    automatic: RangeChoice
    hand: PowerLawFit | None

    def summary(self) -> str:
        parts = [f"all {self.full.exponent:.3g}", f"automatic {self.automatic.fit.exponent:.3g}"]
        if self.hand is not None:
            parts.append(f"by hand {self.hand.exponent:.3g}")
        return "exponent by range: " + ", ".join(parts)


@dataclass(frozen=True)
class Extrapolation(Told):
    """The rows at the largest x, predicted from all others. `error`: root mean square of ln(observed/predicted)."""

    x: float
    observed: tuple[float, ...]
    predicted: tuple[float, ...]
    error: float
    fit: PowerLawFit

    def summary(self) -> str:
        return (
            f"without x = {self.x:.4g} the exponent is {self.fit.exponent:.4g} and the "
            f"prediction there is off by {self.error:.1%} (rms, log)"
        )


def choose_range(x: ArrayLike, y: ArrayLike, *, significance: float = 0.05, min_points: int = 5) -> RangeChoice:
    """The longest range that ends at the largest x and in which the local slope is stable.

    A scaling law is a statement about large x, so points are dropped only from the small end, one x value at a
    time, until the quadratic term of ln y in ln x (the drift of the local slope) is not significant in a t test.
    The criterion has one error rate: a law that is straight throughout keeps all of its points with probability
    1 − `significance`. With few points a slight bend passes unseen; look at `compare_laws` as well.
    """
    x = checks.positive_vector("x", x)
    y = checks.positive_vector("y", y, len(x))
    checks.fraction("significance", significance)
    if min_points < 4:
        raise UsageError(f"min_points must be at least 4 (three parameters and an error), got {min_points}")
    checks.varied("x", x, min_points)
    values = np.unique(x)
    starts = values[: len(values) - min_points + 1]
    log_x, log_y = np.log(x), np.log(y)
    p = np.array([_curvature_p(log_x[x >= low], log_y[x >= low]) for low in starts])
    straight = np.flatnonzero(p > significance)
    chosen = int(straight[0]) if len(straight) else len(starts) - 1
    kept = x >= starts[chosen]
    return RangeChoice(
        low=float(starts[chosen]),
        high=float(x.max()),
        kept=int(kept.sum()),
        rows=len(x),
        curvature_p=float(p[chosen]),
        stable=len(straight) > 0,
        fit=fit_power_law(x[kept], y[kept]),
    )


def fit_ranges(
    x: ArrayLike,
    y: ArrayLike,
    *,
    hand: tuple[float, float] | None = None,
    significance: float = 0.05,
    min_points: int = 5,
) -> RangeReport:
    """The plain power law over all points, over the automatic range (`choose_range`), and over hand = (low, high)."""
    automatic = choose_range(x, y, significance=significance, min_points=min_points)
    x = checks.positive_vector("x", x)
    y = checks.positive_vector("y", y, len(x))
    by_hand = None
    if hand is not None:
        kept = (x >= hand[0]) & (x <= hand[1])
        if kept.sum() < 3:
            raise UsageError(f"hand range {hand} holds {kept.sum()} points, at least 3 are needed")
        by_hand = fit_power_law(x[kept], y[kept])
    return RangeReport(fit_power_law(x, y), automatic, by_hand)


def leave_largest_out(
    x: ArrayLike, y: ArrayLike, *, offset: bool = False, groups: Iterable[object] | None = None
) -> Extrapolation:
    """Fit without the rows at the largest x, predict them, and compare."""
    x = checks.positive_vector("x", x)
    y = checks.positive_vector("y", y, len(x))
    seen = x < x.max()
    known = unseen = None
    if groups is not None:
        names, index = checks.labels("groups", groups, len(x))
        label = np.array(names)[index]
        known, unseen = label[seen], label[~seen]
    fit = fit_power_law(x[seen], y[seen], offset=offset, groups=known)
    predicted = fit.predict(x[~seen], unseen)
    error = float(np.sqrt(np.mean(np.log(y[~seen] / predicted) ** 2)))
    return Extrapolation(float(x.max()), tuple(y[~seen].tolist()), tuple(predicted.tolist()), error, fit)


def _curvature_p(log_x: Array, log_y: Array) -> float:
    """Two-sided p-value of the quadratic term in ln y = α + β ln x + κ (ln x)²."""
    from scipy.stats import t

    z = (log_x - log_x.mean()) / log_x.std()
    basis, _ = np.linalg.qr(np.stack([np.ones_like(z), z, z**2], axis=1))
    along = basis.T @ log_y
    freedom = len(z) - 3
    residual = log_y - basis @ along
    # In the orthonormal basis the last coordinate is the quadratic term, with the error's own variance. Rounding
    # of an exact line must not look like curvature.
    rounding = 1e-14 * float(np.abs(log_y).max()) + 1e-15
    error = np.sqrt(residual @ residual / freedom) + rounding
    return float(2 * t.sf(abs(along[2]) / error, freedom))
