"""From points to logits, and a cross-entropy that never holds all of them."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from leafward.errors import UsageError, nearest
from leafward.geometry.scalars import wide
from leafward.nn.lanes import pad_lanes, score_lanes
from leafward.nn.linear import renamed, undrawn, untouched, weight_and_bias
from leafward.nn.space import LORENTZ, Space, positive, working_dtype

KINDS = ("linear", "distance")
CHUNK = 1 << 26
"""Logits held at a time."""
IGNORED = -100
"""The label of what is not predicted."""


class Head(nn.Module):
    """Logits over `classes` from space parts (docs/helm.md, eq. 17): (..., width) -> (..., classes).

    "linear" is the authors' head, a plain map of the full point [t; s] without bias. "distance" gives each class a
    point p and scores minus the squared Lorentzian distance times a learned scale, up to the constant 2·scale/c that
    the softmax forgets: 2·scale·⟨x,p⟩_L. In the Euclidean twin both are the dot product.

    The space part is a plain `nn.Linear`, `linear`, as in `leafward.nn.Linear`. Tools that multiply hidden states by
    the weight of a head themselves find in `weight` and `augmented` the two factors of the logits.
    """

    bias = None
    """As tools ask for it."""

    def __init__(self, width: int, classes: int, kind: str = "linear", space: Space = LORENTZ) -> None:
        super().__init__()
        positive(width=width, classes=classes)
        if kind not in KINDS:
            raise UsageError(f"kind is {kind!r}; {nearest(kind, KINDS)}")
        self.kind, self.space = kind, space
        linear, curved = kind == "linear", space.curved
        self.linear = undrawn(width, classes, bias=False)
        self.time_weight = nn.Parameter(torch.empty(classes, 1)) if linear and curved else None
        self.log_scale = None if linear else nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        # Logits of a normalised stream start at a quarter: the first loss is ln(classes), not more.
        nn.init.normal_(self.linear.weight, std=0.25 * self.linear.in_features**-0.5)
        if self.time_weight is not None:
            nn.init.zeros_(self.time_weight)
        if self.log_scale is not None:
            nn.init.constant_(self.log_scale, math.log(0.5))

    def forward(self, s: Tensor) -> Tensor:
        if self.log_scale is not None:
            return wide(F.linear(*self.lanes(s)))
        # Without a coordinate for the time: it would be a copy of the whole matrix for every token that is decoded.
        dtype = working_dtype(s)
        x = s.to(dtype)
        plain = untouched(self.linear)
        logits = wide(F.linear(x, self.linear.weight.to(dtype)) if plain else self.linear(x))
        if self.time_weight is None:
            return logits
        return logits.addcmul_(self.space.time(x).to(logits.dtype), self.time_weight.squeeze(-1).to(logits.dtype))

    def loss(self, s: Tensor, targets: Tensor, ignore_index: int = IGNORED) -> Tensor:
        """Mean cross-entropy of s (..., width) against targets (...), by chunks; ignored targets do not count."""
        features, matrix = self.lanes(s)
        return chunked_cross_entropy(features.flatten(0, -2), matrix, targets.flatten(), ignore_index)

    def lanes(self, s: Tensor) -> tuple[Tensor, Tensor]:
        """Features (..., K) and matrix (classes, K) whose product is the logits."""
        dtype = working_dtype(s)
        x, weight = s.to(dtype), self.points(s).to(dtype)
        if self.log_scale is not None:
            scale = 2.0 * torch.exp(wide(self.log_scale))
            return score_lanes(x, weight, scale, self.space) if self.space.curved else (x * scale.to(dtype), weight)
        if self.time_weight is None:
            return x, weight
        return pad_lanes([x, self.space.time(x).to(dtype)]), pad_lanes([weight, self.time_weight.to(dtype)])

    def points(self, like: Tensor) -> Tensor:
        """The matrix (classes, width) of the space part, also where a tool has wrapped it."""
        linear = self.linear
        return linear.weight if untouched(linear) else weight_and_bias(linear, linear.in_features, like)[0]

    @property
    def weight(self) -> Tensor:
        """The matrix (classes, K) of `lanes`, which does not depend on the features."""
        own = self.linear.weight
        return self.lanes(torch.zeros(1, self.linear.in_features, dtype=own.dtype, device=own.device))[1]

    def augmented(self, s: Tensor) -> Tensor:
        """The features (..., K) of `lanes`: logits are these times `weight`ᵀ."""
        return self.lanes(s)[0]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any, **more: Any) -> None:
        renamed(state_dict, f"{prefix}weight", f"{prefix}linear.weight")
        super()._load_from_state_dict(state_dict, prefix, *rest, **more)


def chunked_cross_entropy(features: Tensor, matrix: Tensor, targets: Tensor, ignore_index: int = IGNORED) -> Tensor:
    """Mean cross-entropy of logits features (N, K) @ matrix (V, K)ᵀ against targets (N,), in float32 or better.

    At most `CHUNK` logits exist at a time, forward and backward: the gradients, known as soon as a chunk's
    logits are, are kept instead. Zero where every target is ignored.
    """
    train = torch.is_grad_enabled() and (features.requires_grad or matrix.requires_grad)
    return _ChunkedCrossEntropy.apply(features, matrix, targets, ignore_index, train)  # pyright: ignore


def score_chunk(x: Tensor, matrix: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted cross-entropy of rows x (M, K) against targets (M, 1), and its gradient by the logits (M, V)."""
    logits = wide(x @ matrix.T)
    peak = logits.logsumexp(dim=-1, keepdim=True)
    loss = (weight * (peak - logits.gather(-1, target))).sum()
    hit = torch.arange(matrix.shape[0], device=x.device) == target
    return loss, ((torch.exp(logits - peak) - hit.to(logits.dtype)) * weight).to(x.dtype)


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, features: Tensor, matrix: Tensor, targets: Tensor, ignore_index: int, train: bool) -> Tensor:
        valid = targets != ignore_index
        share = valid.to(wide(features).dtype) / valid.sum().clamp_min(1)
        targets = torch.where(valid, targets, 0)
        total = share.new_zeros(())
        grad_features = torch.empty_like(features) if train else None
        grad_matrix = torch.zeros_like(matrix, dtype=share.dtype) if train else None
        count = max(1, -(-features.shape[0] * matrix.shape[0] // CHUNK))
        rows = max(1, -(-features.shape[0] // count))  # of one size, so that what is compiled for one serves all
        for start in range(0, features.shape[0], rows):
            part = slice(start, start + rows)
            x = features[part]
            loss, slope = score_chunk(x, matrix, targets[part].unsqueeze(-1), share[part].unsqueeze(-1))
            total = total + loss
            if grad_features is not None and grad_matrix is not None:
                grad_features[part] = slope @ matrix
                grad_matrix += slope.T @ x
        if grad_features is not None and grad_matrix is not None:
            ctx.save_for_backward(grad_features, grad_matrix.to(matrix.dtype))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        features, matrix = ctx.saved_tensors
        return features * grad.to(features.dtype), matrix * grad.to(matrix.dtype), None, None, None
