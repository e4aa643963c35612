"""The Huber fit of Hoffmann et al. (2022), with the repairs of Besiroglu et al. (2024).

The prediction is kept in logarithms, ln f_i = logsumexp_j(b_j + ln base_ij − a_e(j) u_i,e(j)), and
Σ_i ρ((ln y_i − ln f_i)/δ) is minimised with δ = 1e-3 by L-BFGS. The objective is the **sum** over rows, and it is
measured in units of δ²: with the mean of δ²-sized terms the optimiser's tolerance is met before the optimum is.
"""

from __future__ import annotations

import numpy as np

from leafward.stats.power_laws.separable import EXPONENT_RANGE, Array, Design, exponent_grid, project

DELTA = 1e-3

_STARTS = 8


class Objective:
    """The objective and its gradient over the packed parameters (b (J,), a (q,)); `counts` (n,) weighs the rows."""

    def __init__(self, design: Design, y: Array, counts: Array | None = None) -> None:
        self.design = design
        self.log_y = np.log(y)
        self.counts = np.ones(len(y)) if counts is None else counts
        with np.errstate(divide="ignore"):
            self.log_base = np.log(design.base)
        self.has_power = design.power >= 0
        # A column without power has u = 0, so that one formula serves all columns.
        self.u = np.where(self.has_power, design.u[:, design.power], 0.0)

    def __call__(self, parameters: Array) -> tuple[float, Array]:
        size = len(self.design.power)
        b, a = parameters[:size], parameters[size:]
        exponents = b + self.log_base - self.u * a[self.design.power]
        top = exponents.max(axis=1, keepdims=True)
        terms = np.exp(exponents - top)
        total = terms.sum(axis=1, keepdims=True)
        share = terms / total
        scaled = (self.log_y - (top + np.log(total))[:, 0]) / DELTA
        size_of = np.abs(scaled)
        loss = np.where(size_of <= 1, 0.5 * scaled**2, size_of - 0.5)
        pull = self.counts * np.clip(scaled, -1, 1) / DELTA
        by_column = pull @ share
        along_u = pull @ (share * self.u)
        gradient_a = np.zeros_like(a)
        np.add.at(gradient_a, self.design.power[self.has_power], along_u[self.has_power])
        return float(self.counts @ loss), np.concatenate([-by_column, gradient_a])


def fit_huber(design: Design, y: Array) -> tuple[Array, Array]:
    """Coefficients (J,) and exponents (q,): L-BFGS from the best of a grid over the exponents.

    For each grid point the coefficients start at their non-negative least-squares values, which replaces the
    coefficient axes of the customary grid of 4500 starts.
    """
    objective = Objective(design, y)
    grid = exponent_grid(design.u.shape[1])
    starts = _pack(project(design, grid, y[None], 1 / y[None] ** 2).c, grid, y)
    values = [objective(start)[0] for start in starts]
    chosen = starts[np.argsort(values, kind="stable")[:_STARTS]]
    finished = [_descend(objective, start, tolerance=1e-14) for start in chosen]
    best = min(finished, key=lambda parameters: objective(parameters)[0])
    return np.exp(best[: len(design.power)]), best[len(design.power) :]


def refit_huber(design: Design, y: Array, counts: Array, c: Array, a: Array) -> Array:
    """Exponents (B, q) for rows drawn counts (B, n) times, each fit started from the full fit (c, a)."""
    return refit_huber_whole(design, y, counts, c, a)[1]


def refit_huber_whole(design: Design, y: Array, counts: Array, c: Array, a: Array) -> tuple[Array, Array]:
    """Coefficients (B, J) and exponents (B, q) for rows drawn counts (B, n) times."""
    start = _pack(c[None], a[None], y)[0]
    size = len(design.power)
    # Resampling noise is far above 1e-9 of the objective.
    found = np.array([_descend(Objective(design, y, each), start, tolerance=1e-9) for each in counts])
    return np.exp(found[:, :size]), found[:, size:]


def _pack(c: Array, a: Array, y: Array) -> Array:
    """Parameters (P, J + q); a coefficient at zero starts at 1 % of y, where its gradient is not lost."""
    floor = 0.01 * y.min()
    return np.concatenate([np.log(np.maximum(c, floor)), a], axis=1)


def _descend(objective: Objective, start: Array, tolerance: float) -> Array:
    from scipy.optimize import minimize

    size = len(objective.design.power)
    bounds = [(None, None)] * size + [EXPONENT_RANGE] * (len(start) - size)
    options = {"maxiter": 5000, "maxfun": 20000, "ftol": tolerance, "gtol": 1e-6, "maxcor": 20}
    return minimize(objective, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options).x
