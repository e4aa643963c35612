"""Ollivier-Ricci curvature: do the neighbours of two neighbours lie nearer together than the two (> 0) or not (< 0)?

For an edge x–y of a graph and a random walk m_x that stays with probability α and else goes to a neighbour,

    κ(x, y) = 1 − W₁(m_x, m_y) / d(x, y),

W₁ the earth mover's distance under the number of steps between nodes. Trees are negative, cliques positive, grids flat.
Around an edge those numbers are 0, 1, 2 or 3. Where both walks have equally many equal atoms (α = a/(a+k) for a whole
number a) the transport is an assignment (Birkhoff), which is solved exactly; other edges by splitting atoms, or a
linear program.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, lcm
from typing import Any

import numpy as np

from leafward.errors import need

NEIGHBOURS = 10
IDLENESS = 0.5  # as in GraphRicciCurvature
MOST_ATOMS = 120  # of an assignment; a linear program is faster beyond
CHUNK = 4096  # edges whose costs are gathered at a time


@dataclass(frozen=True)
class Graph:
    """Numbers of steps between nodes (n, n), cut at 3 (int8), and the neighbours of each node in order."""

    steps: np.ndarray
    neighbours: tuple[np.ndarray, ...]

    @staticmethod
    def of_edges(nodes: int, edges: np.ndarray) -> Graph:
        """An undirected graph by its edges (e, 2)."""
        adjacency = _adjacency(nodes, edges)
        return Graph(_steps(adjacency), tuple(np.split(adjacency.indices, adjacency.indptr[1:-1])))


def edge_curvatures(graph: Graph, edges: np.ndarray, alpha: float = IDLENESS) -> np.ndarray:
    """κ (e,) of edges (e, 2) of a graph, exact; the walk goes to each neighbour with equal probability."""
    need(0 <= alpha < 1, "alpha", "at least 0 and less than 1", alpha)
    return np.array([1 - _transport(graph, int(x), int(y), alpha) for x, y in edges])


def neighbour_curvatures(neighbours: np.ndarray, edges: np.ndarray, idle: int | None = None) -> np.ndarray:
    """κ (e,) of edges (e, 2) = (x, one of its k nearest), for the walk to the k nearest neighbours (n, k) of each
    point.

    Steps are counted in the graph that joins each point to its k nearest. `idle` is the number of atoms that stay, each
    as heavy as a neighbour; the default k gives α = ½. Every walk has k equal atoms, so that hubs cost no more than
    others.
    """
    nodes, k = neighbours.shape
    stay = k if idle is None else idle
    joined = np.stack([np.repeat(np.arange(nodes), k), neighbours.ravel()], axis=1)
    steps = _steps(_adjacency(nodes, joined))
    atoms = np.concatenate([np.repeat(np.arange(nodes)[:, None], stay, axis=1), neighbours], axis=1)
    return _assign(steps, atoms, edges)


def neighbour_ricci(neighbours: np.ndarray, edges: int = 1000, seed: int = 0) -> float:
    """Mean κ over edges of the k-nearest-neighbour graph (n, k), at most `edges` of them, drawn at random.

    Edges share nodes, and all of them the few rows that are near to many, so an interval needs several graphs.
    """
    nodes, k = neighbours.shape
    count = min(edges, nodes * k)
    if nodes < 4 or not count:
        return float("nan")
    drawn = np.random.default_rng(seed).permutation(nodes * k)[:count]
    chosen = np.stack([drawn // k, neighbours.ravel()[drawn]], axis=1)
    return float(neighbour_curvatures(neighbours, chosen).mean())


def _assign(steps: np.ndarray, atoms: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """1 − the cost of the best assignment of the atoms (n, a) of both ends, for each edge."""
    from scipy.optimize import linear_sum_assignment

    found = np.empty(len(edges))
    size = atoms.shape[1]
    for start in range(0, len(edges), CHUNK):
        part = edges[start : start + CHUNK]
        costs = steps[atoms[part[:, 0]][:, :, None], atoms[part[:, 1]][:, None, :]].astype(np.float64)
        for place, cost in enumerate(costs, start):
            rows, columns = linear_sum_assignment(cost)
            found[place] = 1 - cost[rows, columns].sum() / size
    return found


def _transport(graph: Graph, x: int, y: int, alpha: float) -> float:
    """W₁ of the walks from x and y."""
    left, right = (np.concatenate([[node], graph.neighbours[node]]) for node in (x, y))
    cost = graph.steps[np.ix_(left, right)].astype(np.float64)
    p, q = (np.r_[alpha, np.full(len(each) - 1, (1 - alpha) / (len(each) - 1))] for each in (left, right))
    atoms = _common_atoms(len(left) - 1, len(right) - 1, alpha)
    if atoms is None:
        return _program(cost, p, q)
    from scipy.optimize import linear_sum_assignment

    one, other = np.rint(p * atoms).astype(int), np.rint(q * atoms).astype(int)
    spread = np.repeat(np.repeat(cost, one, axis=0), other, axis=1)
    rows, columns = linear_sum_assignment(spread)
    return float(spread[rows, columns].mean())


def _common_atoms(dx: int, dy: int, alpha: float) -> int | None:
    """Into how many equal atoms both walks can be split: α and (1 − α)/d whole numbers of them; None if too many."""
    from fractions import Fraction

    share = Fraction(alpha).limit_denominator(10_000)
    if abs(float(share) - alpha) > 1e-15:
        return None
    parts = [share, (1 - share) / dx, (1 - share) / dy]
    atoms = lcm(*(part.denominator for part in parts))
    atoms //= gcd(*(int(part * atoms) for part in parts), atoms)
    return atoms if atoms <= MOST_ATOMS else None


def _program(cost: np.ndarray, p: np.ndarray, q: np.ndarray) -> float:
    """min Σ cost·π over plans π with these margins, by a linear program."""
    from scipy.optimize import linprog
    from scipy.sparse import csr_array, kron, vstack

    a, b = cost.shape
    margins = vstack([kron(csr_array(np.eye(a)), np.ones((1, b))), kron(np.ones((1, a)), csr_array(np.eye(b)))])
    solved = linprog(cost.ravel(), A_eq=margins.tocsr()[:-1], b_eq=np.r_[p, q][:-1], method="highs")
    return float(solved.fun)


def _adjacency(nodes: int, edges: np.ndarray) -> Any:
    from scipy.sparse import csr_array

    edges = edges[edges[:, 0] != edges[:, 1]]
    both = np.concatenate([edges, edges[:, ::-1]])
    found = csr_array((np.ones(len(both), dtype=np.int32), (both[:, 0], both[:, 1])), shape=(nodes, nodes))
    found.sum_duplicates()
    found.sort_indices()
    return found


def _steps(adjacency: Any) -> np.ndarray:
    """0 on the diagonal, 1 for neighbours, 2 where there is a common neighbour, 3 else (around an edge: exactly)."""
    steps = np.full(adjacency.shape, 3, dtype=np.int8)
    two = (adjacency @ adjacency).tocoo()
    steps[two.row, two.col] = 2
    one = adjacency.tocoo()
    steps[one.row, one.col] = 1
    np.fill_diagonal(steps, 0)
    return steps
