"""Token embedding as points of the hyperboloid."""

from __future__ import annotations

import math

import torch
from torch import nn

from leafward.errors import need
from leafward.nn.space import LORENTZ, Space, positive

FARTHEST = 40.0
"""Times 1/√c: the largest radius at which tokens can start."""


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
        need(0.0 < radius < math.inf, "radius", "a positive finite number", radius)
        if space.curved:  # |s|² = sinh²(√c r)/c must be a number of float32
            need(space.c**0.5 * radius < FARTHEST, "radius", f"below {FARTHEST:g}/√c in float32", radius)
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
