"""A tree drawn in the hyperbolic plane, without crossings.

Every node owns an arc of the circle at infinity, the root all of it, and shares it among its children; a child stands
at distance τ from its parent, in the middle of its arc as its parent sees it. Seen from the child, an arc of half width
h (about the way on) is wider, tan(φ/2) = e^τ tan(h/2): that is the room which the hyperbolic plane has and the flat one
has not (Lamping, Rao & Pirolli 1995). Arcs are nested and geodesics that end on disjoint arcs do not cross.
"""

from __future__ import annotations

import numpy as np

from leafward.explorer.layout import Layout
from leafward.hierarchy import Taxonomy
from leafward.hierarchy.fan import leaves_below

#: Hyperbolic radius of the deepest node, and longest edge. Longer edges bend distances less, and show less at once.
REACH, LONGEST_EDGE = 14.0, 1.5
#: Half width of what a node may use of its own view: the return to the parent stays free.
WIDEST = 0.75 * np.pi


def tree_layout(tax: Taxonomy) -> Layout:
    """A point of the disk for each node; on a DAG by its first parent on a shortest way to the root."""
    deepest = int(tax.depth.max())
    step = min(LONGEST_EDGE, REACH / max(1, deepest))
    parent, weight = tax.first_parent, _weights(tax)
    place = np.zeros(len(tax), np.complex128)  # of the node in the disk
    turn = np.ones(len(tax), np.complex128)  # of the node's own frame: where "on" points
    half = np.full(len(tax), np.pi)  # of the arc in that frame
    by_depth = np.argsort(tax.depth, kind="stable")
    for nodes in np.split(by_depth, np.searchsorted(tax.depth[by_depth], np.arange(1, deepest + 1)))[1:]:
        nodes = nodes[np.argsort(parent[nodes], kind="stable")]
        above = parent[nodes]
        middle, width = _shares(above, weight[nodes], half)
        place[nodes], turn[nodes] = _walk(place[above], turn[above] * np.exp(1j * middle), np.tanh(0.5 * step))
        half[nodes] = np.minimum(WIDEST, 2.0 * np.arctan(np.exp(step) * np.tan(0.5 * width)))
    flat = np.stack([place.real, place.imag], axis=1)
    method = f"tree drawn in the hyperbolic plane: edges of length {step:.3g}, nested arcs at infinity"
    return Layout(flat, True, method)


def _weights(tax: Taxonomy) -> np.ndarray:
    """How much of its parent's arc a node asks for: the square root of the leaves under it, (N).

    Equal shares squeeze large subtrees, shares by leaves squeeze small ones; between them distances are bent least.
    """
    return np.sqrt(leaves_below(tax))


def _shares(above: np.ndarray, weight: np.ndarray, half: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Middle and half width, in the parent's frame, of the arcs of nodes sorted by their parent: (K) -> (K), (K)."""
    first = np.flatnonzero(np.r_[True, above[1:] != above[:-1]])
    total = np.add.reduceat(weight, first)
    group = np.repeat(np.arange(len(first)), np.diff(np.r_[first, len(above)]))
    end = np.cumsum(weight)
    end -= np.r_[0.0, end[first[1:] - 1]][group]
    width = half[above] * weight / total[group]
    return half[above] * (2.0 * end / total[group] - 1.0) - width, width


def _walk(place: np.ndarray, direction: np.ndarray, r: float) -> tuple[np.ndarray, np.ndarray]:
    """From `place` in a unit direction by the geodesic of Euclidean length r at the origin: where, and heading how.

    The isometry w -> (w + p)/(1 + p̄ w) takes the origin to p; its derivative at w, of which the angle counts, is
    (1 − |p|²)/(1 + p̄ w)².
    """
    w = r * direction
    down = 1.0 + np.conj(place) * w
    heading = direction / down**2
    return (w + place) / down, heading / np.abs(heading)
