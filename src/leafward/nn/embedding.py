"""Token embedding as points of the hyperboloid."""

from __future__ import annotations

import math

import torch
from torch import nn

from leafward.errors import UsageError
from leafward.nn.space import LORENTZ, Space, positive


class Embedding(nn.Embedding):
    """Space coordinates of one point per token: (...) -> (..., width).

    All tokens start at geodesic distance `radius` from the origin, in random directions. The parameter is a plain
    matrix of space coordinates, so every optimiser trains it and no step leaves the manifold.
    """

    def __init__(
        self,
        tokens: int,
        width: int,
        radius: float = 1.0,
        padding_idx: int | None = None,
        space: Space = LORENTZ,
    ) -> None:
        positive(tokens=tokens, width=width)
        if not 0.0 < radius < math.inf:
            raise UsageError(f"radius must be a positive finite number, got {radius!r}")
        self.radius, self.space = float(radius), space
        super().__init__(tokens, width, padding_idx=padding_idx)

    @property
    def initial_norm(self) -> float:
        """|s| at the start: sinh(√c · radius)/√c, in flat space the radius."""
        root = self.space.c**0.5
        return math.sinh(root * self.radius) / root if self.space.curved else self.radius

    @torch.no_grad()
    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        self.weight.mul_(self.initial_norm / self.weight.norm(dim=-1, keepdim=True))
        if self.padding_idx is not None:
            self.weight[self.padding_idx].zero_()
