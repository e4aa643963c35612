"""A tree spread about its root in the plane, subtree beside subtree: a start that leaves nothing to be disentangled.

On a DAG every node hangs from its first parent on a shortest way to the root.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from leafward.hierarchy.taxonomy import Taxonomy

#: Distance of the deepest nodes from the origin: where curvature is not yet felt, and small steps go far.
REACH = 0.1
#: Standard deviation of a coordinate about its place, so that no two nodes, and no two seeds, begin alike.
NOISE = 1e-2


def leaves_below(tax: Taxonomy) -> np.ndarray:
    """How many leaves hang from each node, one from a leaf itself: (N)."""
    above = tax.first_parent.tolist()
    total = (np.bincount(tax.first_parent + 1, minlength=len(tax) + 1)[1:] == 0).astype(np.int64).tolist()
    for node in tax.order[:0:-1].tolist():  # children before parents, the root left out
        total[above[node]] += total[node]
    return np.array(total)


def angles(tax: Taxonomy) -> np.ndarray:
    """The middle of each node's part of the circle, which it shares among its children by their leaves: (N)."""
    above, count = tax.first_parent.tolist(), leaves_below(tax)
    begin, taken = np.zeros(len(tax)), np.zeros(len(tax))
    for node in tax.order[1:].tolist():  # parents before children
        parent = above[node]
        begin[node] = begin[parent] + taken[parent]
        taken[parent] += count[node]
    return 2.0 * np.pi * (begin + count / 2.0) / count[tax.root]


def fan(tax: Taxonomy, seed: int) -> Tensor:
    """Tangent vectors at the origin towards `angles`, turned at random, as long as the depth says: (N, 2)."""
    rng = np.random.default_rng(seed)
    turned = angles(tax) + rng.uniform(0.0, 2.0 * np.pi)
    length = REACH * tax.depth / max(1, int(tax.depth.max()))
    places = length[:, None] * np.stack([np.cos(turned), np.sin(turned)], axis=1)
    return torch.from_numpy(places + rng.normal(0.0, NOISE, places.shape)).float()
