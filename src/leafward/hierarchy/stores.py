"""Inner-product stores for Lorentz points, on faiss: all points, or cells of near ones.

d(x, y) = acosh(−c⟨x,y⟩_L)/√c grows as ⟨x,y⟩_L = −x_t y_t + x_s·y_s falls, so the nearest points are those of largest
inner product between the *probe* (−x_t, x_s) of a query and the *key* of a point. The key is (y_t − 1/√c, y_s): the
constant changes no order and leaves the bits of float16 and float32 to what differs. A graph index (HNSW) does not
serve: it is walked with keys on both sides, but asked with probes.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from leafward.errors import UsageError, require
from leafward.geometry import lorentz

Storage = Literal["float32", "float16"]
ITERATIONS = 10
#: points for each cell on which the cells are trained
SAMPLE = 64
#: innermost points that every query looks at, in units of √N
CORE = 4


def keys(space: Tensor, c: float) -> np.ndarray:
    """(t − 1/√c, s) of points: space parts (N, n) -> (N, n+1); t − 1/√c = |s|²/(t + 1/√c) does not cancel."""
    s = space.float()
    lag = s.square().sum(dim=-1, keepdim=True) / (lorentz.time(s, c) + c**-0.5)
    return torch.cat([lag, s], dim=-1).numpy()


def probes(space: Tensor, c: float) -> np.ndarray:
    """(−t, s) of queries: space parts (B, n) -> (B, n+1)."""
    s = space.float()
    return torch.cat([-lorentz.time(s, c), s], dim=-1).numpy()


def centres(sums: Tensor, c: float) -> Tensor:
    """Lorentz centroids from the sums of full points in float64: (K, n+1) -> space parts (K, n).

    For groups of unequal size, of which only the sums are kept; one of no points has its centre at the origin.
    """
    return lorentz.centroid_of_sum(sums[:, 1:], sums[:, :1], c)[0]


def group_sums(space: Tensor, group: Tensor, count: int, c: float) -> Tensor:
    """Σ of the full points of each group in float64: space parts (N, n), groups (N) -> (count, n+1)."""
    full = lorentz.lift(space.double(), c)
    return full.new_zeros(count, full.shape[1]).index_add_(0, group, full)


def nearest_centre(space: Tensor, middle: Tensor, c: float, k: int = 1) -> np.ndarray:
    """The k nearest centres to each point by Lorentz distance: (N, n), (K, n) -> (N, k)."""
    faiss = require("faiss", "search")
    return faiss.knn(probes(space, c), keys(middle, c), k, metric=faiss.METRIC_INNER_PRODUCT)[1]


def train_cells(space: Tensor, c: float, count: int, seed: int) -> Tensor:
    """Lorentz k-means: assign by distance, move to the Lorentz centroid: (N, n) -> centres (count, n), float32.

    The centroid minimises the sum of squared Lorentz distances, so neither step raises it. An empty cell starts
    again at a random point.
    """
    generator = torch.Generator().manual_seed(seed)
    sample = space[torch.randperm(len(space), generator=generator)[: SAMPLE * count]].float()
    middle = sample[:count].clone()
    for _ in range(ITERATIONS):
        near = torch.from_numpy(nearest_centre(sample, middle, c)[:, 0])
        middle = centres(group_sums(sample, near, count, c), c).float()
        empty = torch.bincount(near, minlength=count) == 0
        middle[empty] = sample[torch.randint(len(sample), (int(empty.sum()),), generator=generator)]
    return middle


def core_reach(space: Tensor) -> Tensor:
    """The |s| below which the CORE · √N innermost points lie: (N, n) -> ()."""
    lengths = space.float().norm(dim=1)
    return lengths.kthvalue(min(len(lengths), round(CORE * len(lengths) ** 0.5) + 1)).values


class Flat:
    """Every point is compared: exact up to the rounding of the store."""

    def __init__(self, width: int, c: float, storage: Storage) -> None:
        faiss = require("faiss", "search")
        self._c = c
        if storage == "float32":
            self._index = faiss.IndexFlatIP(width + 1)
        else:
            kind = faiss.ScalarQuantizer.QT_fp16
            self._index = faiss.IndexScalarQuantizer(width + 1, kind, faiss.METRIC_INNER_PRODUCT)

    def add(self, space: Tensor) -> None:
        """Append points (N, n)."""
        self._index.add(keys(space, self._c))

    def search(self, space: Tensor, k: int) -> np.ndarray:
        """Rows of largest inner product for queries (B, n), best first: -> (B, k); −1 where there are fewer."""
        return self._index.search(probes(space, self._c), k)[1]


class Cells:
    """Points in cells about Lorentz centroids (IVF); a query looks into its nearest cells and the core alone.

    The core is one more cell, of the points with |s| < `reach`. Geodesics bend inwards, so the general points near the
    origin are near to everything, yet in cells that are near to little; no ordering of the cells finds them early.
    """

    def __init__(self, middle: Tensor, reach: Tensor, c: float, storage: Storage) -> None:
        faiss = require("faiss", "search")
        count, width = len(middle) + 1, middle.shape[1]
        self._c, self.middle, self.reach = c, middle, reach
        self.assignment = np.zeros(0, np.int64)
        coarse = faiss.IndexFlatIP(width + 1)  # of which faiss wants the size alone: cells are always given
        coarse.add(keys(torch.cat([middle, torch.zeros_like(middle[:1])]), c))
        if storage == "float32":
            self._index: Any = faiss.IndexIVFFlat(coarse, width + 1, count, faiss.METRIC_INNER_PRODUCT)
        else:
            kind = faiss.ScalarQuantizer.QT_fp16
            self._index = faiss.IndexIVFScalarQuantizer(
                coarse, width + 1, count, kind, faiss.METRIC_INNER_PRODUCT, False
            )
        self._coarse = coarse  # faiss keeps a bare pointer to it
        self._index.is_trained = True  # by train_cells: faiss's own k-means is Euclidean

    def add(self, space: Tensor) -> None:
        """Append points (N, n), each to the core or to the cell of its nearest centre."""
        inside = (space.float().norm(dim=1) < self.reach).numpy()
        self.insert(space, np.where(inside, len(self.middle), nearest_centre(space, self.middle, self._c)[:, 0]))

    def insert(self, space: Tensor, cell: np.ndarray) -> None:
        """Append points (N, n) whose cells (N) are known."""
        faiss = require("faiss", "search")
        rows = np.arange(len(self.assignment), len(self.assignment) + len(cell), dtype=np.int64)
        values, cell = np.ascontiguousarray(keys(space, self._c)), np.ascontiguousarray(cell, np.int64)
        pointers = (faiss.swig_ptr(array) for array in (values, rows, cell))
        self._index.add_core(len(cell), *pointers)
        self.assignment = np.concatenate([self.assignment, cell])

    def search(self, space: Tensor, k: int, cells: int) -> np.ndarray:
        """As `Flat.search`, among the points of the nearest `cells` cells and the core."""
        count = min(cells, len(self.middle))
        near = nearest_centre(space, self.middle, self._c, count)
        near = np.concatenate([near, np.full((len(near), 1), len(self.middle))], axis=1)
        self._index.nprobe = count + 1
        return self._index.search_preassigned(probes(space, self._c), k, near, None)[1]


def check_range(space: Tensor, c: float, storage: Storage, argument: str) -> None:
    """Refuse points whose keys overflow the storage."""
    highest = float(np.finfo(storage).max)
    top = float(keys(space, c).max(initial=0.0)) if len(space) else 0.0
    low = float(space.abs().max()) if space.numel() else 0.0
    if not max(top, low) <= highest:
        raise UsageError(f"{argument}: a coordinate of size {max(top, low):.3g} does not fit storage={storage!r}")
