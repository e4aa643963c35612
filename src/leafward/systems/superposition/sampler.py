"""Sparse batches x_i = u_i v_i with u_i ~ Bernoulli(p_i), v_i ~ U(0, 2), in O(active cells) work.

Sampling runs on the host with numpy and is a pure function of (p, seed, step): the same data on every device, no
generator state to save, and every shape known before a kernel is launched (so the device is never waited for).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from leafward.errors import UsageError

STEPS_PER_DRAW = 16  # batches drawn by one call: spreads the cost of the numpy calls and of the copy to the device
DENSE_ABOVE = 0.3  # columns with p above this are drawn cell by cell (p = 1 has no finite Poisson rate)
TRAIN, EVALUATE, DATASET, INITIAL = range(4)  # independent random sequences of one seed


def generator(seed: int, *key: int) -> np.random.Generator:
    """Counter-like randomness: an independent generator for each (seed, key)."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(seed, spawn_key=key)))


class Batch:
    """The active cells of a batch: N cells in R rows of n features, on the device in two flat buffers.

    Rows that have an active feature come first, then perhaps some without (on a GPU batches are padded, so that
    shapes repeat); `empty` further rows without one are not listed. Padding makes no difference: its rows are as
    good as any other empty row, for which `empty` allows (it may become negative), and its cells, at the end, have
    the value 0 in an empty row.
    """

    def __init__(
        self, whole: torch.Tensor, real: torch.Tensor, offsets: np.ndarray, cells: int, active: int, size: int
    ):
        self.whole, self.real = whole, real
        self.offsets = offsets  # (R+1,) on the host: where each row's cells begin
        self.active = active  # rows with an active feature
        self.rows = len(offsets) - 1  # R
        self.empty = size - self.rows
        self.features = len(whole) - 3 * cells - self.rows - 2  # n
        parts = iter(whole.split([cells, cells, cells, self.rows + 1, self.features + 1]))
        self.columns = next(parts)  # (N,) feature of each cell, row by row
        self.cells = next(parts)  # (N,) row·n + feature
        self.rows_by_column = next(parts)  # (N,) row of each cell, feature by feature
        self.row_offsets = next(parts)  # (R+1,) where each row's cells begin
        self.column_offsets = next(parts)  # (n+1,) where each feature's cells begin in the order by feature
        parts = iter(real.split([cells, cells, cells, self.rows]))
        self.values = next(parts)  # (N,) x
        self.shares = next(parts)  # (N,) x over the sum of its row, over the number of active rows
        self.values_by_column = next(parts)  # (N,) x in the order by feature
        self.row_shares = next(parts)  # (R,) the sum of the shares of each row

    def clone(self) -> Batch:
        """A copy with its own buffers."""
        cells, size = len(self.cells), self.rows + self.empty
        return Batch(self.whole.clone(), self.real.clone(), self.offsets, cells, self.active, size)

    def like(self, other: Batch) -> bool:
        """Whether the buffers have the same layout."""
        return (self.rows, self.whole.shape) == (other.rows, other.whole.shape)

    def dense(self) -> torch.Tensor:
        """x (R + empty, n) in full, the listed rows first; for checks, training never needs it."""
        x = self.values.new_zeros(self.rows + self.empty, self.features)
        active = self.values > 0
        x.view(-1)[self.cells[active]] = self.values[active]
        return x


class Blocks(NamedTuple):
    """Blocks of `size` consecutive features whose activations are correlated with strength `rho` in [0, 1].

    In each row each block is, with probability ρ, *joint*: one U ~ U(0,1) serves all its features, u_i = [U < p_i];
    otherwise its features are independent. The marginals stay p_i exactly, and the correlation of two features of a
    block is ρ times the largest one that their marginals permit,
    ρ (min(p_i,p_j) − p_i p_j) / √(p_i(1−p_i) p_j(1−p_j)), which is ρ itself where p_i = p_j.
    """

    size: int
    rho: float

    @classmethod
    def parse(cls, text: str) -> Blocks:
        """From ``block:SIZE:RHO``."""
        try:
            kind, size, rho = text.split(":")
            blocks = cls(int(size), float(rho))
        except ValueError:
            kind, blocks = "", cls(0, 0.0)
        if kind != "block" or blocks.size < 1 or not 0 <= blocks.rho <= 1:
            raise UsageError(f"correlation must be 'block:SIZE:RHO' with SIZE ≥ 1 and 0 ≤ RHO ≤ 1, got {text!r}")
        return blocks


class _Bernoulli:
    """Independent Bernoulli(p_i) over a (rows, n) grid.

    Points of a Poisson process with rate λ_i = −ln(1−p_i) per cell hit a cell at least once with probability p_i,
    independently of all others; so dropping repeated hits gives exactly the wanted distribution.
    """

    def __init__(self, p: np.ndarray):
        self.n = len(p)
        self.dense = np.flatnonzero(p > DENSE_ABOVE)
        self.dense_p = p[self.dense]
        self.sparse = np.flatnonzero(p <= DENSE_ABOVE)
        self.rates = np.cumsum(-np.log1p(-p[self.sparse]))

    def cells(self, rng: np.random.Generator, rows: int) -> np.ndarray:
        """Sorted row·n + column of the active cells."""
        keys = []
        if len(self.sparse):
            total = self.rates[-1]
            count = rng.poisson(rows * total)
            # Sorted queries are found faster, and the rows, drawn independently, undo the order.
            hit = np.searchsorted(self.rates, np.sort(rng.random(count)) * total, side="right")
            column = self.sparse[np.minimum(hit, len(self.sparse) - 1)]
            keys.append(rng.integers(0, rows, count) * self.n + column)
        if len(self.dense):
            row, hit = np.nonzero(rng.random((rows, len(self.dense))) < self.dense_p)
            keys.append(row * self.n + self.dense[hit])
        ordered = np.sort(np.concatenate(keys))
        return ordered[_changes(ordered)]


class _BlockBernoulli:
    """The correlated activations of `Blocks`, still in O(active) work."""

    def __init__(self, p: np.ndarray, blocks: Blocks):
        self.p, self.n, self.size = p, len(p), blocks.size
        self.count = -(-self.n // blocks.size)
        self.peak = np.maximum.reduceat(p, np.arange(0, self.n, blocks.size))
        self.alone = _Bernoulli(p)
        self.joint = _Bernoulli(blocks.rho * self.peak) if blocks.rho > 0 else None
        # P(joint | not joint-and-active): the blocks whose joint draw came out empty are never drawn at all.
        self.silent = blocks.rho * (1 - self.peak) / np.maximum(1 - blocks.rho * self.peak, np.finfo(float).tiny)

    def cells(self, rng: np.random.Generator, rows: int) -> np.ndarray:
        single = self.alone.cells(rng, rows)
        if self.joint is None:
            return single
        joint = self.joint.cells(rng, rows)  # row·count + block where the block is joint and not empty
        owner = (single // self.n) * self.count + (single % self.n) // self.size
        pairs, member = np.unique(owner, return_inverse=True)
        kept = rng.random(len(pairs)) >= self.silent[pairs % self.count]
        kept &= ~np.isin(pairs, joint, assume_unique=True)
        row, block = joint // self.count, joint % self.count
        level = rng.random(len(joint)) * self.peak[block]
        column = block[:, None] * self.size + np.arange(self.size)
        inside = column < self.n
        active = inside & (level[:, None] < self.p[np.where(inside, column, 0)])
        return np.sort(np.concatenate([single[kept[member]], (row[:, None] * self.n + column)[active]]))


class Stream:
    """The data that a group of models shares: batches of `batch` rows for every step of one seed."""

    def __init__(
        self,
        p: np.ndarray,
        seed: int,
        batch: int,
        *,
        correlation: str | None = None,
        dataset_rows: int | None = None,
        pad: bool = False,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ):
        """With `dataset_rows` = D the training rows are drawn, with replacement, from D rows fixed by the seed.

        With `pad` nearly all batches have the same shape; the odd one that does not fit keeps its own.
        """
        self.p, self.seed, self.batch = p, seed, batch
        self.device, self.dtype = torch.device(device), dtype
        self._cells = _BlockBernoulli(p, Blocks.parse(correlation)) if correlation else _Bernoulli(p)
        self._dataset = None
        if dataset_rows is not None:
            keys, values = self._draw(generator(seed, DATASET), dataset_rows)
            self._dataset = (keys, values, np.searchsorted(keys, np.arange(dataset_rows + 1) * len(p)))
        self._capacity = (0, 0)  # rows and cells to which batches are padded where they fit
        if pad:
            self._capacity = _capacity(list(self.training(0, STEPS_PER_DRAW)))

    def training(self, start: int, stop: int) -> Iterator[Batch]:
        """The batches of the steps start…stop−1."""
        return self._batches(TRAIN, start, stop)

    def fresh(self, count: int) -> Iterator[Batch]:
        """`count` batches that training never sees, always the same ones."""
        return self._batches(EVALUATE, 0, count)

    def _batches(self, purpose: int, start: int, stop: int) -> Iterator[Batch]:
        for draw in range(start // STEPS_PER_DRAW, -(-stop // STEPS_PER_DRAW)):
            first = draw * STEPS_PER_DRAW
            rng = generator(self.seed, purpose, draw)
            rows = STEPS_PER_DRAW * self.batch
            if purpose == TRAIN and self._dataset is not None:
                keys, values = self._pick(rng, rows)
            else:
                keys, values = self._draw(rng, rows)
            yield from self._split(keys, values)[max(start - first, 0) : stop - first]

    def _draw(self, rng: np.random.Generator, rows: int) -> tuple[np.ndarray, np.ndarray]:
        keys = self._cells.cells(rng, rows)
        return keys, 2 - 2 * rng.random(len(keys))  # (0, 2]: a row with an active cell never sums to 0

    def _pick(self, rng: np.random.Generator, rows: int) -> tuple[np.ndarray, np.ndarray]:
        assert self._dataset is not None
        keys, values, offsets = self._dataset
        chosen = rng.integers(0, len(offsets) - 1, rows)
        sizes = offsets[chosen + 1] - offsets[chosen]
        ends = np.cumsum(sizes)
        source = np.arange(sizes.sum()) + np.repeat(offsets[chosen] - ends + sizes, sizes)
        columns = keys[source] % len(self.p)
        return np.repeat(np.arange(rows), sizes) * len(self.p) + columns, values[source]

    def _split(self, keys: np.ndarray, values: np.ndarray) -> list[Batch]:
        """Cells of STEPS_PER_DRAW stacked batches (sorted keys) as batches on the device, with two copies to it."""
        n, many = len(self.p), STEPS_PER_DRAW
        row, column = np.divmod(keys, n)
        step = row // self.batch
        bounds = np.searchsorted(step, np.arange(many + 1))
        begins = np.flatnonzero(_changes(row))
        row_bounds = np.searchsorted(begins, bounds)  # non-empty rows before each batch
        sizes = np.diff(np.append(begins, len(row)))
        compact = np.repeat(np.arange(len(begins)), sizes) - row_bounds[step]
        shares = values / np.repeat(np.add.reduceat(values, begins), sizes) if len(row) else values
        transposed = step * n + column
        # A stable argsort by way of a sort, which numpy does several times faster.
        order = np.sort(transposed * len(row) + np.arange(len(row))) % max(len(row), 1)
        column_offsets = np.zeros((many, n + 1), dtype=np.int64)
        np.cumsum(np.bincount(transposed, minlength=many * n).reshape(many, n), axis=1, out=column_offsets[:, 1:])

        whole, real, shapes = [], [], []
        for q in range(many):
            cells, rows = slice(*bounds[q : q + 2]), int(row_bounds[q + 1] - row_bounds[q])
            count = int(bounds[q + 1] - bounds[q])
            # The last row must be empty: there the spare cells rest.
            fits = rows < self._capacity[0] and count <= self._capacity[1]
            all_rows, all_cells = self._capacity if fits else (rows, count)
            spare = np.zeros(all_cells - count, dtype=np.int64)
            offsets = begins[row_bounds[q] : row_bounds[q + 1]] - bounds[q]
            offsets = np.append(offsets, np.full(all_rows - rows + 1, count))
            whole += [column[cells], spare, compact[cells] * n + column[cells], spare + (all_rows - 1) * n]
            whole += [compact[order[cells]], spare, offsets, column_offsets[q]]
            real += [values[cells], spare, shares[cells] / max(rows, 1), spare, values[order[cells]], spare]
            real += [np.full(rows, 1 / max(rows, 1)), np.zeros(all_rows - rows)]
            shapes.append((offsets, all_cells, rows))
        lengths = [3 * cells + len(offsets) + n + 1 for offsets, cells, _ in shapes]
        real_lengths = [3 * cells + len(offsets) - 1 for offsets, cells, _ in shapes]
        buffers = zip(
            self._move(np.concatenate(whole), torch.int64).split(lengths),
            self._move(np.concatenate(real), self.dtype).split(real_lengths),
            shapes,
            strict=True,
        )
        return [Batch(w, r, offsets, cells, rows, self.batch) for w, r, (offsets, cells, rows) in buffers]

    def _move(self, array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.from_numpy(array).to(dtype)
        if self.device.type == "cuda":
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor


def _changes(ordered: np.ndarray) -> np.ndarray:
    """Whether each entry differs from the one before it; true for the first."""
    return np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)]


def _capacity(batches: list[Batch]) -> tuple[int, int]:
    """Rows and cells that hold all but about one batch in a million."""
    size = batches[0].rows + batches[0].empty
    rows, cells = (np.array(counts) for counts in zip(*((b.active, len(b.cells)) for b in batches), strict=True))
    most_rows = rows.mean() + 5 * math.sqrt(rows.mean() * max(0.0, 1 - rows.mean() / size)) + 1
    most_cells = cells.mean() + 6 * max(math.sqrt(cells.mean()), cells.std(ddof=1)) + 1
    return min(size + 1, 32 * math.ceil(most_rows / 32)), 32 * math.ceil(most_cells / 32)
