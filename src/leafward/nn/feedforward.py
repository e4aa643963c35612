"""The hyperbolic SwiGLU feed-forward network (HELM's HFFN; docs/helm.md, eq. 12)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from leafward.nn import kernels
from leafward.nn.linear import Linear
from leafward.nn.space import LORENTZ, Space


class FeedForward(nn.Module):
    """silu(W₁[t;s]) · W₃[t;s], lifted, through W₂: (..., width) -> (..., width).

    Gate and value are one matrix product, `up`, gate first.
    """

    def __init__(self, width: int, hidden: int, space: Space = LORENTZ) -> None:
        super().__init__()
        self.up = Linear(width, 2 * hidden, space=space)
        self.down = Linear(hidden, width, space=space)

    def forward(self, s: Tensor, t: Tensor | None = None) -> Tensor:
        """s (..., width), t (..., 1): its time, where the caller has it."""
        up = self.up
        if kernels.serve_rows(s) and up.plain and up.time_weight is not None and up.bias is not None:
            t = up.space.time(s) if t is None else t
            return self.down(*kernels.swiglu_lift(F.linear(s, up.weight), up.bias, t, up.time_weight, up.space.c))
        gate, value = up(s, t).chunk(2, dim=-1)
        return self.down(F.silu(gate) * value)
