"""Intervals for exponents: profile likelihood, the (cluster) bootstrap, and Student's t for a straight line."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from leafward.stats.estimate import Interval
from leafward.stats.power_laws.separable import EXPONENT_RANGE, Array, Design, Solution, minimise

_EXPANSIONS = 12  # doublings of the distance while a profile end is being bracketed
_REFINEMENTS = 40  # at most this many false-position steps; four to six are usual


def profile_likelihood(design: Design, fit: Solution, y: Array, weight: Array, level: float) -> tuple[Array, Array]:
    """Ends (q,), (q,) of the set of exponents that the data do not reject.

    Under Gaussian errors of unknown size, {a_k : RSS(a_k) ≤ RSS_min (1 + F/(n−p))} with F the `level` quantile of
    the F distribution with (1, n−p) degrees of freedom; RSS(a_k) is minimised over all other parameters. The
    F quantile, not that of χ², is what makes six widths enough. An end that the data leave open is the end of
    `EXPONENT_RANGE`.
    """
    from scipy.stats import f as f_distribution

    n, q = design.u.shape
    freedom = n - design.n_parameters
    quantile = f_distribution.ppf(level, 1, freedom)
    rounding = n * 1e-30 * float(np.mean(weight * y**2))  # keeps the interval of an exact law at a point
    variance = (float(fit.rss[0]) + rounding) / freedom
    goal = np.sqrt(variance * quantile)
    reach = np.clip(goal * fit.unit_errors(weight)[0] / fit.a[0], 1e-12, 0.5)

    # One row per end: lower ends of all exponents, then upper ends.
    side = np.repeat([-1.0, 1.0], q)
    which = np.tile(np.arange(q), 2)
    rows = np.arange(2 * q)
    fixed = np.zeros((2 * q, q), dtype=bool)
    fixed[rows, which] = True
    current = np.repeat(fit.a, 2 * q, axis=0)

    def excess(position: Array) -> Array:
        """Distance to the goal, nearly linear in ln a; the other exponents start where they were last."""
        current[rows, which] = np.exp(position)
        conditional = minimise(design, current, y, weight, free=~fixed)
        current[...] = conditional.a
        return np.sqrt(np.maximum(conditional.rss - fit.rss[0], 0.0)) - goal

    limit = np.log(np.where(side < 0, *EXPONENT_RANGE))
    ends = np.exp(_crossing(excess, np.log(fit.a[0])[which], goal, side * reach[which], limit))
    return ends[:q], ends[q:]


def _crossing(excess: Callable[[Array], Array], start: Array, goal: float, step: Array, limit: Array) -> Array:
    """Where `excess`, which is −goal at start (R,), first reaches zero in the direction of step, else limit.

    R searches at once: double the distance until zero lies between, then false position (Illinois).
    """

    def onward(position: Array, step: Array) -> Array:
        return np.where(step < 0, np.maximum(position + step, limit), np.minimum(position + step, limit))

    inner, inner_excess = start, np.full_like(start, -goal)
    outer = onward(start, step)
    outer_excess = excess(outer)
    for _ in range(_EXPANSIONS):
        short = (outer_excess < 0) & (outer != limit)
        if not short.any():
            break
        step = 2 * step
        inner, inner_excess = np.where(short, outer, inner), np.where(short, outer_excess, inner_excess)
        outer = np.where(short, onward(outer, step), outer)
        outer_excess = excess(outer)
    never = outer_excess < 0
    position, value, was_beyond = np.where(never, limit, outer), outer_excess, ~never
    for _ in range(_REFINEMENTS):
        if np.all(never | (np.abs(value) < 1e-6 * goal) | (np.abs(outer - inner) < 1e-9)):
            break
        share = inner_excess / np.where(never, -1.0, inner_excess - outer_excess)
        position = np.where(never, limit, inner + (outer - inner) * share)
        value = excess(position)
        # An end that stays put twice running has its value halved, so that both ends close in.
        beyond = value >= 0
        kept = np.where(beyond == was_beyond, 0.5, 1.0)
        inner_excess = np.where(beyond, kept * inner_excess, value)
        outer_excess = np.where(beyond, value, kept * outer_excess)
        inner, outer = np.where(beyond, inner, position), np.where(beyond, position, outer)
        was_beyond = beyond
    return position


def draw_counts(cluster: NDArray[np.intp], resamples: int, seed: int) -> Array:
    """How often each row is drawn, (resamples, n), when whole clusters are drawn with replacement."""
    clusters = int(cluster.max()) + 1
    draws = np.random.default_rng(seed).multinomial(clusters, np.full(clusters, 1 / clusters), size=resamples)
    return draws[:, cluster].astype(np.float64)


def resample_exponents(design: Design, fit: Solution, y: Array, weight: Array, counts: Array) -> Array:
    """Exponents (B, q) refitted to each resample, all at once, each started from the full fit."""
    refits = minimise(design, np.repeat(fit.a, len(counts), axis=0), y, weight * counts)
    # A resample that holds too few different x, or in which y does not fall, says nothing about the exponent:
    # place those at both ends of the range in turn, so that they widen the interval instead of leaving it.
    sensitivity = np.einsum("pn,pnk->pk", weight * counts, refits.slope**2) * refits.a**2
    silent = sensitivity < 1e-14 * np.einsum("pn,pn->p", weight * counts, refits.f**2)[:, None]
    ends = np.where(np.arange(len(counts)) % 2, *EXPONENT_RANGE)[:, None]
    return np.where(silent, ends, refits.a)


def bootstrap_interval(
    estimate: float, draws: Array, clusters: int, level: float, unit: str, logarithmic: bool
) -> Interval:
    """estimate ± t_{G−1} √(G/(G−1)) s*, with s* the spread of the bootstrap draws (B,) over G clusters.

    s* is half the central 68.27 % range, which the few resamples that hardly determine the exponent cannot
    inflate. Student's t and the factor √(G/(G−1)) repair what makes percentile intervals too short when there
    are few clusters (Hesterberg 2015). Positive exponents are treated in logarithms.
    """
    from scipy.stats import norm, t

    values = np.log(draws) if logarithmic else draws
    low, high = np.quantile(values, norm.cdf([-1.0, 1.0]))
    error = 0.5 * (high - low) * np.sqrt(clusters / (clusters - 1))
    reach = t.ppf(0.5 + level / 2, clusters - 1) * error
    method = f"bootstrap over {clusters} {unit}, {len(draws)} resamples, Student t"
    if logarithmic:
        low, high = np.clip(estimate * np.exp([-reach, reach]), *EXPONENT_RANGE)
        return Interval(float(low), float(high), level=level, method=method, standard_error=float(estimate * error))
    return Interval(
        float(estimate - reach), float(estimate + reach), level=level, method=method, standard_error=float(error)
    )
