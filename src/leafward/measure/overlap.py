"""Overlaps of the rows of a matrix, streamed: what m×m sums tell exactly, and what sampled rows estimate.

With û_i the unit rows (n of them, width m), S = Σ û_i û_iᵀ and s = Σ û_i,

    mean overlap           (‖s‖² − n) / (n(n−1))          mean over ordered pairs i ≠ j of û_i·û_j
    mean squared overlap   (‖S‖_F² − n) / (n(n−1))
    participation ratio    n² / ‖S‖_F²
    interference of row i  (û_iᵀ S û_i − 1) / (n−1)       its own mean squared overlap

Blocks of S come from float32 GEMMs (never TF32) and are added up in float64.
Legend: k rows of a slice, r probe rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from leafward.errors import DataError
from leafward.measure.audit_pairs import Estimate, PairSums, gram_sums, probe_sums
from leafward.measure.matrix_files import Matrix

STRIP = 1024  # columns of S, or rows of a slice, per GEMM: bounds the temporaries
SHUFFLE_ROWS = 4096

Advance = Callable[[int], None]


@dataclass(frozen=True)
class Centre:
    """A mean (m,) in two float32 parts, so that x − mean is right to float32 even when they nearly cancel."""

    high: torch.Tensor
    low: torch.Tensor

    @staticmethod
    def of(mean: torch.Tensor) -> Centre:
        high = mean.float()
        return Centre(high, (mean - high.double()).float())


@dataclass(frozen=True)
class Scan:
    """What one look at every row gives: norms (n,), the mean row (m,), copies, and a few rows at random.

    `norms` is 0 for zero rows; `sample` (r, m) holds the rows `sample_index` (r,), in random order.
    """

    norms: torch.Tensor
    mean: torch.Tensor
    duplicate_rows: int
    sample: torch.Tensor
    sample_index: torch.Tensor


@dataclass(frozen=True)
class Overlaps:
    """Exact figures of one set of unit rows, and the sums over pairs that estimates are made of."""

    rows: int
    left_out: int
    mean_overlap: float
    mean_squared_overlap: float
    participation_ratio: float
    effective_rank: float
    top_share: float
    interference: np.ndarray
    pairs: PairSums


def unit_rows(x: torch.Tensor, centre: Centre | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn the rows of x (k, m) into unit rows, in place: (unit rows, which rows count (k,)).

    With a centre the mean is subtracted first. Rows that do not count become zero: those that were zero, and
    those that equal the centre to rounding. Rows are scaled by their largest entry before they are squared, so
    that nothing over- or underflows.
    """
    peak = _peak(x)
    alive = peak > 0
    if centre is not None:
        x.sub_(centre.high).sub_(centre.low)
        before, peak = peak, _peak(x)
        alive &= peak > 4 * torch.finfo(x.dtype).eps * before
    x.div_(torch.where(alive, peak, torch.inf)[:, None])
    norm = torch.linalg.vector_norm(x, dim=1, keepdim=True)  # at least 1 where the row counts, else 0
    return x.div_(norm.clamp_(min=1.0)), alive


def _peak(x: torch.Tensor) -> torch.Tensor:
    """Largest |entry| of each row (k, m) -> (k,); NaN if a row holds one."""
    return torch.maximum(x.amax(1), -x.amin(1))


class Frame:
    """The running sums S = Σ w_i û_i û_iᵀ (m, m) and s = Σ w_i û_i (m,), float64, w_i = 1 unless given."""

    def __init__(self, width: int, device: torch.device) -> None:
        self.outer = torch.zeros(width, width, dtype=torch.float64, device=device)
        self.total = torch.zeros(width, dtype=torch.float64, device=device)

    def add(self, unit: torch.Tensor, weight: torch.Tensor | None = None) -> None:
        """Add unit rows (k, m) with weights (k,). Only the upper triangle of strips is computed."""
        weighted = unit if weight is None else unit * weight[:, None]
        self.total += weighted.sum(0)
        for first in range(0, unit.shape[1], STRIP):
            strip = slice(first, first + STRIP)
            self.outer[strip, first:] += weighted[:, strip].T @ unit[:, first:]

    def symmetric(self) -> torch.Tensor:
        """S with its lower triangle filled in (in place)."""
        for first in range(0, self.outer.shape[0], STRIP):
            strip = slice(first, first + STRIP)
            self.outer[first + STRIP :, strip] = self.outer[strip, first + STRIP :].T
        return self.outer


def scan(matrix: Matrix, device: torch.device, sample: int, seed: int, advance: Advance) -> Scan:
    """Look at every row once: refuse what is not finite, measure norms, keep `sample` rows at random."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(matrix.rows, generator=generator)[:sample]
    order, position = chosen.sort()
    keys = torch.randint(-(2**62), 2**62, (matrix.width,), generator=generator).to(device)
    norms = torch.zeros(matrix.rows, dtype=torch.float64, device=device)
    prints = torch.zeros(matrix.rows, dtype=torch.int64, device=device)
    kept = torch.zeros(len(chosen), matrix.width, device=device)
    total = torch.zeros(matrix.width, dtype=torch.float64, device=device)
    for first, block in matrix.slices(device):
        last = first + len(block)
        inside = slice(*torch.searchsorted(order, torch.tensor([first, last])).tolist())
        kept[position[inside].to(device)] = block[(order[inside] - first).to(device)]
        for rows, part in zip(prints[first:last].split(STRIP), block.split(STRIP), strict=True):
            # A row's fingerprint modulo 2^64: equal rows have equal ones, others hardly ever.
            rows.copy_(part.view(torch.int32).long().mul_(keys).sum(1))
            total += part.sum(0, dtype=torch.float64)
        scale = _peak(block)
        scale = torch.where(scale == 0, 1, scale)
        norms[first:last] = torch.linalg.vector_norm(block.div_(scale[:, None]), dim=1).double() * scale
        advance(len(block))
    _refuse_broken(matrix, norms)
    alive = norms > 0
    rows = int(alive.sum())
    if rows < 2:
        raise DataError(f"{matrix.target}: {matrix.tensor} has {rows} non-zero rows; overlaps need at least two")
    live = (norms[chosen.to(device)] > 0).nonzero().squeeze(1)
    return Scan(
        norms=norms,
        mean=total / rows,
        duplicate_rows=rows - len(prints[alive].unique()),
        sample=kept[live],
        sample_index=chosen.to(device)[live],
    )


def _refuse_broken(matrix: Matrix, norms: torch.Tensor) -> None:
    broken = (~norms.isfinite()).nonzero().squeeze(1)
    if len(broken):
        shown = ", ".join(str(index) for index in broken[:8].tolist()) + (", …" if len(broken) > 8 else "")
        raise DataError(
            f"{matrix.target}: {matrix.tensor} has {len(broken)} of {len(norms)} rows with NaN or values that "
            f"are infinite in float32: {shown}; fix or remove them before the audit"
        )


def measure(
    matrix: Matrix,
    scanned: Scan,
    centre: Centre | None,
    *,
    probes: int,
    exact: bool,
    advance: Advance,
) -> Overlaps:
    """Exact figures of all rows, seen from `centre` if given, and pair sums of `probes` rows (all if `exact`)."""
    with full_float32():
        frame, alive = _sum_rows(matrix, centre, scanned.norms.device, advance)
        rows = int(alive.sum())
        if rows < 2:
            raise DataError(f"{matrix.target}: {matrix.tensor} has {rows} rows that differ from the mean row")
        outer = frame.symmetric()
        potential = float(torch.linalg.vector_norm(outer)) ** 2
        share = torch.linalg.eigvalsh(outer).clamp_(min=0) / rows
        length = float(frame.total.square().sum())
        outer = outer.float()
        del frame  # S in float64 makes room for the second pass
        own, sums = _meet_rows(matrix, scanned, centre, outer, 0 if exact else probes, advance)
        if exact:
            sums = gram_sums(matrix, lambda block: unit_rows(block, centre)[0], outer.device, advance)
    own = torch.where(alive, (own - 1).clamp_(min=0) / (rows - 1), torch.nan)
    pairs = rows * (rows - 1)
    return Overlaps(
        rows=rows,
        left_out=matrix.rows - rows,
        mean_overlap=(length - rows) / pairs,
        mean_squared_overlap=max(0.0, potential - rows) / pairs,
        participation_ratio=rows**2 / potential,
        effective_rank=float(torch.exp(-torch.special.xlogy(share, share).sum())),
        top_share=float(share[-1]),
        interference=own.cpu().numpy(),
        pairs=sums.settle(alive),
    )


def _sum_rows(
    matrix: Matrix, centre: Centre | None, device: torch.device, advance: Advance
) -> tuple[Frame, torch.Tensor]:
    """First pass: the sums S and s, and which rows count (n,)."""
    frame = Frame(matrix.width, device)
    alive = torch.zeros(matrix.rows, dtype=torch.bool, device=device)
    for first, block in matrix.slices(device):
        unit, alive[first : first + len(block)] = unit_rows(block, centre)
        frame.add(unit)
        advance(len(unit))
    return frame, alive


def _meet_rows(
    matrix: Matrix,
    scanned: Scan,
    centre: Centre | None,
    outer: torch.Tensor,
    probes: int,
    advance: Advance,
) -> tuple[torch.Tensor, PairSums]:
    """Second pass: û_iᵀ S û_i of every row (n,), and the overlaps of the probe rows with every row."""
    sample, live = unit_rows(scanned.sample[:probes].clone(), centre)
    sample = sample[live]
    sums = PairSums.empty(scanned.sample_index[:probes][live])
    own = torch.zeros(matrix.rows, dtype=torch.float64, device=outer.device)
    for first, block in matrix.slices(outer.device):
        unit, _ = unit_rows(block, centre)
        own[first : first + len(unit)] = _quadratic(unit, outer)
        probe_sums(sums, sample, unit, first)
        advance(len(unit))
    return own, sums


def _quadratic(unit: torch.Tensor, outer: torch.Tensor) -> torch.Tensor:
    """û_iᵀ S û_i for unit rows (k, m) and S (m, m): (k,)."""
    return torch.cat([((part @ outer) * part).sum(1) for part in unit.split(STRIP)]).double()


def weighted_squared_overlap(
    matrix: Matrix, weight: torch.Tensor, device: torch.device, centre: Centre | None, advance: Advance
) -> float:
    """Mean squared overlap of two different rows drawn with probabilities ∝ `weight` (n,), exact.

    (‖Σ w_i û_i û_iᵀ‖_F² − Σ w_i²) / ((Σ w_i)² − Σ w_i²).
    """
    frame = Frame(matrix.width, device)
    total = square = 0.0
    with full_float32():
        for first, block in matrix.slices(device):
            unit, alive = unit_rows(block, centre)
            part = weight[first : first + len(unit)] * alive
            frame.add(unit, part.float())
            total, square = total + float(part.sum()), square + float(part.square().sum())
            advance(len(unit))
    potential = float(torch.linalg.vector_norm(frame.symmetric())) ** 2
    different = total**2 - square
    return max(0.0, potential - square) / different if different > 0 else float("nan")


def shuffled_squared_overlap(scanned: Scan, centre: Centre | None, seed: int) -> Estimate:
    """Mean squared overlap and its standard error after permuting every column on its own.

    Permuting keeps each coordinate's values and destroys what the coordinates say together. At most
    SHUFFLE_ROWS rows drawn at random are permuted among themselves; the mean over their pairs is unbiased.
    """
    rows = scanned.sample[:SHUFFLE_ROWS]
    mixed = torch.empty_like(rows)
    generator = torch.Generator().manual_seed(seed)
    for columns in range(0, rows.shape[1], STRIP):
        part = rows[:, columns : columns + STRIP]
        order = torch.rand(part.shape, generator=generator).to(rows.device).argsort(0)
        mixed[:, columns : columns + STRIP] = part.gather(0, order)
    unit, alive = unit_rows(mixed, centre)
    unit = unit[alive]
    count = len(unit)
    if count < 2:
        return Estimate(float("nan"), float("nan"))
    frame = Frame(unit.shape[1], unit.device)
    with full_float32():
        frame.add(unit)
        own = (_quadratic(unit, frame.symmetric().float()) - 1) / (count - 1)
    # A mean over pairs is a U-statistic of degree 2: to leading order its variance is 4 Var(row means) / count.
    return Estimate(float(own.mean()), float(2 * own.std() / count**0.5))


@contextmanager
def full_float32() -> Iterator[None]:
    """Matrix products in true float32 (no TF32, no bf16 passes) inside the block."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
