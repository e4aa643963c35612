"""RMSNorm of the space part."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leafward.errors import need
from leafward.geometry.scalars import wide
from leafward.nn.space import Space, positive


class RMSNorm(nn.Module):
    """g · s / √(mean(s²) + eps): (..., width) -> (..., width); the time coordinate follows from the result.

    HELM's RMSNorm (docs/helm.md, eq. 3), the same in both geometries. Computed in float32 or better and returned in the
    type of the input.
    """

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        positive(width=width)
        need(0.0 <= eps < math.inf, "eps", "a finite number >= 0", eps)
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, s: Tensor) -> Tensor:
        z = wide(s)
        return F.rms_norm(z, self.weight.shape, self.weight.to(z.dtype), self.eps).to(s.dtype)

    def lifted(self, s: Tensor, space: Space) -> tuple[Tensor, Tensor | None]:
        """The norm and the time of the result, (..., width) and (..., 1); no time in flat space."""
        z = self(s)
        return z, space.time(z) if space.curved else None

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps:g}"
