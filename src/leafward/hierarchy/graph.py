"""Integer-array algorithms on directed acyclic graphs: what a `Taxonomy` is made of.

A graph of N nodes and E edges is kept as *rows*: ``start (N+1)`` and ``items (E)``, the neighbours of node i being
``items[start[i]:start[i+1]]`` (compressed sparse rows without values).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

#: a scipy.sparse.csr_array; the operators of that class carry no usable types
Sparse = Any


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


def find_cycle(parents: Rows, children: Rows) -> list[int]:
    """The nodes of one cycle, each followed by a parent of its; the graph must have one. O(N + E)."""
    waiting = parents.counts().tolist()
    start, items = children.start.tolist(), children.items.tolist()
    free = [node for node, count in enumerate(waiting) if count == 0]
    for node in free:  # grows while it is read; what is never freed has a parent that is never freed
        for child in items[start[node] : start[node + 1]]:
            waiting[child] -= 1
            if waiting[child] == 0:
                free.append(child)
    node, seen = next(node for node, count in enumerate(waiting) if count), {}
    while node not in seen:
        seen[node] = len(seen)
        node = next(int(parent) for parent in parents.of(node) if waiting[parent])
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
