"""Variable projection for sums of power laws, many problems at once.

The model is separable: linear in its coefficients once the exponents are fixed,

    f_i = Σ_j c_j φ_ij(a),    φ_ij(a) = base_ij · exp(−a_e(j) u_i,e(j)),    c_j ≥ 0,

with u = ln x − mean(ln x), so that columns stay of order one whatever the unit of x, and with e(j) = −1 for
columns that carry no power (offsets). Projecting the coefficients out (Golub & Pereyra 1973) leaves a search
over the exponents alone: one dimension for L = C/m^a + offsets.

Shapes: P problems, n rows, J linear columns, q exponents. Arrays of P problems may have leading size 1 where
all problems share them.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

# Exponents outside this range are not told apart from a logarithm (below) or from a step (above).
EXPONENT_RANGE = (0.01, 10.0)

_GRID_POINTS = 1000  # at most about this many exponent vectors in the starting grid
_POLISHED_STARTS = 6  # grid points that are polished
_CHUNK_FLOATS = 4_000_000  # bound on one (P, n, J) temporary


@dataclass(frozen=True)
class Design:
    """The columns of a separable law. u (n, q); base (n, J); power (J,): exponent index of a column, or −1."""

    u: Array
    base: Array
    power: NDArray[np.intp]

    @property
    def n_parameters(self) -> int:
        return self.u.shape[1] + self.base.shape[1]

    def columns(self, a: Array) -> Array:
        """φ (P, n, J) for exponents a (P, q)."""
        powers = np.exp(-a[:, None, :] * self.u)
        powers = np.concatenate([powers, np.ones((*powers.shape[:2], 1))], axis=2)
        return self.base * powers[:, :, self.power]


@dataclass(frozen=True)
class Solution:
    """Fitted problems: a (P, q), c (P, J), values f (P, n), weighted residual sum of squares rss (P,),
    and slope (P, n, q): ∂f/∂a after the coefficients have followed."""

    a: Array
    c: Array
    f: Array
    rss: Array
    slope: Array

    def unit_errors(self, weight: Array) -> Array:
        """(P, q): standard errors of the exponents for errors of unit weighted size, to first order."""
        curvature = np.matmul((self.slope * weight[..., None]).transpose(0, 2, 1), self.slope)
        floor = 1e-12 * np.einsum("pkk->pk", curvature) + 1e-300
        curvature += np.eye(curvature.shape[1]) * floor[:, None, :]
        return np.sqrt(np.einsum("pkk->pk", np.linalg.inv(curvature)))


_FIELDS = ("a", "c", "f", "rss", "slope")


def nnls(gram: Array, moment: Array) -> Array:
    """argmin_c≥0 ½ cᵀ·gram·c − momentᵀc for P problems: gram (P, J, J), moment (P, J) -> c (P, J).

    Block principal pivoting (Kim & Park 2011): flip every column that breaks its optimality condition, and fall
    back to the last such column when the count of infeasible ones does not fall, which guarantees the end.
    Columns without weight (an offset whose group was not drawn) stay at zero.
    """
    scale = np.sqrt(np.einsum("pjj->pj", gram))
    present = scale > 0
    inverse = np.where(present, 1.0 / np.where(present, scale, 1.0), 0.0)
    gram = gram * inverse[:, :, None] * inverse[:, None, :]
    moment = moment * inverse
    passive = present.copy()
    size = gram.shape[1]
    patience = np.full(len(gram), 3)
    fewest = np.full(len(gram), size + 1)
    identity = np.eye(size)
    tolerance = 1e-12 * np.abs(moment).max(axis=1, initial=1e-300, keepdims=True)
    solution = np.zeros_like(moment)
    todo = np.arange(len(gram))
    while len(todo):
        keep = passive[todo]
        both = keep[:, :, None] & keep[:, None, :]
        # The ridge (1e-14 of a unit diagonal) makes coincident columns solvable without moving regular ones.
        system = np.where(both, gram[todo], 0.0) + identity * np.where(keep, 1e-14, 1.0)[:, None, :]
        trial = np.linalg.solve(system, np.where(keep, moment[todo], 0.0)[..., None])[..., 0]
        dual = np.einsum("pjk,pk->pj", gram[todo], trial) - moment[todo]
        solution[todo] = np.where(keep, np.maximum(trial, 0.0), 0.0)
        broken = np.where(keep, trial < 0, dual < -tolerance[todo]) & present[todo]
        count = broken.sum(axis=1)
        better = count < fewest[todo]
        patience[todo] = np.where(better, 3, patience[todo] - 1)
        fewest[todo] = np.minimum(fewest[todo], count)
        last = size - 1 - np.argmax(broken[:, ::-1], axis=1)
        single = identity[last].astype(bool) & broken
        passive[todo] ^= np.where((patience[todo] >= 0)[:, None], broken, single)
        # A hard stop for cycles that rounding alone can cause: the clipped solution stands.
        todo = todo[(count > 0) & (patience[todo] > -20 * size)]
    return solution * inverse


def project(design: Design, a: Array, y: Array, weight: Array) -> Solution:
    """The best coefficients for given exponents a (P, q); y and weight (P or 1, n)."""
    phi = design.columns(a)
    weighted = phi * weight[..., None]
    gram = np.matmul(weighted.transpose(0, 2, 1), phi)
    moment = np.matmul(weighted.transpose(0, 2, 1), np.broadcast_to(y, phi.shape[:2])[..., None])[..., 0]
    c = nnls(gram, moment)
    f = np.matmul(phi, c[..., None])[..., 0]
    residual = y - f
    rss = np.einsum("pn,pn->p", np.broadcast_to(weight, residual.shape), residual**2)
    return Solution(a, c, f, rss, _projected_slope(design, a, c, phi, weighted, gram))


def _projected_slope(design: Design, a: Array, c: Array, phi: Array, weighted: Array, gram: Array) -> Array:
    """∂f/∂a made orthogonal to the columns in use (Kaufman 1975): what a change of an exponent does to f after
    the coefficients have followed. (P, n, q)."""
    slope = np.empty((*phi.shape[:2], a.shape[1]))
    for k in range(a.shape[1]):
        mine = design.power == k
        slope[:, :, k] = -design.u[:, k] * np.matmul(phi[:, :, mine], c[:, mine, None])[..., 0]
    used = c > 0
    inner = np.where(used[:, :, None] & used[:, None, :], gram, 0.0)
    inner += np.eye(c.shape[1]) * np.where(used, 1e-14 * np.einsum("pjj->pj", gram), 1.0)[:, None, :]
    across = np.where(used[..., None], np.matmul(weighted.transpose(0, 2, 1), slope), 0.0)
    return slope - np.matmul(phi, np.linalg.solve(inner, across))


def minimise(
    design: Design, start: Array, y: Array, weight: Array, free: NDArray[np.bool_] | None = None, steps: int = 60
) -> Solution:
    """Levenberg–Marquardt on the projected problem, over ln a, from start (P, q); `free` (P, q) holds some fixed.

    Every problem has its own damping; those that have converged leave the batch.
    """
    free = np.ones(start.shape, dtype=bool) if free is None else free
    y, weight = (np.broadcast_to(each, (len(start), design.u.shape[0])) for each in (y, weight))
    parts = [
        _minimise(design, start[rows], y[rows], weight[rows], free[rows], steps) for rows in _chunks(design, len(start))
    ]
    return Solution(*(np.concatenate([getattr(part, name) for part in parts]) for name in _FIELDS))


def _minimise(design: Design, start: Array, y: Array, weight: Array, free: NDArray[np.bool_], steps: int) -> Solution:
    low, high = np.log(EXPONENT_RANGE[0]), np.log(EXPONENT_RANGE[1])
    best = project(design, start.copy(), y, weight)  # updated in place below
    damping = np.full(len(start), 1e-3)
    todo = np.arange(len(start))
    for _ in range(steps):
        if not (len(todo) and free.any()):
            break
        a = best.a[todo]
        slope = np.where(free[todo][:, None, :], best.slope[todo] * a[:, None, :], 0.0)
        weighted = (slope * weight[todo][..., None]).transpose(0, 2, 1)
        gradient = np.matmul(weighted, (y[todo] - best.f[todo])[..., None])[..., 0]
        curvature = np.matmul(weighted, slope)
        diagonal = np.einsum("pkk->pk", curvature)
        diagonal = np.where(diagonal > 0, diagonal * (1 + damping[todo][:, None]) + 1e-300, 1.0)
        np.einsum("pkk->pk", curvature)[...] = diagonal
        step = np.linalg.solve(curvature, gradient[..., None])[..., 0].clip(-1.0, 1.0)
        position = np.log(a)
        target = (position + step).clip(low, high)
        trial = project(design, np.where(free[todo], np.exp(target), a), y[todo], weight[todo])
        gain = best.rss[todo] - trial.rss
        accepted = gain > 0
        moved = np.abs(target - position).max(axis=1)
        for name in _FIELDS:
            getattr(best, name)[todo[accepted]] = getattr(trial, name)[accepted]
        damping[todo] = np.where(accepted, np.maximum(damping[todo] * 0.1, 1e-12), damping[todo] * 10)
        settled = (moved < 1e-10) | (np.abs(gain) < 1e-14 * trial.rss) | (damping[todo] > 1e8)
        todo = todo[~settled]
    return best


def _chunks(design: Design, problems: int) -> list[slice]:
    """Slices of the problems that keep (P, n, J) temporaries within bounds."""
    size = max(1, _CHUNK_FLOATS // design.base.size)
    return [slice(i, i + size) for i in range(0, problems, size)]


def exponent_grid(q: int) -> Array:
    """Starting exponents (about 1000 at most, q): a product grid, finer the fewer exponents there are."""
    per_axis = min(40, max(3, int(_GRID_POINTS ** (1 / q))))
    return np.array(list(itertools.product(np.geomspace(0.05, 4.0, per_axis), repeat=q)))


def best_fit(design: Design, y: Array, weight: Array) -> Solution:
    """The global fit of one problem (P = 1): a grid over the exponents, the best few polished."""
    grid = exponent_grid(design.u.shape[1])
    rss = np.concatenate([project(design, grid[rows], y, weight).rss for rows in _chunks(design, len(grid))])
    starts = grid[np.argsort(rss, kind="stable")[:_POLISHED_STARTS]]
    fits = minimise(design, starts, y, weight, steps=200)
    winner = int(np.argmin(fits.rss))
    return Solution(*(getattr(fits, name)[winner : winner + 1] for name in _FIELDS))
