"""Sums over pairs of unit rows that no m×m matrix can give, for a few probe rows or for all, and estimates.

The fourth moment Σ(û_i·û_j)⁴, the mean |overlap|, the histogram and the nearest neighbour need the overlaps
themselves: of r random rows with all n, or, exactly, of all pairs in blocks of the Gram matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from leafward.measure.matrix_files import Matrix

BINS = 400  # of the histogram, over [−1, 1]
PROBES = 1024  # probe rows per tile of overlaps


@dataclass(frozen=True)
class Estimate:
    """A value and its standard error: 0 if `exact`, NaN where too few rows were sampled to tell."""

    value: float
    error: float = 0.0
    exact: bool = False


@dataclass
class PairSums:
    """Sums over all partners of each probe row: Σo⁴ and Σ|o| (r,), its nearest |o| (r,), histogram counts.

    `index` (r,) says which rows the probes are. `counts` is (r, BINS), or (BINS,) over all pairs if `whole`.
    """

    index: torch.Tensor
    fourth: torch.Tensor
    absolute: torch.Tensor
    nearest: torch.Tensor
    nearest_index: torch.Tensor
    counts: torch.Tensor
    whole: bool

    @staticmethod
    def empty(index: torch.Tensor, whole: bool = False) -> PairSums:
        rows, device = len(index), index.device
        return PairSums(
            index=index,
            fourth=torch.zeros(rows, dtype=torch.float64, device=device),
            absolute=torch.zeros(rows, dtype=torch.float64, device=device),
            nearest=torch.full((rows,), -1.0, device=device),
            nearest_index=torch.full((rows,), -1, dtype=torch.int64, device=device),
            counts=torch.zeros((BINS,) if whole else (rows, BINS), dtype=torch.int64, device=device),
            whole=whole,
        )

    def add(self, rows: slice, first: int, overlap: torch.Tensor, mirror: bool = False) -> None:
        """Add a tile: overlaps (a, b) of the probes `rows` with matrix rows first, first+1, …

        With `mirror`, probes are all rows, and the tile counts for its columns too.
        """
        self._count(rows, overlap, 2 if mirror else 1)
        magnitude = overlap.abs_()
        fourth = magnitude.square().square_()
        self._reduce(rows, first, fourth, magnitude, dim=1)
        if mirror:
            self._reduce(slice(first, first + overlap.shape[1]), rows.start, fourth, magnitude, dim=0)

    def _reduce(self, rows: slice, first: int, fourth: torch.Tensor, magnitude: torch.Tensor, dim: int) -> None:
        self.fourth[rows] += fourth.sum(dim)
        self.absolute[rows] += magnitude.sum(dim)
        best, where = magnitude.max(dim)
        better = best > self.nearest[rows]
        self.nearest[rows] = torch.where(better, best, self.nearest[rows])
        self.nearest_index[rows] = torch.where(better, where + first, self.nearest_index[rows])

    def _count(self, rows: slice, overlap: torch.Tensor, weight: int) -> None:
        bins = ((overlap + 1) * (BINS / 2)).to(torch.int32).clamp_(0, BINS - 1)
        if self.whole:
            self.counts += weight * torch.bincount(bins.flatten(), minlength=BINS)
        else:
            bins += torch.arange(len(bins), dtype=torch.int32, device=bins.device)[:, None] * BINS
            self.counts[rows] += torch.bincount(bins.flatten(), minlength=bins.shape[0] * BINS).view(-1, BINS)

    def settle(self, alive: torch.Tensor) -> PairSums:
        """Drop rows that are left out (alive (n,) is False) and the zero overlaps that stood for them.

        Pairs of a row with itself or with a left-out row entered every tile as 0: they are taken out of the
        histogram's bin at 0, which is all that they touched.
        """
        partners = int(alive.sum()) - 1
        expected = partners * (partners + 1) if self.whole else partners
        self.counts[..., BINS // 2] -= self.counts.sum(-1) - expected
        keep = alive[self.index]
        return PairSums(
            self.index[keep],
            self.fourth[keep],
            self.absolute[keep],
            self.nearest[keep],
            self.nearest_index[keep],
            self.counts,
            self.whole,
        )


def probe_sums(sums: PairSums, probes: torch.Tensor, unit: torch.Tensor, first: int) -> None:
    """Add the overlaps of the probe rows (r, m) with unit rows first, first+1, … (k, m)."""
    for top in range(0, len(probes), PROBES):
        rows = slice(top, min(top + PROBES, len(probes)))
        overlap = probes[rows] @ unit.T
        own = sums.index[rows] - first
        inside = ((own >= 0) & (own < len(unit))).nonzero().squeeze(1)
        overlap[inside, own[inside]] = 0
        sums.add(rows, first, overlap)


def gram_sums(
    matrix: Matrix,
    unit_rows: Callable[[torch.Tensor], torch.Tensor],
    device: torch.device,
    advance: Callable[[int], None],
) -> PairSums:
    """The same sums for every row: all blocks of the upper triangle of the Gram matrix, n²m FLOP."""
    sums = PairSums.empty(torch.arange(matrix.rows, device=device), whole=True)
    for start, block in matrix.slices(device):
        left = unit_rows(block)
        for first, other in matrix.slices(device, start):
            right = unit_rows(other)
            for top in range(0, len(left), PROBES):
                rows = slice(start + top, start + min(top + PROBES, len(left)))
                overlap = left[top : top + PROBES] @ right.T
                if first == start:
                    overlap.diagonal(top).zero_()
                sums.add(rows, first, overlap, mirror=first != start)
            advance(len(right))
    return sums


def regression_estimate(value: np.ndarray, control: np.ndarray, population: np.ndarray) -> Estimate:
    """Mean over a population of a quantity known for r sampled members, helped by a control known for all.

    `value` and `control` (r,) belong to members drawn without replacement; `population` holds the control of
    every member. The value is regressed on (1, z, z²), z the standardised control, whose population means are
    1, 0, 1 exactly; the prediction there is the estimate. Its standard error comes from the residuals, each
    divided by 1 − leverage (HC3), so that neither curvature nor unequal scatter makes it too small.
    """
    total = len(population)
    mean, spread = float(population.mean()), float(population.std())
    if len(value) >= total:
        return Estimate(float(value.mean()), exact=True)
    if len(value) < 2:
        return Estimate(float(value.mean()) if len(value) else float("nan"), float("nan"))
    if spread > 1e-9 * abs(mean) and len(value) >= 12:
        z = (control - mean) / spread
        design, target = np.stack([np.ones_like(z), z, z**2], axis=1), np.array([1.0, 0.0, 1.0])
    else:
        design, target = np.ones((len(value), 1)), np.ones(1)
    inverse = np.linalg.pinv(design)
    residual = value - design @ (inverse @ value)
    leverage = np.einsum("ij,ji->i", design, inverse)
    weight = inverse.T @ target
    scatter = weight * residual / np.maximum(1 - leverage, 1e-3)
    return Estimate(float(weight @ value), float(np.sqrt((1 - len(value) / total) * np.sum(scatter**2))))
