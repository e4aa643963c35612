"""How well an embedding tells a taxonomy: ranks of related nodes, and how far distances are from those in the graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leafward.errors import UsageError
from leafward.hierarchy.graph import Rows

#: Entries of a block of scores (nodes, N).
BLOCK = 1 << 23


@dataclass(frozen=True)
class Reconstruction:
    """What `reconstruction` found, over the M nodes that have a related one.

    mean_average_precision: mean over these nodes of their average precision.
    mean_rank: mean over all pairs of the rank of the related node among the unrelated ones, from 1.
    nodes (M), average_precision (M): node by node.
    """

    mean_average_precision: float
    mean_rank: float
    nodes: np.ndarray
    average_precision: np.ndarray


def reconstruction(
    related: Rows, scores: Callable[[Tensor], Tensor], nodes: np.ndarray | None = None
) -> Reconstruction:
    """Rank all N nodes by their score from each node, small first, and see where the related ones stand.

    related: for each node those that should be first, without itself. scores: numbers of nodes (B) -> (B, N).
    nodes: only from these; default all.

    The rank of a related node is one plus the number of *unrelated* nodes, the node itself left out, of smaller score
    (Nickel & Kiela 2017). With ranks r_1 ≤ … ≤ r_K the i-th stands at place r_i + i − 1, so the average precision is
    the mean of i / (r_i + i − 1).
    """
    count = len(related.start) - 1
    chosen = np.arange(count) if nodes is None else np.asarray(nodes, np.int64)
    chosen = chosen[related.counts()[chosen] > 0]
    if not len(chosen):
        raise UsageError("nodes: none of them has a related node, so there is nothing to rank")
    chosen = chosen[np.argsort(related.counts()[chosen], kind="stable")]  # blocks of about equal width
    step = max(1, BLOCK // count)
    blocks = [_ranked(related, scores, chosen[first : first + step]) for first in range(0, len(chosen), step)]
    precision, ranks = (np.concatenate(parts) for parts in zip(*blocks, strict=True))
    order = np.argsort(chosen)
    return Reconstruction(float(precision.mean()), float(ranks.mean()), chosen[order], precision[order])


def _ranked(related: Rows, scores: Callable[[Tensor], Tensor], nodes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Average precision of each node (B) and the ranks of all its related ones (pairs)."""
    values = scores(torch.from_numpy(nodes)).detach().cpu()
    if not bool(torch.isfinite(values).all()):
        raise UsageError("scores must be finite")
    owner, other = (torch.from_numpy(part) for part in related.expand(nodes))
    counts = related.counts()[nodes]
    column = torch.from_numpy(np.arange(len(other)) - np.repeat(np.cumsum(counts) - counts, counts))
    wanted = values.new_full((len(nodes), int(counts.max())), torch.inf)
    wanted[owner, column] = values[owner, other]
    values = values.clone()
    values[owner, other] = torch.inf
    values[torch.arange(len(nodes)), torch.from_numpy(nodes)] = torch.inf
    # numpy's sort of floats is vectorised; what is infinite goes to the end, behind every score that is asked for
    unrelated = torch.from_numpy(np.sort(values.numpy(), axis=1))
    wanted = wanted.sort(dim=1).values
    ranks = torch.searchsorted(unrelated, wanted).numpy() + 1
    position = np.arange(1, ranks.shape[1] + 1)
    filled = position <= counts[:, None]
    precision = np.where(filled, position / (ranks + position - 1), 0.0).sum(axis=1) / counts
    return precision, ranks[filled]


@dataclass(frozen=True)
class Distortion:
    """What `distortion` found: the mean of |s·d/g − 1| with the best scale s, that scale, and the worst ratio."""

    mean: float
    scale: float
    worst: float


def distortion(embedded: Any, graph: Any) -> Distortion:
    """Embedded distances d (P) against distances g > 0 in the graph (P), pair by pair.

    Both are up to scale, so d is multiplied by the s that minimises Σ (s·d/g − 1)²: s = Σ r / Σ r² with r = d/g. The
    worst case, max r / min r, needs no scale (Sala et al. 2018, sec. 2); it is infinite where two nodes coincide.
    """
    d, g = (np.asarray(torch.as_tensor(values).detach().cpu(), np.float64).ravel() for values in (embedded, graph))
    if len(d) != len(g) or not len(d):
        raise UsageError(f"embedded and graph must be of one length ≥ 1, got {len(d)} and {len(g)}")
    if not (g > 0).all() or not (np.isfinite(d) & (d >= 0)).all():
        raise UsageError("graph distances must be positive, embedded ones finite and not negative")
    ratio = d / g
    square = (ratio**2).sum()
    scale = float(ratio.sum() / square) if square else 1.0
    least = ratio.min()
    return Distortion(float(abs(scale * ratio - 1.0).mean()), scale, float(ratio.max() / least) if least else np.inf)
