"""Search among points of the Lorentz model: nearest, nearest in a subtree, coarse to fine, and by entailment.

Shapes: N points, B queries, n the dimension; points and queries are full vectors [t; s], (…, n+1), as
`leafward.geometry.Lorentz` has them. A store on faiss proposes candidates by inner product; the answers are
ranked by the stable distance of `leafward.geometry.lorentz`, so distances are right also where they are small.
"""

from __future__ import annotations

import json
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from leafward.errors import DataError, UsageError, require
from leafward.files import replacing
from leafward.geometry import Lorentz, cones, lorentz
from leafward.hierarchy import stores
from leafward.hierarchy.graph import Rows, rows_of
from leafward.hierarchy.readers import PathLike
from leafward.hierarchy.stores import Storage
from leafward.hierarchy.taxonomy import Nodes, Taxonomy

Kind = Literal["flat", "ivf"]
#: Candidates ranked again by distance for each answer wanted, and at the least.
CANDIDATES, FEWEST_CANDIDATES = 4, 64
#: Coordinates handled at once where pairs of points are compared one by one.
BLOCK = 1 << 24


class Hits(NamedTuple):
    """Nearest first. `ids` int64, −1 where there are fewer than asked for; `distances` float32, infinite there."""

    ids: Tensor
    distances: Tensor


class LorentzIndex:
    """An index over points of the Lorentz model, with ids, and with a taxonomy where one is given.

    kind: "flat" compares a query with every point; "ivf", for scale, with those of its `probes` nearest cells and
        with the 4√N points nearest to the origin.
    storage: "float16" halves the memory and costs about 1 % of the recall.
    taxonomy, nodes: the node (name or number) that each point belongs to; needed to search by node.
    """

    def __init__(
        self,
        manifold: Lorentz,
        points: Any,
        ids: Any = None,
        *,
        kind: Kind = "flat",
        storage: Storage = "float32",
        lists: int | None = None,
        taxonomy: Taxonomy | None = None,
        nodes: Nodes = None,
        seed: int = 0,
    ) -> None:
        """`lists`: number of cells of an "ivf" index; default √N."""
        if not isinstance(manifold, Lorentz):
            raise UsageError(f"manifold must be a Lorentz, got {type(manifold).__name__}")
        _one_of("kind", kind, ("flat", "ivf"))
        _one_of("storage", storage, ("float32", "float16"))
        self.c, self.taxonomy = float(manifold.c), taxonomy
        self.kind: Kind = kind
        self.storage: Storage = storage
        space = self._space_part(points, "points", None)
        if kind == "ivf":
            cells = max(1, round(len(space) ** 0.5)) if lists is None else lists
            if not 1 <= cells <= len(space):
                raise UsageError(f"lists must lie between 1 and the number of points, {len(space)}, got {lists}")
            middle = stores.train_cells(space, self.c, cells, seed)
            store = stores.Cells(middle, stores.core_reach(space), self.c, storage)
        elif lists is not None:
            raise UsageError(f"lists belongs to kind='ivf', got lists={lists} with kind={kind!r}")
        else:
            store = stores.Flat(space.shape[1], self.c, storage)
        self._store: stores.Flat | stores.Cells = store
        self._space = torch.empty(0, space.shape[1], dtype=getattr(torch, storage))
        self.ids = np.zeros(0, np.int64)
        self._nodes = np.zeros(0, np.int64)
        self.add(points, ids, nodes)

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        return f"LorentzIndex({len(self):,} × {self.width}, c={self.c:g}, {self.kind}, {self.storage})"

    @property
    def width(self) -> int:
        """The dimension n; a point has n+1 coordinates."""
        return self._space.shape[1]

    def points(self, ids: Any) -> Tensor:
        """The stored points of the given ids: (B) -> (B, n+1)."""
        rows = torch.from_numpy(self._rows(_integers(ids, "ids")))
        return lorentz.lift(self._space[rows].float(), self.c)

    def nodes(self, ids: Any) -> np.ndarray:
        """The taxonomy's node, by number, of each id: (B) -> (B); −1 in an index without a taxonomy."""
        return self._nodes[self._rows(_integers(ids, "ids"))]

    # Change

    def add(self, points: Any, ids: Any = None, nodes: Nodes = None) -> None:
        """Append points (N, n+1) under new ids (default: on from the largest)."""
        space = self._space_part(points, "points", self.width)
        stores.check_range(space, self.c, self.storage, "points")
        fresh = self._fresh_ids(ids, len(space))
        labels = self._labels(nodes, len(space))
        kept = space.to(self._space.dtype)
        self._store.add(kept)
        self._space = torch.cat([self._space, kept])
        self.ids, self._nodes = np.concatenate([self.ids, fresh]), np.concatenate([self._nodes, labels])
        self._forget()

    def remove(self, ids: Any) -> None:
        """Take points out by id; costs a rebuild of the store, without training."""
        gone = np.zeros(len(self), bool)
        gone[self._rows(_integers(ids, "ids"))] = True
        keep = np.flatnonzero(~gone)
        self._space, self.ids, self._nodes = self._space[torch.from_numpy(keep)], self.ids[keep], self._nodes[keep]
        if isinstance(self._store, stores.Cells):
            cell = self._store.assignment[keep]
            self._store = stores.Cells(self._store.middle, self._store.reach, self.c, self.storage)
            self._store.insert(self._space, cell)
        else:
            self._store = stores.Flat(self.width, self.c, self.storage)
            self._store.add(self._space)
        self._forget()

    def _forget(self) -> None:
        self._order: np.ndarray | None = None  # rows by id
        self._tree: tuple[Rows, Tensor, np.ndarray] | None = None

    # Search

    def search(self, queries: Any, k: int = 10, *, within: Any = None, under: Nodes = None, probes: int = 16) -> Hits:
        """The k nearest points to each query (B, n+1): -> (B, k).

        `within`: only among these ids; `under`: only among the points of this node and of those below it. Such a
        search compares every point that is left, also in an "ivf" index. `probes`: cells looked into ("ivf").
        """
        q = self._space_part(queries, "queries", self.width)
        _positive("k", k)
        _positive("probes", probes)
        chosen = self._chosen(within, under)
        wanted = min(max(CANDIDATES * k, FEWEST_CANDIDATES), len(self) if chosen is None else len(chosen))
        parts = [self._nearest(part, k, wanted, chosen, probes) for part in q.split(self._step(wanted))]
        device = queries.device if isinstance(queries, Tensor) else None
        ids, distances = (torch.cat(part) for part in zip(*parts, strict=True))
        return Hits(ids.to(device), distances.to(device))

    def _nearest(self, q: Tensor, k: int, wanted: int, chosen: np.ndarray | None, probes: int) -> Hits:
        """Candidates of the store, ranked by distance: (B, n) -> (B, k)."""
        if wanted == 0:
            return _padded(q.new_empty(len(q), 0, dtype=torch.int64), q.new_empty(len(q), 0), k)
        if chosen is not None:
            faiss = require("faiss", "search")
            subset = stores.keys(self._space[torch.from_numpy(chosen)], self.c)
            rows = faiss.knn(stores.probes(q, self.c), subset, wanted, metric=faiss.METRIC_INNER_PRODUCT)[1]
            rows = chosen[rows]
        elif isinstance(self._store, stores.Cells):
            rows = self._store.search(q, wanted, probes)
        else:
            rows = self._store.search(q, wanted)
        found = torch.from_numpy(rows)
        distances = lorentz.dist(q[:, None], self._space[found.clamp_min(0)].float(), self.c)
        distances[found < 0] = torch.inf
        near, place = distances.topk(min(k, wanted), largest=False)
        best = found.gather(1, place)
        ids = torch.where(best >= 0, torch.from_numpy(self.ids)[best.clamp_min(0)], -1)
        return _padded(ids, near, k)

    def coarse_to_fine(self, queries: Any, k: int = 10, beam: int = 4) -> Hits:
        """Walk down the taxonomy and rank only the points met: (B, n+1) -> (B, k).

        At each step the `beam` children nearest to the query go on, a child standing at the Lorentz centroid of all
        points below it; the points of every node walked through are candidates.
        """
        q = self._space_part(queries, "queries", self.width)
        _positive("k", k)
        _positive("beam", beam)
        own, middle, filled = self._node_tree()
        taxonomy = self._known_taxonomy()
        owner, node = np.arange(len(q)), np.full(len(q), taxonomy.root)
        met = [np.zeros((2, 0), np.int64)]
        while len(node):
            step, row = own.expand(node)
            met.append(np.stack([owner[step], row]))
            step, child = taxonomy.children.expand(node)
            owner, node = _distinct(np.stack([owner[step], child])[:, filled[child] > 0], len(taxonomy))
            owner, node, _ = _best(owner, node, self._pairs(lorentz.dist, q, owner, middle, node), beam)
        owner, row = _distinct(np.concatenate(met, axis=1), len(self))
        owner, row, gaps = _best(owner, row, self._pairs(lorentz.dist, q, owner, self._space, row), k)
        rank = np.arange(len(owner)) - np.searchsorted(owner, owner)
        hits = Hits(torch.full((len(q), k), -1), torch.full((len(q), k), torch.inf))
        hits.ids[owner, rank] = torch.from_numpy(self.ids[row])
        hits.distances[owner, rank] = torch.from_numpy(gaps)
        device = queries.device if isinstance(queries, Tensor) else None
        return Hits(hits.ids.to(device), hits.distances.to(device))

    def entailed(self, concepts: Any, aperture: float = 0.1) -> list[Hits]:
        """Everything under each concept (B, n+1): the points in its entailment cone, nearest first; B lists.

        y is under x where the exterior angle at x is at most the half-aperture asin(2 k / sinh √c ρ_x), `aperture`
        being k. A concept at the origin entails everything.
        """
        q = self._space_part(concepts, "concepts", self.width)
        if not 0.0 < aperture < float("inf"):
            raise UsageError(f"aperture must be positive, got {aperture}")
        width = cones.half_aperture(q, self.c, aperture)
        # The angle between the directions is never larger than the exterior angle: one matrix product sorts out
        # nearly all. The slack covers its rounding, and a concept at the origin, which has no direction.
        ways, narrowest = normalize(q), torch.cos(width)[:, None] - 1e-3
        owners, rows = [], []
        step = max(1, BLOCK // (self.width + len(q)))
        for first in range(0, len(self), step):
            block = self._space[first : first + step].float()
            owner, row = np.nonzero((ways @ normalize(block).T >= narrowest).numpy())
            inside = self._pairs(cones.exterior_angle, q, owner, block, row) <= width.numpy()[owner]
            owners.append(owner[inside])
            rows.append(row[inside] + first)
        nothing = np.zeros(0, np.int64)
        owner, row = np.concatenate([nothing, *owners]), np.concatenate([nothing, *rows])
        owner, row, gaps = _best(owner, row, self._pairs(lorentz.dist, q, owner, self._space, row), len(self))
        ends = np.searchsorted(owner, np.arange(1, len(q)))
        lists = zip(np.split(self.ids[row], ends), np.split(gaps, ends), strict=True)
        return [Hits(torch.from_numpy(ids), torch.from_numpy(near)) for ids, near in lists][: len(q)]

    # Disk

    def save(self, path: PathLike) -> None:
        """Write one safetensors file, settings as JSON in its header, in one step. No code is stored."""
        from safetensors.torch import save_file

        tensors = {"space": self._space, "ids": torch.from_numpy(self.ids), "nodes": torch.from_numpy(self._nodes)}
        if isinstance(self._store, stores.Cells):
            cell = torch.from_numpy(self._store.assignment)
            tensors |= {"cells": self._store.middle, "core": self._store.reach, "cell": cell}
        if self.taxonomy is not None:
            text = json.dumps(list(self.taxonomy.edges()), ensure_ascii=False).encode()
            tensors["taxonomy"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        settings = {"version": 1, "kind": self.kind, "storage": self.storage, "c": self.c}
        with replacing(path) as temporary:
            save_file(
                {k: v.contiguous() for k, v in tensors.items()}, temporary, {"leafward.index": json.dumps(settings)}
            )

    @classmethod
    def load(cls, path: PathLike) -> LorentzIndex:
        """Read what `save` wrote."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, "pt") as file:
                settings = json.loads((file.metadata() or {})["leafward.index"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
            if settings["version"] != 1:
                raise DataError(f"{path}: this index is of version {settings['version']}; version 1 can be read")
            self = cls.__new__(cls)
            self.c, self.kind, self.storage = float(settings["c"]), settings["kind"], settings["storage"]
            self._space, self.ids, self._nodes = tensors["space"], tensors["ids"].numpy(), tensors["nodes"].numpy()
            known = self.kind in get_args(Kind) and self.storage in get_args(stores.Storage)
            if not (known and 0 < self.c < float("inf")):
                raise DataError(f"{path}: damaged index: its settings cannot be {settings}")
            pairs = json.loads(bytes(tensors["taxonomy"].numpy())) if "taxonomy" in tensors else None
            self.taxonomy = None if pairs is None else Taxonomy.from_edges([(child, parent) for child, parent in pairs])
            _check_numbers(path, tensors, 0 if self.taxonomy is None else len(self.taxonomy))
            if self.kind == "ivf":
                self._store = stores.Cells(tensors["cells"], tensors["core"], self.c, self.storage)
                self._store.insert(self._space, tensors["cell"].numpy())
            else:
                self._store = stores.Flat(self.width, self.c, self.storage)
                self._store.add(self._space)
        except (OSError, SafetensorError, KeyError, ValueError, TypeError, RuntimeError) as error:
            raise DataError(f"{path}: not an index that leafward wrote: {error}") from error
        self._forget()
        return self

    # Parts

    def _space_part(self, points: Any, argument: str, width: int | None) -> Tensor:
        """Space parts (N, n) in float32 of full points (N, n+1), which must lie on the hyperboloid."""
        full = torch.as_tensor(points).detach().cpu()
        if full.ndim != 2 or full.shape[1] < 2 or width not in (None, full.shape[1] - 1):
            allowed = "(N, n+1)" if width is None else f"(N, {width + 1})"
            raise UsageError(
                f"{argument} must be full Lorentz points [t; s] of shape {allowed}, got {tuple(full.shape)}"
            )
        if width is None and not len(full):
            raise UsageError(f"{argument}: at least one point is needed")
        full = full.float()
        time = lorentz.time(full[:, 1:], self.c)[:, 0]
        wrong = ~((full[:, 0] - time).abs() <= 1e-2 * time)
        if wrong.any():
            row = int(wrong.nonzero()[0])
            raise UsageError(
                f"{argument}: row {row} is not on the hyperboloid of c={self.c:g}: "
                f"its time is {float(full[row, 0]):.6g}, its space part implies {float(time[row]):.6g}; "
                "points are [t; s], time first"
            )
        return full[:, 1:].contiguous()

    def _fresh_ids(self, ids: Any, count: int) -> np.ndarray:
        if ids is None:
            first = int(self.ids.max(initial=-1)) + 1
            return np.arange(first, first + count, dtype=np.int64)
        fresh = _integers(ids, "ids")
        if len(fresh) != count or (fresh < 0).any():
            raise UsageError(f"ids must be {count} numbers ≥ 0, one for each point, got {len(fresh)}")
        values, counts = np.unique(fresh, return_counts=True)
        again = values[(counts > 1) | np.isin(values, self.ids)]
        if again.size:
            raise UsageError(f"ids: {int(again[0])} is taken ({again.size} such)")
        return fresh

    def _labels(self, nodes: Nodes, count: int) -> np.ndarray:
        if self.taxonomy is None:
            if nodes is not None:
                raise UsageError("nodes needs a taxonomy: LorentzIndex(…, taxonomy=…, nodes=…)")
            return np.full(count, -1, np.int64)
        labels = None if nodes is None else self.taxonomy.ids(nodes, "nodes").ravel()
        if labels is None or len(labels) != count:
            got = "none" if labels is None else len(labels)
            raise UsageError(f"nodes must name one node of the taxonomy for each of the {count} points, got {got}")
        return labels

    def _rows(self, ids: np.ndarray) -> np.ndarray:
        """Rows of the given ids; unknown ones are refused."""
        if self._order is None:
            self._order = np.argsort(self.ids)
        place = np.searchsorted(self.ids, ids, sorter=self._order).clip(max=max(len(self) - 1, 0))
        rows = self._order[place] if len(self) else np.zeros(0, np.int64)
        unknown = ids[self.ids[rows] != ids] if len(self) else ids
        if unknown.size:
            raise UsageError(f"ids: {int(unknown[0])} is not in the index ({unknown.size} such)")
        return rows

    def _chosen(self, within: Any, under: Nodes) -> np.ndarray | None:
        """Rows that a filter leaves; None where there is no filter."""
        if within is None and under is None:
            return None
        keep = np.ones(len(self), bool)
        if within is not None:
            keep[:] = False
            keep[self._rows(_integers(within, "within"))] = True
        if under is not None:
            keep &= np.isin(self._nodes, self._known_taxonomy().under(under))
        return np.flatnonzero(keep)

    def _known_taxonomy(self) -> Taxonomy:
        if self.taxonomy is None:
            raise UsageError("this search needs a taxonomy: LorentzIndex(…, taxonomy=…, nodes=…)")
        return self.taxonomy

    def _node_tree(self) -> tuple[Rows, Tensor, np.ndarray]:
        """For each node: its own rows, the centroid (N, n) and the number (N) of all points at and below it."""
        if self._tree is None:
            taxonomy = self._known_taxonomy()
            size = len(taxonomy)
            own = rows_of(self._nodes, np.arange(len(self)), size)
            sums = stores.group_sums(self._space, torch.from_numpy(self._nodes), size, self.c)
            totals = torch.from_numpy(taxonomy.descendants @ sums.numpy())
            filled = taxonomy.descendants @ own.counts()
            self._tree = own, stores.centres(totals, self.c).float(), filled
        return self._tree

    def _pairs(self, measure: Any, x: Tensor, i: np.ndarray, y: Tensor, j: np.ndarray) -> np.ndarray:
        """measure(x_i, y_j, c) for pairs of rows, block by block: i (Q), j (Q) -> (Q)."""
        step = max(1, BLOCK // x.shape[1])
        parts = [i[:0].astype(np.float32)]
        for first in range(0, len(i), step):
            block = slice(first, first + step)
            parts.append(measure(x[i[block]], y[j[block]].float(), self.c).numpy())
        return np.concatenate(parts)

    def _step(self, wanted: int) -> int:
        """Queries whose candidates fit a block."""
        return max(1, BLOCK // max(1, wanted * self.width))


def _best(owner: np.ndarray, item: np.ndarray, value: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The k items of least value of each owner, least first: three (Q) -> three of at most k for each owner."""
    order = np.lexsort((value, owner))
    owner, item, value = owner[order], item[order], value[order]
    keep = np.arange(len(owner)) - np.searchsorted(owner, owner) < k
    return owner[keep], item[keep], value[keep]


def _distinct(pairs: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Distinct columns of (owner, item) pairs (2, Q), items below `size`: on a DAG a node may be met by two ways."""
    owner, item = np.divmod(np.unique(pairs[0] * max(size, 1) + pairs[1]), max(size, 1))
    return owner, item


def _check_numbers(path: PathLike, tensors: dict[str, Tensor], nodes: int) -> None:
    """Refuse a damaged file before its numbers are used as places in memory."""
    space = tensors["space"]
    if space.ndim != 2 or not bool(space.isfinite().all()):
        raise DataError(f"{path}: damaged index: 'space' must be finite points (N, n), got {tuple(space.shape)}")
    limits = {"ids": (0, None), "nodes": (0 if nodes else -1, nodes)}
    if "cell" in tensors:
        limits["cell"] = (0, len(tensors["cells"]) + 1)  # the core is the last
    for name, (low, high) in limits.items():
        values = tensors[name]
        fits = (values >= low).all() and (high is None or (values < high).all())
        if len(values) != len(space) or not fits:
            raise DataError(f"{path}: damaged index: {name!r} does not fit its {len(space)} points")


def _padded(ids: Tensor, distances: Tensor, k: int) -> Hits:
    more = (0, k - ids.shape[1])
    return Hits(pad(ids, more, value=-1), pad(distances, more, value=torch.inf))


def _integers(values: Any, argument: str) -> np.ndarray:
    array = np.atleast_1d(values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values))
    if array.size and array.dtype.kind not in "iu":
        raise UsageError(f"{argument} must be whole numbers, got {array.dtype}")
    return array.astype(np.int64).ravel()


def _positive(argument: str, value: int) -> None:
    if not isinstance(value, int) or value < 1:
        raise UsageError(f"{argument} must be a whole number ≥ 1, got {value!r}")


def _one_of(argument: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UsageError(f"{argument} must be one of {', '.join(allowed)}, got {value!r}")
