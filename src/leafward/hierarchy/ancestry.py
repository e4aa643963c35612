"""Who stands above whom: answers about pairs of nodes in memory that grows with the graph, not with its depth.

On a tree, heavy paths and an order of first visits (O(N) numbers) answer everything. On a DAG the ancestors of the
nodes in question are searched, many nodes at a time; what was found for all nodes is kept where it is small.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from leafward.hierarchy.graph import Rows

#: Cells of the table in which a search marks, for each of its nodes, what it has seen: 128 MiB.
CELLS = 1 << 25
#: Ancestors that are looked at in one go, about.
ENTRIES = 1 << 19


class Forebears(NamedTuple):
    """A(i) of several nodes i, itself included: start (B+1); items (E), the ancestors; steps (E), edges on the
    shortest way up to each."""

    start: np.ndarray
    items: np.ndarray
    steps: np.ndarray

    def of(self, nodes: np.ndarray) -> Forebears:
        """Those of some of the nodes, by their places."""
        owner, place = Rows(self.start, np.arange(len(self.items))).expand(nodes)
        counts = np.bincount(owner, minlength=len(nodes))
        return Forebears(np.concatenate([[0], np.cumsum(counts)]), self.items[place], self.steps[place])


def reach(rows: Rows, nodes: np.ndarray) -> np.ndarray:
    """All that can be reached from some nodes along `rows`, themselves included, ascending: O(N + E)."""
    seen = np.zeros(len(rows.start) - 1, bool)
    seen[nodes] = True
    fresh = np.flatnonzero(seen)
    while len(fresh):
        _, found = rows.expand(fresh)
        found = found[~seen[found]]
        seen[found] = True
        fresh = np.unique(found)
    return np.flatnonzero(seen)


class Search:
    """Breadth-first searches for the ancestors of a few nodes at a time, which share one table of marks."""

    def __init__(self, parents: Rows, most: int) -> None:
        """At most `most` nodes at a time; the table has most · N cells."""
        self.parents, self.counts, self.size = parents, parents.counts(), len(parents.start) - 1
        self.winner = np.full(most * self.size, -1, np.int32)  # which of several ways to the same place goes on

    def __call__(self, nodes: np.ndarray) -> Forebears:
        """Their ancestors, by the number of steps up to them: (B) nodes, all in step."""
        place = np.arange(len(nodes)) * self.size + nodes
        self.winner[place] = 0
        places = [place]
        while len(place):
            edges = np.cumsum(self.counts[place % self.size])
            slices = np.searchsorted(edges, np.arange(ENTRIES, edges[-1] + ENTRIES, ENTRIES))  # of about as many edges
            cuts = np.split(place, np.unique(np.minimum(slices + 1, len(place)))[:-1])
            place = np.concatenate([self._above(cut) for cut in cuts])
            places.append(place)
        steps = np.repeat(np.arange(len(places), dtype=np.int32), [len(each) for each in places])
        found = np.concatenate(places)
        self.winner[found] = -1
        whose, items = np.divmod(found, self.size)
        order = np.argsort(whose, kind="stable")
        start = np.concatenate([[0], np.cumsum(np.bincount(whose, minlength=len(nodes)))])
        return Forebears(start, items[order], steps[order])

    def _above(self, place: np.ndarray) -> np.ndarray:
        """Places one step further up that no way has come to yet, each once."""
        whose, node = np.divmod(place, self.size)
        counts = self.counts[node]
        first = np.repeat(self.parents.start[node] - (np.cumsum(counts) - counts), counts)
        above = self.parents.items[first + np.arange(len(first))] + np.repeat(whose * self.size, counts)
        above = above[self.winner[above] < 0]
        turn = np.arange(len(above), dtype=np.int32)
        self.winner[above] = turn
        return above[self.winner[above] == turn]


def closure(parents: Rows, most: int) -> Forebears | None:
    """The ancestors of every node, those of each ascending; None where there are more than `most` in all."""
    size = len(parents.start) - 1
    block, total, parts = max(1, CELLS // size), 0, []
    search = Search(parents, min(block, size))
    some = np.unique(np.linspace(0, size - 1, min(block, size, 200)).astype(np.int64))
    if len(search(some).items) * (size / len(some)) > 2 * most:  # surely too many
        return None
    for first in range(0, size, block):
        found = search(np.arange(first, min(size, first + block)))
        total += len(found.items)
        if total > most:
            return None
        owner = np.repeat(np.arange(len(found.start) - 1), np.diff(found.start))
        order = np.argsort(owner * size + found.items)
        parts.append((np.diff(found.start), found.items[order].astype(np.int32), found.steps[order]))
    counts, items, steps = (np.concatenate(each) for each in zip(*parts, strict=True))
    return Forebears(np.concatenate([[0], np.cumsum(counts)]), items, steps)


class Shared(NamedTuple):
    """Common ancestors of some pairs. which: the pairs; pair (E), ascending: the place of a pair among them; node (E):
    an ancestor of both; ways (E): edges up to it from both sides together. Every pair has one at least, the root."""

    which: slice
    pair: np.ndarray
    node: np.ndarray
    ways: np.ndarray

    def least(self, values: np.ndarray) -> np.ndarray:
        """The least of values (E) for each pair."""
        return np.minimum.reduceat(values, np.flatnonzero(np.diff(self.pair, prepend=-1)))


def shared(parents: Rows, kept: Forebears | None, first: np.ndarray, second: np.ndarray) -> Iterator[Shared]:
    """Common ancestors of pairs of nodes (P), (P), some pairs at a time; `kept`: those of all nodes, if there are."""
    size = len(parents.start) - 1
    most = max(1, min(len(first), CELLS // (2 * size)))
    table = np.zeros(most * size, np.int32)
    rows = Search(parents, most) if kept is None else kept.of
    begin, step = 0, min(most, max(1, ENTRIES // size))
    while begin < len(first):
        which = slice(begin, begin + step)
        (a, left, up), (b, right, down) = (_owned(rows(ends[which])) for ends in (first, second))
        table[b * size + right] = down + 1  # zero: no ancestor
        other = table[a * size + left]
        table[b * size + right] = 0
        begin += step
        if len(left) + len(right) < ENTRIES:
            step = min(most, 2 * step)
        elif len(left) + len(right) > 2 * ENTRIES:
            step = max(1, step // 2)
        both = other > 0
        yield Shared(which, a[both], left[both], up[both].astype(np.int64) + other[both] - 1)


def _owned(found: Forebears) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    owner = np.repeat(np.arange(len(found.start) - 1), np.diff(found.start))
    return owner, found.items.astype(np.int64), found.steps


class Tree:
    """A tree cut into heavy paths: from a node to the root one crosses at most log2 N of them.

    top (N): the highest node of each one's path. enter, leave (N): the nodes below i, itself included, are those whose
    `enter` lies in [enter_i, leave_i).
    """

    def __init__(self, parent: np.ndarray, depth: np.ndarray, order: np.ndarray) -> None:
        """parent (N): −1 at the root; order (N): parents before children."""
        self.parent, self.depth = parent, depth
        up, down = parent.tolist(), order.tolist()
        size, heavy = [1] * len(up), [-1] * len(up)
        for node in reversed(down):
            above = up[node]
            if above >= 0:
                size[above] += size[node]
                if heavy[above] < 0 or size[node] > size[heavy[above]]:
                    heavy[above] = node
        top, enter, room = list(range(len(up))), [0] * len(up), [1] * len(up)
        for node in down:
            above = up[node]
            if above >= 0:
                enter[node] = enter[above] + room[above]
                room[above] += size[node]
                if heavy[above] == node:
                    top[node] = top[above]
        self.top, self.enter = np.array(top, np.int64), np.array(enter, np.int64)
        self.leave = self.enter + np.array(size, np.int64)

    def lca(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Lowest common ancestors, pair by pair: (P), (P) -> (P)."""
        a, b = a.copy(), b.copy()
        apart = np.flatnonzero(self.top[a] != self.top[b])
        while len(apart):
            p, q = a[apart], b[apart]
            climbs = self.depth[self.top[p]] >= self.depth[self.top[q]]  # the path that begins lower is left
            a[apart] = np.where(climbs, self.parent[self.top[p]], p)
            b[apart] = np.where(climbs, q, self.parent[self.top[q]])
            apart = apart[self.top[a[apart]] != self.top[b[apart]]]
        return np.where(self.depth[a] <= self.depth[b], a, b)

    def entails(self, above: np.ndarray, below: np.ndarray) -> np.ndarray:
        """Whether `above` is an ancestor of `below` or `below` itself: (P), (P) -> (P)."""
        return (self.enter[above] <= self.enter[below]) & (self.enter[below] < self.leave[above])
