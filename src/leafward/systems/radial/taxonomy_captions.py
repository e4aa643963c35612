"""Chains and trees of captions from a taxonomy, with negatives."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from leafward.data.captions import Captions, readable
from leafward.errors import UsageError
from leafward.hierarchy import Taxonomy
from leafward.hierarchy.graph import Sparse, matrix

#: draws before the few nodes with hardly any unrelated one are searched exactly
ROUNDS = 20


def taxonomy_chains(
    tax: Taxonomy, *, seed: int = 0, caption: Callable[[str], str] = readable, keep_root: bool = False, root: str = ""
) -> list[Captions]:
    """One chain for each leaf: the way from the top of the taxonomy down to it.

    The taxonomy's own root says nothing about what is below it and is left out unless `keep_root`. `caption` turns
    the name of a node into a text. `root`: the text of the chains' root. No negative is an ancestor of the leaf.
    """
    ways = tax.paths()
    rows, columns = np.nonzero(ways >= 0)
    nodes = ways[rows, columns]
    if not keep_root:
        rows, nodes = rows[nodes != tax.root], nodes[nodes != tax.root]
    wrong = unrelated(tax, nodes, np.random.default_rng(seed), tax.ancestors[tax.leaves], rows)
    found = []
    for line, other in zip(_split(nodes, rows), _split(wrong, rows), strict=True):
        if len(line) > 1:
            texts = [caption(tax.names[node]) for node in line]
            found.append(Captions.chain(texts, _texts(tax, other, caption), root=root))
    if not found:
        raise UsageError("the taxonomy has no way with two levels; pass keep_root to count its root as one")
    return found


def taxonomy_trees(
    tax: Taxonomy, *, seed: int = 0, caption: Callable[[str], str] = readable, keep_root: bool = False, root: str = ""
) -> list[Captions]:
    """One tree for each inner node: the node with its children under it.

    Every edge of the taxonomy occurs once (also where a node has several parents), whereas chains repeat those near
    the root for every leaf below. The node's negative is an ancestor of none of the children.
    """
    counts = tax.children.counts()
    inner = np.flatnonzero(counts > 0)
    inner = inner if keep_root else inner[inner != tax.root]
    if not len(inner):
        raise UsageError("the taxonomy has no inner node below its root; pass keep_root to count the root as one")
    wrong = unrelated(tax, inner, np.random.default_rng(seed), _above_children(tax, inner), np.arange(len(inner)))
    found = []
    for node, other in zip(inner.tolist(), wrong.tolist(), strict=True):
        members = np.concatenate([[node], tax.children.of(node)])
        negatives = _texts(tax, [other], caption) + [None] * (len(members) - 1)
        texts = tuple(caption(tax.names[member]) for member in members)
        found.append(Captions(texts, (-1,) + (0,) * (len(members) - 1), tuple(negatives), root=root))
    return found


def unrelated(
    tax: Taxonomy,
    nodes: np.ndarray,
    rng: np.random.Generator,
    above: Sparse = None,
    rows: np.ndarray | None = None,
) -> np.ndarray:
    """For each node a random one of the same depth that is neither above nor below it: (K) -> (K).

    Where the depth has none, one of any depth; −1 where every node is related. `above` (R, N) and `rows` (K): row
    `rows[k]` of `above` marks the ancestors of what the k-th node is paired with, its own among them. In a DAG its own
    are not enough: an ancestor of the more specific node may be unrelated to the more general one.
    """
    if above is None or rows is None:
        above, rows = tax.ancestors, nodes
    order = np.argsort(tax.depth, kind="stable")
    start = np.searchsorted(tax.depth[order], np.arange(tax.depth.max() + 2))
    low, high = start[tax.depth[nodes]], start[tax.depth[nodes] + 1]
    chosen = np.full(len(nodes), -1, np.int64)
    waiting = np.arange(len(nodes))
    for _ in range(ROUNDS):
        if not len(waiting):
            return chosen
        drawn = order[rng.integers(low[waiting], high[waiting])]
        fits = ~(tax.entails(nodes[waiting], drawn) | np.asarray(above[rows[waiting], drawn], bool).ravel())
        chosen[waiting[fits]] = drawn[fits]
        waiting = waiting[~fits]
    for node in np.unique(nodes[waiting]):
        places = waiting[nodes[waiting] == node]
        free = np.setdiff1d(np.arange(len(tax)), np.union1d(tax.under(node), tax.ancestors[[node]].indices))
        narrowed = np.diff(above[rows[places]][:, free].tocsr().indptr) > 0  # never in a tree
        plain = places[~narrowed]
        chosen[plain] = _draw(tax, node, free, rng, len(plain))
        for place in places[narrowed]:
            chosen[place] = _draw(tax, node, np.setdiff1d(free, above[[rows[place]]].indices), rng, 1)[0]
    return chosen


def _draw(tax: Taxonomy, node: int, free: np.ndarray, rng: np.random.Generator, count: int) -> np.ndarray:
    """`count` of the `free` nodes, of the depth of `node` where there are any; −1 where nothing is free."""
    same = free[tax.depth[free] == tax.depth[node]]
    pool = same if len(same) else free
    return rng.choice(pool, count) if len(pool) else np.full(count, -1, np.int64)


def _above_children(tax: Taxonomy, inner: np.ndarray) -> Sparse:
    """Row k marks the ancestors of all children of node `inner[k]`, the children included: sparse (K, N)."""
    return (matrix(tax.children)[inner] @ tax.ancestors).tocsr()


def _split(values: np.ndarray, rows: np.ndarray) -> list[np.ndarray]:
    """`values` cut where the sorted `rows` change."""
    return np.split(values, np.flatnonzero(np.diff(rows)) + 1)


def _texts(tax: Taxonomy, nodes: np.ndarray | list[int], caption: Callable[[str], str]) -> list[str | None]:
    return [caption(tax.names[node]) if node >= 0 else None for node in nodes]
