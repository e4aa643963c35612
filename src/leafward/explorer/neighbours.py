"""The nearest points in the original space: one matrix product proposes, the exact distance ranks.

In hyperbolic space d grows with −⟨x,y⟩_L = x_t y_t − x_s·y_s, in flat space with |y|²/2 − x·y; either is one product of
a probe, made of the query, with a matrix of keys. What the product proposes is ranked by the stable distance.
"""

from __future__ import annotations

import torch
from torch import Tensor

from leafward.geometry import Euclidean, Lorentz

#: Candidates of the product for each answer.
CANDIDATES = 4
#: Largest error of cosh d that the product may have in float32; where points lie further out it is taken in float64.
COARSEST = 1e-2


class Neighbours:
    """Answers for points (N, m) of a manifold."""

    def __init__(self, manifold: Lorentz | Euclidean, points: Tensor) -> None:
        self.manifold, self.points = manifold, points
        if isinstance(manifold, Lorentz):
            highest = float(manifold.c) * float(manifold.time(points[:, 1:]).max()) ** 2  # cosh² of the largest radius
            fine = highest * torch.finfo(torch.float32).eps < COARSEST
            self._probes = manifold.lift(points[:, 1:].to(torch.float32 if fine else torch.float64))
            self._keys = torch.cat([-self._probes[:, :1], self._probes[:, 1:]], dim=1).T
        else:
            centred = points - points.mean(dim=0)  # what all have in common would only cost digits
            self._probes = torch.cat([centred, torch.ones_like(points[:, :1])], dim=1)
            self._keys = torch.cat([centred, -0.5 * centred.square().sum(dim=1, keepdim=True)], dim=1).T

    def of(self, rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k nearest others of each row, nearest first (at most N − 1): (B) -> ids, distances (B, k)."""
        k = min(k, len(self.points) - 1)
        wanted = min(len(self.points), CANDIDATES * k + 1)
        found = (self._probes[rows] @ self._keys).topk(wanted, dim=1, sorted=False).indices
        gaps = self.manifold.dist(self.points[rows][:, None], self.points[found])
        gaps = gaps.masked_fill(found == rows[:, None], torch.inf)
        near = gaps.topk(k, dim=1, largest=False)
        return found.gather(1, near.indices), near.values
