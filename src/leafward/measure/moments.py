"""Superposition and spectrum of a whole matrix from Gram products, exactly, reading it in slices.

For unit rows û_i (n of them, width m), S = Σ û_i û_iᵀ; all figures of overlaps are functions of its eigenvalues and of
Σ û_i (`leafward.measure.overlap` has the formulas), as those of the spectrum are of XᵀX. A tall matrix takes three m ×
m products: X, unit rows, and, in a second pass, unit rows with the mean removed. Of a wide one (n ≤ m) the n × n
product of the rows gives all three. Products are float32, sums over slices float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from leafward.data.arrays import RowReader
from leafward.measure.spectrum import NO_TAIL, Tail, effective_rank, fit_tail, stable_rank

SLICE_BYTES = 64 << 20  # of float32 rows at a time
STRIP = 512  # rows that stay in the cache while they are normalised
SMALL = 4 * float(np.finfo(np.float32).eps)

Advance = Callable[[int], None]


@dataclass(frozen=True)
class Overlap:
    """Figures of unit rows: mean overlap, m·⟨o²⟩, participation ratio, effective rank of S or NaN."""

    rows: int
    mean: float
    scaled: float
    participation: float
    effective_rank: float


@dataclass(frozen=True, eq=False)
class Moments:
    """All exact figures of a matrix; `norms` (n,), `mean` (m,); `sample` (r, m) holds the rows `index` (r,), mixed."""

    norms: np.ndarray
    raw: Overlap
    centred: Overlap
    frobenius: float
    spectral: float
    stable_rank: float
    eigenvalues: np.ndarray
    tail: Tail
    sample: np.ndarray
    index: np.ndarray


NO_OVERLAP = Overlap(0, np.nan, np.nan, np.nan, np.nan)


class Rows:
    """A matrix that is read in slices of float32 rows; of some rows only where `keep` (n,) is given."""

    def __init__(self, reader: RowReader, rows: int, keep: np.ndarray | None = None) -> None:
        self.reader, self.stored, self.keep = reader, rows, keep
        self.width = reader.shape[1]
        self.rows = rows if keep is None else int(keep.sum())
        self.step = max(1, SLICE_BYTES // (4 * max(self.width, 1)))

    def slices(self) -> Iterator[tuple[int, np.ndarray]]:
        """(first row among those kept, rows (k, m) that the caller owns)."""
        first = 0
        for start in range(0, self.stored, self.step):
            stop = min(start + self.step, self.stored)
            block = self.reader.read(start, stop).to(torch.float32).numpy()
            if self.keep is not None:
                block = block[self.keep[start:stop]]
            if len(block):
                yield first, block
                first += len(block)

    def columns(self, first: int, last: int) -> np.ndarray:
        """All rows of columns first … last − 1 (n, k)."""
        parts = []
        for start in range(0, self.stored, self.step):
            stop = min(start + self.step, self.stored)
            part = self.reader.read(start, stop)[:, first:last].to(torch.float32).numpy()
            parts.append(part if self.keep is None else part[self.keep[start:stop]])
        return np.concatenate(parts)


def moments(matrix: Rows, sample: int, seed: int, advance: Advance = lambda rows: None) -> Moments:
    """Measure a matrix; `sample` rows are kept, chosen at random by `seed`."""
    chosen = np.random.default_rng(seed).permutation(matrix.rows)[:sample]
    with np.errstate(over="ignore", invalid="ignore"):
        return _wide(matrix, chosen, advance) if matrix.rows <= matrix.width else _tall(matrix, chosen, advance)


def _tall(matrix: Rows, chosen: np.ndarray, advance: Advance) -> Moments:
    """Products of the columns: three of m × m."""
    width = matrix.width
    kept = np.empty((len(chosen), width), dtype=np.float32)
    order = chosen.argsort()
    norms = np.empty(matrix.rows)
    plain, outer = np.zeros((width, width)), np.zeros((width, width))
    total, unit_total = np.zeros(width), np.zeros(width)
    for first, block in matrix.slices():
        last = first + len(block)
        left, right = np.searchsorted(chosen[order], [first, last])
        kept[order[left:right]] = block[chosen[order[left:right]] - first]
        total += _sum(block)
        plain += block.T @ block
        norms[first:last] = _normalise(block)
        unit_total += _sum(block)
        outer += block.T @ block
        advance(len(block))
    mean = total / max(int((norms > 0).sum()), 1)
    centred, live, centred_total = np.zeros((width, width)), 0, np.zeros(width)
    if np.isfinite(norms).all():
        for _, block in matrix.slices():
            live += int((_normalise(block, mean) > 0).sum())
            centred_total += _sum(block)
            centred += block.T @ block
            advance(len(block))
    rows = int((norms > 0).sum())
    raw = _overlap(rows, width, float((unit_total**2).sum()), float((outer**2).sum()), _eigenvalues(outer))
    flat = _overlap(live, width, float((centred_total**2).sum()), float((centred**2).sum()), None)
    return _together(norms, raw, flat, _eigenvalues(plain), kept, chosen)


def _wide(matrix: Rows, chosen: np.ndarray, advance: Advance) -> Moments:
    """One product of the rows, n × n, from which unit rows and the mean are taken afterwards."""
    rows, width = matrix.rows, matrix.width
    gram = np.zeros((rows, rows))
    kept = np.empty((len(chosen), width), dtype=np.float32)
    step = max(1, SLICE_BYTES // (4 * max(rows, 1)))
    for start in range(0, width, step):
        part = matrix.columns(start, min(start + step, width))
        kept[:, start : start + step] = part[chosen]
        gram += part @ part.T
        advance(max(1, 2 * rows * part.shape[1] // width))
    norms = np.sqrt(np.maximum(gram.diagonal(), 0))
    raw, rank = _of_gram(gram, norms, width), _eigenvalues(gram)
    alive = norms > 0
    flat = gram - (gram.sum(0) / max(alive.sum(), 1))[None] - (gram.sum(0) / max(alive.sum(), 1))[:, None]
    flat += gram.sum() / max(alive.sum(), 1) ** 2
    lengths = np.sqrt(np.maximum(flat.diagonal(), 0))
    lengths[(lengths <= 1e-5 * norms) | ~alive] = 0
    centred = _of_gram(flat, lengths, width, rank=False)
    return _together(norms, raw, centred, rank, kept, chosen)


def _of_gram(gram: np.ndarray, norms: np.ndarray, width: int, rank: bool = True) -> Overlap:
    """Figures of unit rows by the inner products (n, n) of the rows; rows of norm 0 are left out."""
    alive = np.flatnonzero(norms > 0)
    if len(alive) < 2 or not np.isfinite(norms).all():
        return NO_OVERLAP
    unit = gram if len(alive) == len(gram) else gram[np.ix_(alive, alive)]
    unit = unit / norms[alive, None] / norms[alive]
    values = _eigenvalues(unit) if rank else None
    return _overlap(len(alive), width, float(unit.sum()), float((unit**2).sum()), values)


def _overlap(rows: int, width: int, length: float, potential: float, values: np.ndarray | None) -> Overlap:
    """`length` = ‖Σ û‖², `potential` = ‖S‖²; `values` are the eigenvalues of S, where wanted."""
    if rows < 2:
        return NO_OVERLAP
    pairs = rows * (rows - 1)
    return Overlap(
        rows=rows,
        mean=(length - rows) / pairs,
        scaled=width * max(0.0, potential - rows) / pairs,
        participation=rows**2 / potential,
        effective_rank=np.nan if values is None else effective_rank(values),
    )


def _together(
    norms: np.ndarray, raw: Overlap, centred: Overlap, values: np.ndarray, sample: np.ndarray, index: np.ndarray
) -> Moments:
    return Moments(
        norms=norms,
        raw=raw,
        centred=centred,
        frobenius=float(values.sum() ** 0.5),
        spectral=float(values.max(initial=0.0) ** 0.5),
        stable_rank=stable_rank(values),
        eigenvalues=values,
        tail=fit_tail(values) if np.isfinite(norms).all() else NO_TAIL,
        sample=sample,
        index=index,
    )


def _normalise(block: np.ndarray, mean: np.ndarray | None = None) -> np.ndarray:
    """Turn rows (k, m) into unit rows in place, minus a mean (m,) if given; their lengths (k,), 0 where none is left.

    A strip of rows at a time, which stays in the processor's cache. Rows too small or too large for their squares are
    scaled by their largest entry first.
    """
    lengths = np.empty(len(block))
    centre = None if mean is None else mean.astype(np.float32)
    for start in range(0, len(block), STRIP):
        part = block[start : start + STRIP]
        before = None
        if centre is not None:
            before = np.einsum("ij,ij->i", part, part)
            part -= centre
        square = np.einsum("ij,ij->i", part, part)
        length = np.sqrt(square.astype(np.float64))
        odd = ~((square > 1e-30) & (square < 1e30))
        if odd.any():
            length[odd] = np.linalg.norm(part[odd].astype(np.float64), axis=1)
        if before is not None:
            length[(length <= SMALL * np.sqrt(before)) | (before == 0)] = 0
        part *= np.where(length > 0, 1 / np.where(length > 0, length, 1), 0).astype(np.float32)[:, None]
        lengths[start : start + STRIP] = length
    return lengths


def _sum(block: np.ndarray) -> np.ndarray:
    """The sum of the rows (k, m) -> (m,): of a strip in float32, of strips in float64."""
    ones = np.ones(STRIP, dtype=np.float32)
    parts = (block[start : start + STRIP] for start in range(0, len(block), STRIP))
    return np.asarray(np.sum([ones[: len(part)] @ part for part in parts], axis=0, dtype=np.float64))


def _eigenvalues(gram: np.ndarray) -> np.ndarray:
    """Eigenvalues ≥ 0 of a Gram product, rising; in float32, as its entries are, scaled so that they fit."""
    from scipy.linalg import eigvalsh

    peak = float(gram.diagonal().max(initial=0.0))
    if not 0 < peak < np.inf:
        return np.zeros(len(gram))
    values = eigvalsh((gram / peak).astype(np.float32), check_finite=False, overwrite_a=True)
    return np.maximum(values.astype(np.float64), 0) * peak
