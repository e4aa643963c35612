"""Points for the nodes of a taxonomy, learned so that each node lies nearest to its ancestors, or in their cones.

Shapes: N nodes, n the dimension, B anchors of a batch, C candidates (what the anchors are compared with), P pairs of an
anchor and one of its ancestors. A batch compares every anchor with every candidate by one matrix product: the
candidates are the anchors themselves, which are a uniform sample of the nodes, and all their ancestors.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import relu, softplus

from leafward.errors import UsageError
from leafward.geometry import SPACES, SpaceForm, space_of
from leafward.hierarchy.graph import Rows
from leafward.hierarchy.taxonomy import Taxonomy

Geometry = Literal["lorentz", "poincare", "euclidean"]
Objective = Literal["distance", "cones"]
GEOMETRIES: tuple[Geometry, ...] = ("lorentz", "poincare", "euclidean")
OBJECTIVES: tuple[Objective, ...] = ("distance", "cones")
#: Standard deviation of a coordinate at the start: all nodes about the origin, where curvature is not yet felt.
START = 1e-2


def manifold_of(geometry: str, c: float = 1.0) -> SpaceForm:
    """The space that a geometry's name stands for; Euclidean space has no curvature."""
    if geometry not in SPACES:
        raise UsageError(f"geometry must be one of {', '.join(SPACES)}, got {geometry!r}")
    return space_of(geometry, c)


def proper_ancestors(tax: Taxonomy) -> Rows:
    """For each node its ancestors without itself: the transitive closure as neighbour lists."""
    above = tax.ancestors
    node = np.repeat(np.arange(len(tax)), np.diff(above.indptr))
    proper = above.indices != node
    start = np.concatenate([[0], np.cumsum(tax.ancestor_counts - 1)])
    return Rows(start, above.indices[proper].astype(np.int64))


class Batch(NamedTuple):
    """Anchors and the candidates they are compared with, as numbers of nodes.

    candidates (C): distinct. own (B): the anchors' places among them. owner, place (P): candidate `place[p]` is an
    ancestor of anchor `owner[p]`. hidden (B, C): what is no negative, the anchor's ancestors and itself.
    """

    candidates: Tensor
    own: Tensor
    owner: Tensor
    place: Tensor
    hidden: Tensor


class Closure:
    """The pairs of a node and its ancestors, cut into batches by node."""

    def __init__(self, tax: Taxonomy) -> None:
        rows = proper_ancestors(tax)
        self.start, self.items = torch.from_numpy(rows.start), torch.from_numpy(rows.items)

    def __len__(self) -> int:
        return len(self.start) - 1

    @property
    def pairs(self) -> int:
        """Number of (node, ancestor) pairs."""
        return len(self.items)

    def batch(self, anchors: Tensor) -> Batch:
        """Numbers of nodes (B) with everything they are compared with: themselves and all their ancestors."""
        counts = self.start[anchors + 1] - self.start[anchors]
        owner = torch.repeat_interleave(torch.arange(len(anchors)), counts)
        first = self.start[anchors] - (counts.cumsum(0) - counts)
        above = self.items[first[owner] + torch.arange(len(owner))]
        candidates, place = torch.unique(torch.cat([above, anchors]), return_inverse=True)
        place, own = place.split([len(above), len(anchors)])
        hidden = torch.zeros(len(anchors), len(candidates), dtype=torch.bool)
        hidden[owner, place] = True
        hidden[torch.arange(len(anchors)), own] = True
        return Batch(candidates, own, owner, place, hidden)


def distance_loss(distances: Tensor, batch: Batch, temperature: float) -> Tensor:
    """Σ over pairs of −log e^(−d(u,v)/τ) / (e^(−d(u,v)/τ) + Σ_w e^(−d(u,w)/τ)), w being no ancestor of u: (B, C) -> ().

    The loss of Nickel & Kiela 2017 for taxonomies, with a temperature and with all candidates as negatives.
    """
    logits = distances / -temperature
    others = logits.masked_fill(batch.hidden, -torch.inf).logsumexp(dim=1)
    return softplus(others[batch.owner] - logits[batch.owner, batch.place]).sum()


def cone_loss(energies: Tensor, batch: Batch, margin: float) -> Tensor:
    """The max-margin loss of Ganea et al. 2018: angles by which anchors stick out of their ancestors' cones, and by
    which they fail to stay a margin outside the others, which count as much in all: energies (B, C) -> ()."""
    inside = relu(energies[batch.owner, batch.place]).sum()
    outside = relu(margin - energies)[~batch.hidden]
    return inside + outside.sum() * (len(batch.owner) / max(1, len(outside)))


class TaxonomyEmbedding(nn.Module):
    """A point for each of N nodes: `weight` (N, n), tangent vectors at the origin, which need no constraint.

    A row is as long as the radius of its point, in every geometry, so that equal steps mean equal things.

    `objective` says what a score from one node to another is: their distance, or how far the first lies outside the
    second's entailment cone.
    """

    def __init__(
        self,
        count: int,
        dim: int,
        geometry: Geometry = "lorentz",
        objective: Objective = "distance",
        c: float = 1.0,
        temperature: float = 0.4,
        margin: float = 1.0,
        aperture: float = 0.1,
        seed: int = 0,
        start: Tensor | None = None,
    ) -> None:
        """`temperature`: of the distances. `margin`: angle between a cone and what is not in it; `aperture`: the k of
        its half-aperture asin(2k / sinh √c ρ). `start`: the first `weight`; None: at random about the origin."""
        super().__init__()
        if objective not in OBJECTIVES:
            raise UsageError(f"objective must be one of {', '.join(OBJECTIVES)}, got {objective!r}")
        for name, value in (("count", count), ("dim", dim)):
            if value < 1:
                raise UsageError(f"{name} must be a whole number ≥ 1, got {value}")
        self.manifold = manifold_of(geometry, c)
        self.objective, self.temperature, self.margin, self.aperture = objective, temperature, margin, aperture
        if start is None:
            start = START * torch.randn(count, dim, generator=torch.Generator().manual_seed(seed))
        if start.shape != (count, dim):
            raise UsageError(f"start must be ({count}, {dim}), got {tuple(start.shape)}")
        self.weight = nn.Parameter(start)

    def no_weight_decay(self) -> set[str]:
        """Pulling every point to the origin is no part of the objective."""
        return {"weight"}

    def points(self, nodes: Tensor | None = None) -> Tensor:
        """The points of some nodes (B), default all, in the coordinates of the manifold: -> (B, m)."""
        weight = self.weight if nodes is None else self.weight[nodes]
        return self.manifold.expmap0(weight / self.manifold.origin_scale)

    def forward(self, batch: Batch) -> Tensor:
        """The objective's loss on a batch, summed over its pairs."""
        points = self.points(batch.candidates)
        values = self._between(points[batch.own], points)
        if self.objective == "distance":
            return distance_loss(values, batch, self.temperature)
        return cone_loss(values, batch, self.margin)

    def scores(self, nodes: Tensor) -> Tensor:
        """From each node (B) to every node, small for its ancestors: -> (B, N)."""
        return self._between(self.points(nodes), self.points())

    def pair_scores(self, below: Tensor, above: Tensor) -> Tensor:
        """The same pair by pair: (P), (P) -> (P)."""
        lower, upper = self.points(below), self.points(above)
        if self.objective == "distance":
            return self.manifold.dist(lower, upper)
        return self.manifold.exterior_angle(upper, lower) - self.manifold.half_aperture(upper, self.aperture)

    def _between(self, lower: Tensor, upper: Tensor) -> Tensor:
        """Scores of all pairs by one matrix product: (B, m), (C, m) -> (B, C)."""
        if self.objective == "distance":
            return self.manifold.cdist(lower, upper)
        return self.manifold.exterior_angles(lower, upper) - self.manifold.half_aperture(upper, self.aperture)
