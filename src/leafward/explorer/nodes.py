"""Points for the nodes of a taxonomy, where the points at hand are items that belong to nodes.

Each node that has items at or below it stands at the centroid of these, in every space, so that an item has ancestors
to be seen and a way to the root.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from leafward.explorer.sources import Source, Space
from leafward.geometry import Lorentz
from leafward.hierarchy import Taxonomy, stores
from leafward.hierarchy.graph import Sparse


def with_nodes(source: Source) -> tuple[Source, np.ndarray, np.ndarray]:
    """A source with its hierarchy: more points where needed, the level of each (N), edges parent -> child (E, 2).

    The level is the depth of a node, and one more for an item; −1 where nothing is known.
    """
    tax, nodes = source.taxonomy, source.nodes
    if tax is None or nodes is None:
        return source, np.full(len(source), -1), np.zeros((0, 2), np.int64)
    if source.own:
        return source, tax.depth[nodes], _edges(tax, nodes, 0)
    filled, place = np.unique(nodes, return_inverse=True)
    above = tax.ancestors[filled]
    kept = np.unique(above.indices)
    items, count = len(source), len(source) + len(kept)
    grown = replace(
        source,
        names=source.names + [tax.names[node] for node in kept],
        spaces=tuple(_with_centroids(space, place, above[:, kept]) for space in source.spaces),
        classes=None if source.classes is None else source.classes + [tax.names[node] for node in kept],
        nodes=np.concatenate([nodes, kept]),
    )
    level = np.concatenate([tax.depth[nodes] + 1, tax.depth[kept]])
    row = np.full(len(tax), -1)
    row[kept] = np.arange(items, count)
    own = np.stack([row[nodes], np.arange(items)], axis=1)
    return grown, level, np.concatenate([own, _edges(tax, kept, items)])


def _with_centroids(space: Space, group: np.ndarray, above: Sparse) -> Space:
    """Points (N, m) of U groups, with a centroid for each of the K nodes above them: above (U, K) -> (N + K, m)."""
    rows, groups, count = space.points, torch.from_numpy(group), above.shape[0]
    if isinstance(space.manifold, Lorentz):
        c = float(space.manifold.c)
        sums = stores.group_sums(rows[:, 1:], groups, count, c)
        middle = space.manifold.lift(stores.centres(torch.from_numpy(above.T @ sums.numpy()), c).float())
    else:
        sums = rows.new_zeros(count, rows.shape[1], dtype=torch.float64).index_add_(0, groups, rows.double())
        sizes = above.T @ np.bincount(group, minlength=count)
        middle = torch.from_numpy((above.T @ sums.numpy()) / sizes[:, None]).float()
    return replace(space, points=torch.cat([rows, middle.to(rows.dtype)]), drawn=None)


def _edges(tax: Taxonomy, nodes: np.ndarray, first: int) -> np.ndarray:
    """Edges (E, 2) among different nodes whose rows are first, first + 1, …; of several parents of a node, the one on
    the drawn way to the root comes first."""
    row = np.full(len(tax), -1)
    row[nodes] = np.arange(first, first + len(nodes))
    child, parent = tax.parents.expand(np.arange(len(tax)))
    order = np.lexsort((parent != tax.first_parent[child], child))
    edges = row[np.stack([parent[order], child[order]], axis=1)]
    return edges[(edges >= 0).all(axis=1)]
