"""The Lorentz linear map on space parts, around a plain `nn.Linear` that other tools can take hold of."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from leafward.errors import UsageError
from leafward.nn.space import LORENTZ, Space, positive


class Linear(nn.Module):
    """A map of the full point to a new space part, ``W [t; s] + b = W_s s + t w_t + b`` (HELM's HLT).

    Equation 2 of docs/helm.md.

    (..., in_features) -> (..., out_features), both widths counted without time. The input may be several points side
    by side (the heads of attention): `points` of in_features / points coordinates, each with its own time.

    The space part W_s s + b is a plain `nn.Linear`, `linear`. A tool (PEFT, a quantiser) may wrap or replace it: then
    it is called, and what the tool does merges exactly, since time column and rescaling are applied outside of it.

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
        self.linear = undrawn(in_features, out_features, bias)
        self.time_weight = nn.Parameter(torch.empty(out_features, points)) if space.curved else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.in_features**-0.5)
        for zero in (self.time_weight, self.bias):
            if zero is not None:
                nn.init.zeros_(zero)

    @property
    def weight(self) -> Tensor:
        """W_s, (out, in), as it lies in `linear`; see `plain`."""
        return self.linear.weight

    @property
    def bias(self) -> Tensor | None:
        return self.linear.bias

    @property
    def plain(self) -> bool:
        """Whether `weight` and `bias` say all of what `linear` does, so that kernels may read them."""
        return untouched(self.linear)

    def forward(self, s: Tensor, t: Tensor | None = None) -> Tensor:
        """s (..., in_features), t (..., points): the times, where the caller has them."""
        y = self.linear(s)
        if self.time_weight is not None:
            if t is None:
                t = self.space.time(s.unflatten(-1, (self.points, -1))).squeeze(-1)
            if self.points == 1:
                y = torch.addcmul(y, t.to(y.dtype), self.time_weight.squeeze(-1).to(y.dtype))
            else:
                y = y + F.linear(t.to(s.dtype), self.time_weight)
        return y if self.rescale == 1.0 else y * self.rescale

    def of_lanes(self, x: Tensor) -> Tensor:
        """The same map of points that come as augmented coordinates [s; t; 0…]: (..., points, lanes) -> (..., out).

        One product in place of two and a sum; in flat space there is no time.
        """
        width = self.in_features // self.points
        if not self.plain:
            return self(x[..., :width].flatten(-2), x[..., width] if self.space.curved else None)
        blocks = [self.weight.unflatten(1, (self.points, -1))]
        if self.time_weight is not None:
            blocks.append(self.time_weight.unsqueeze(-1))
        spare = x.shape[-1] - sum(block.shape[-1] for block in blocks)
        weight = F.pad(torch.cat(blocks, dim=-1) if len(blocks) > 1 else blocks[0], (0, spare))
        y = F.linear(x.flatten(-2), weight.flatten(1), self.bias)
        return y if self.rescale == 1.0 else y * self.rescale

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any, **more: Any) -> None:
        for name in ("weight", "bias"):
            renamed(state_dict, f"{prefix}{name}", f"{prefix}linear.{name}")
        super()._load_from_state_dict(state_dict, prefix, *rest, **more)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, points={self.points}, {self.space}"


def undrawn(in_features: int, out_features: int, bias: bool) -> nn.Linear:
    """A plain `nn.Linear` whose holder draws its values: its own constructor would draw too, and move the generator."""
    linear = nn.Linear(in_features, out_features, bias, device="meta")
    return linear.to_empty(device=torch.get_default_device())


def untouched(linear: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a call of `linear` is the product with its weight and no more: it was not replaced or wrapped, has no
    hooks, and its weight is not a tensor of another kind, as quantisers put there."""
    if type(linear) is not nn.Linear or "forward" in linear.__dict__ or is_traceable_wrapper_subclass(linear.weight):
        return False
    before, after = linear._forward_pre_hooks, linear._forward_hooks
    return not (before or after or linear._backward_hooks or linear._backward_pre_hooks)


def weight_and_bias(linear: nn.Module, width: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """The matrix (out, width) and vector (out,) of the affine map that a call of `linear` is, whoever wrapped it: by
    the images of the origin and of the unit vectors, in the type and on the device of `like`."""
    basis = torch.eye(width, dtype=like.dtype, device=like.device)
    images = linear(torch.cat([torch.zeros_like(basis[:1]), basis]))
    return (images[1:] - images[0]).mT, images[0]


def renamed(state: dict[str, Any], old: str, new: str) -> None:
    """A key as earlier versions had it takes its name of now; a state dict that has both is left as it is."""
    if old in state and new not in state:
        state[new] = state.pop(old)
