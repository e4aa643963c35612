"""What teaches the hierarchy beside the task's own loss: a module here for each loss, its weight a field of `Losses`.

A module NAME.py has a class `Loss(mapper)`, an nn.Module from `Seen` to one value for each image (B).
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor, nn

if TYPE_CHECKING:
    from leafward.systems.himapper.mapper import HierarchyMapper
    from leafward.systems.himapper.tree import GaussianTree


class Seen(NamedTuple):
    """What a loss may look at: nodes (B, M, d), their points (B, M, n), all distances between them (B, M, M), the tree
    that they were drawn from."""

    nodes: Tensor
    points: Tensor
    distances: Tensor
    tree: GaussianTree


class HierarchyLosses(NamedTuple):
    """The losses of each image (B) by name, and their weights."""

    each: dict[str, Tensor]
    weights: dict[str, float]

    def total(self, **weights: float) -> Tensor:
        """What is added to the task's own loss: Σ weight · mean over the batch; `weights` replace the usual ones."""
        parts = [(self.weights | weights)[name] * values.mean() for name, values in self.each.items()]
        return sum(parts[1:], parts[0])


def losses_of(mapper: HierarchyMapper, weights: Mapping[str, float]) -> nn.ModuleDict:
    """The losses whose weight is above 0, by name."""
    chosen = [name for name, weight in weights.items() if weight]
    return nn.ModuleDict({name: importlib.import_module(f"{__name__}.{name}").Loss(mapper) for name in chosen})
