"""The Lorentz linear map on space parts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leafward.errors import UsageError
from leafward.nn.space import LORENTZ, Space, positive


class Linear(nn.Module):
    """A map of the full point to a new space part, ``W [t; s] + b = W_s s + t w_t + b`` (HELM's HLT).

    Equation 2 of docs/helm.md.

    (..., in_features) -> (..., out_features), both widths counted without time. The input may be several points side
    by side (the heads of attention): `points` of in_features / points coordinates, each with its own time.

    The time column starts at zero. Behind an RMSNorm the time of every token is nearly the same number √n, so a
    random column would add one and the same vector to every token and pull them all together.

    The output lies on the hyperboloid of `out_space` (default: the same), reached by the homothety √(c/c_out).
    The Euclidean twin has no time column.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        points: int = 1,
        space: Space = LORENTZ,
        out_space: Space | None = None,
    ) -> None:
        super().__init__()
        positive(in_features=in_features, out_features=out_features, points=points)
        if in_features % points:
            raise UsageError(f"in_features={in_features} does not split into points={points} equal parts")
        self.in_features, self.out_features, self.points, self.space = in_features, out_features, points, space
        self.rescale = (space.c / out_space.c) ** 0.5 if out_space is not None else 1.0
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.time_weight = nn.Parameter(torch.empty(out_features, points)) if space.curved else None
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.in_features**-0.5)
        for zero in (self.time_weight, self.bias):
            if zero is not None:
                nn.init.zeros_(zero)

    def forward(self, s: Tensor, t: Tensor | None = None) -> Tensor:
        """s (..., in_features), t (..., points): the times, where the caller has them."""
        y = F.linear(s, self.weight, self.bias)
        if self.time_weight is not None:
            if t is None:
                t = self.space.time(s.unflatten(-1, (self.points, -1))).squeeze(-1)
            if self.points == 1:
                y = torch.addcmul(y, t.to(y.dtype), self.time_weight.squeeze(-1).to(y.dtype))
            else:
                y = y + F.linear(t.to(s.dtype), self.time_weight)
        return y if self.rescale == 1.0 else y * self.rescale

    def of_lanes(self, x: Tensor) -> Tensor:
        """The same map of points that come as lanes [s; t; 0…] side by side: (..., points, lanes) -> (..., out).

        One product in place of two and a sum; in flat space the lanes hold no time.
        """
        blocks = [self.weight.unflatten(1, (self.points, -1))]
        if self.time_weight is not None:
            blocks.append(self.time_weight.unsqueeze(-1))
        spare = x.shape[-1] - sum(block.shape[-1] for block in blocks)
        weight = F.pad(torch.cat(blocks, dim=-1) if len(blocks) > 1 else blocks[0], (0, spare))
        y = F.linear(x.flatten(-2), weight.flatten(1), self.bias)
        return y if self.rescale == 1.0 else y * self.rescale

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, points={self.points}, {self.space}"
