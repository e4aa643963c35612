"""Integer-array algorithms on directed acyclic graphs: what a `Taxonomy` is made of.

A graph of N nodes and E edges is kept as *rows*: ``start (N+1)`` and ``items (E)``, the neighbours of node i being
``items[start[i]:start[i+1]]`` (compressed sparse rows without values).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from leafward.errors import LeafwardError

#: a scipy.sparse.csr_array; the operators of that class carry no usable types
Sparse = Any

#: The ancestor matrix of a taxonomy of sane depth has a few dozen entries per node; beyond this it is a mistake.
LARGEST_CLOSURE = 300_000_000


class Rows(NamedTuple):
    """Neighbour lists of all nodes: start (N+1), items (E)."""

    start: np.ndarray
    items: np.ndarray

    def counts(self) -> np.ndarray:
        """How many neighbours each node has: (N)."""
        return np.diff(self.start)

    def of(self, node: int) -> np.ndarray:
        """The neighbours of one node."""
        return self.items[self.start[node] : self.start[node + 1]]

    def expand(self, nodes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The neighbours of many nodes in one go: nodes (P) -> (which of the P, neighbour), both (Q)."""
        counts = self.counts()[nodes]
        owner = np.repeat(np.arange(len(nodes)), counts)
        first = np.repeat(self.start[nodes] - (np.cumsum(counts) - counts), counts)
        return owner, self.items[first + np.arange(len(owner))]


def rows_of(source: np.ndarray, target: np.ndarray, size: int) -> Rows:
    """Neighbour lists from edges (E), (E); the neighbours of a node keep the order of the edges."""
    order = np.argsort(source, kind="stable")
    return Rows(np.concatenate([[0], np.cumsum(np.bincount(source, minlength=size))]), target[order])


class Layout(NamedTuple):
    """`order` (N): parents before children; `shortest`, `longest` (N): edges from a root by either way."""

    order: np.ndarray
    shortest: np.ndarray
    longest: np.ndarray


def layout(parents: Rows, children: Rows) -> Layout | None:
    """Topological order and depths by Kahn's algorithm, O(N + E); None where the graph has a cycle."""
    size = len(parents.start) - 1
    waiting = parents.counts().tolist()
    start, items = children.start.tolist(), children.items.tolist()
    order = [node for node in range(size) if waiting[node] == 0]
    shortest = [0 if count == 0 else size for count in waiting]
    longest = [0] * size
    for node in order:  # grows while it is read
        near, far = shortest[node] + 1, longest[node] + 1
        for child in items[start[node] : start[node + 1]]:
            shortest[child] = min(shortest[child], near)
            longest[child] = max(longest[child], far)
            waiting[child] -= 1
            if waiting[child] == 0:
                order.append(child)
    if len(order) < size:
        return None
    return Layout(np.array(order, np.int64), np.array(shortest, np.int64), np.array(longest, np.int64))


def find_cycle(parents: Rows) -> list[int]:
    """The nodes of one cycle, each followed by a parent of its; the graph must have one."""
    size = len(parents.start) - 1
    alive = np.ones(size, bool)
    while True:  # peel off what has no living parent; what stays always has one to step to
        owner, parent = parents.expand(np.flatnonzero(alive))
        keep = np.zeros(size, bool)
        keep[np.flatnonzero(alive)[owner[alive[parent]]]] = True
        if (keep == alive).all():
            break
        alive = keep
    node, seen = int(np.flatnonzero(alive)[0]), {}
    while node not in seen:
        seen[node] = len(seen)
        node = next(int(parent) for parent in parents.of(node) if alive[parent])
    return list(seen)[seen[node] :]


def heights(order: np.ndarray, children: Rows) -> np.ndarray:
    """Edges on the longest way down to a leaf, for each node: (N)."""
    start, items = children.start.tolist(), children.items.tolist()
    height = [0] * len(order)
    for node in reversed(order.tolist()):
        below = items[start[node] : start[node + 1]]
        if below:
            height[node] = 1 + max([height[child] for child in below])
    return np.array(height, np.int64)


def matrix(rows: Rows) -> Sparse:
    """The same graph as a sparse matrix of ones: (N, N), int32."""
    from scipy.sparse import csr_array

    size = len(rows.start) - 1
    return csr_array((np.ones(len(rows.items), np.int32), rows.items, rows.start), shape=(size, size))


def _identity(size: int) -> Sparse:
    everyone = np.arange(size + 1)
    return matrix(Rows(everyone, everyone[:-1]))


def closure(parents: Rows, longest: np.ndarray) -> Sparse:
    """Entry (i, j) is 1 where j is an ancestor of i or i itself: (N, N), int32, by repeated squaring of I + parents.

    ⌈log2 depth⌉ sparse products; each is cut back to zeros and ones, so counts of paths cannot overflow.
    """
    size = len(longest)
    pairs = int(longest.sum()) + size  # exact on a tree
    if pairs > LARGEST_CLOSURE and (parents.counts() <= 1).all():
        raise LeafwardError(
            f"this taxonomy of {size:,} nodes, {int(longest.max()):,} deep, has {pairs:,} pairs of a node and its "
            f"ancestor; at most {LARGEST_CLOSURE:,} can be kept"
        )
    reach, steps = matrix(parents) + _identity(size), 1
    while steps < longest.max(initial=0):
        reach = reach @ reach
        reach.data[:] = 1
        steps *= 2
    reach.sort_indices()
    return reach


def climbs(parents: Rows, ancestors: Sparse, longest: np.ndarray) -> Sparse:
    """One plus the edges on the shortest way up from i to its ancestor j, at the entries of `ancestors`: (N, N).

    On a tree that is a difference of depths. On a DAG the number of steps s = 0, 1, 2, … within which j has not
    been reached is counted, one sparse product for each s.
    """
    distance = ancestors.copy()
    if (parents.counts() <= 1).all():
        node = np.repeat(np.arange(len(longest)), np.diff(ancestors.indptr))
        distance.data = (longest[node] - longest[ancestors.indices] + 1).astype(np.int32)
        return distance
    within = _identity(len(longest))
    step = matrix(parents) + within
    missing = ancestors - within
    while missing.nnz:
        distance = distance + missing
        within = within @ step
        within.data[:] = 1
        missing = ancestors - within
        missing.eliminate_zeros()
    distance.sort_indices()
    return distance
