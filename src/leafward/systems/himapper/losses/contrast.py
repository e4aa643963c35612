"""Every node nearer to its parent than to the other nodes of its level (Sec. 4.4)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leafward.errors import UsageError
from leafward.geometry.scalars import wide
from leafward.systems.himapper.tree import TreeShape

if TYPE_CHECKING:
    from leafward.systems.himapper.losses import Seen
    from leafward.systems.himapper.mapper import HierarchyMapper


class HierarchyContrast(nn.Module):
    """−log of the share that a node's parent has among its parent and the other nodes of its level (eq. 8),

        exp(−D(i, parent)/τ) / [exp(−D(i, parent)/τ) + Σ_j w_ij exp(−D(i, j)/τ)],

    averaged over all nodes that have a parent. Siblings have weight `sibling_weight` (1: as in the paper, 0: they are
    no negatives), all others 1. The paper prints +D, which drives parents away and draws each level together.
    """

    log_weight: Tensor
    parents: Tensor

    def __init__(self, shape: TreeShape, temperature: float = 0.2, sibling_weight: float = 1.0) -> None:
        super().__init__()
        if not 0.0 < temperature < math.inf:
            raise UsageError(f"temperature must be a positive number, got {temperature!r}")
        if not 0.0 <= sibling_weight <= 1.0:
            raise UsageError(f"sibling_weight must lie between 0 and 1, got {sibling_weight!r}")
        self.temperature = temperature
        parents, level = shape.parents(), shape.level_of()
        children = torch.arange(len(parents))
        weight = (level[: len(parents), None] == level).float()
        weight[children, children] = 0.0
        weight[children, children ^ 1] = sibling_weight  # every level below the top begins at an even number
        weight[children, parents] = 1.0
        self.register_buffer("log_weight", weight.log(), persistent=False)
        self.register_buffer("parents", parents, persistent=False)

    def forward(self, distances: Tensor) -> Tensor:
        """All distances between the nodes of each image, (B, M, M) -> a scalar."""
        return self.each(distances).mean()

    def each(self, distances: Tensor) -> Tensor:
        """The same for each image: (B, M, M) -> (B)."""
        logits = wide(self.log_weight) - wide(distances[:, : len(self.parents)]) / self.temperature
        nats = F.cross_entropy(logits.flatten(0, 1), self.parents.repeat(len(logits)), reduction="none")
        return nats.view(len(logits), -1).mean(dim=1)


class Loss(nn.Module):
    """The contrast in nats."""

    def __init__(self, mapper: HierarchyMapper) -> None:
        super().__init__()
        self.contrast = HierarchyContrast(mapper.shape, mapper.temperature, mapper.sibling_weight)

    def forward(self, seen: Seen) -> Tensor:
        """-> (B)."""
        return self.contrast.each(seen.distances)
