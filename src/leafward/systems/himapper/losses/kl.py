"""The top level's nodes stay near the unit Gaussian (eq. 9)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

if TYPE_CHECKING:
    from leafward.systems.himapper.losses import Seen
    from leafward.systems.himapper.mapper import HierarchyMapper


class Loss(nn.Module):
    """The divergence of the top level in nats per coordinate, the same for every image."""

    def __init__(self, mapper: HierarchyMapper) -> None:
        super().__init__()

    def forward(self, seen: Seen) -> Tensor:
        """-> (B)."""
        return seen.tree.kl().expand(len(seen.nodes))
