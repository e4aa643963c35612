"""Triton kernels for what the compiler does not fuse by itself, each beside a plain form of equal value.

    from leafward.nn import kernels
    kernels.use("triton")        # or LEAFWARD_KERNELS=triton in the environment; "torch" for the plain forms

A kernel serves float32 and half types on a CUDA device, and on the CPU under TRITON_INTERPRET=1. The layers ask
`serve` and go on in plain torch where the answer is no. Each kernel is an operator of PyTorch with its own
gradient, so a compiled graph keeps it whole.
"""

from __future__ import annotations

import os
from importlib import import_module

import torch
from torch import Tensor

from leafward.errors import UsageError, nearest, require

CHOICES = ("torch", "triton")
_choice = "torch"


def use(which: str) -> None:
    """Choose the plain forms or the kernels, for all layers from now on."""
    global _choice
    if which not in CHOICES:
        raise UsageError(f"kernels are {which!r}; {nearest(which, CHOICES)}")
    if which == "triton":
        require("triton", "lm")
        for name in ("_residual_norm", "_swiglu", "_head_lanes", "_latent_lanes", "_experts"):
            import_module(f"leafward.nn.kernels.{name}")
    _choice = which


def chosen() -> str:
    return _choice


def serve(x: Tensor) -> bool:
    """Whether kernels take `x`."""
    served = x.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return _choice == "triton" and served and (x.is_cuda or interpreted())


def interpreted() -> bool:
    """Whether Triton runs in its interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def residual_norm(
    x: Tensor, y: Tensor, weight: Tensor, gain: Tensor, scale: float, eps: float, c: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """z = scale · (x + w y)/(√c|x + w y|_L), its RMSNorm h in `dtype` and the time of h:
    (..., n), (..., n), (1,), (n,) -> (..., n), (..., n), (..., 1)."""
    return torch.ops.leafward.residual_norm(x, y, weight, gain, scale, eps, c, dtype)


def swiglu_lift(product: Tensor, bias: Tensor, t: Tensor, time_weight: Tensor, c: float) -> tuple[Tensor, Tensor]:
    """silu(gate) · value of (gate, value) = product + bias + t w_t, and its time:
    (..., 2h), (2h,), (..., 1), (2h, 1) -> (..., h), (..., 1)."""
    return torch.ops.leafward.swiglu_lift(product, bias, t, time_weight, c)


def head_lanes(
    product: Tensor,
    bias: Tensor,
    t: Tensor,
    time_weight: Tensor,
    table: tuple[Tensor, Tensor],
    scale: Tensor,
    heads: int,
    kv_heads: int,
    c: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Heads of product + bias + t w_t, rotated, as lanes of queries, keys and values in a half type:
    (B,T,(H+2G)d), ((H+2G)d,), (B,T,1), ((H+2G)d, 1) -> (B,H,T,·), (B,G,T,·), (B,G,T,·)."""
    lanes = torch.ops.leafward.head_lanes(product, bias, t, time_weight, *table, scale, heads, kv_heads, c)
    q, k, v = (x.transpose(1, 2) for x in lanes)
    return q, k, v


def expert_swiglu(
    p: Tensor, t: Tensor, w: Tensor, b: Tensor, over: Tensor, c: Tensor, expert: Tensor, ends: Tensor
) -> tuple[Tensor, Tensor]:
    """silu(gate) · value of (gate, value) = over · (p + t w_e + b_e), and its time on the hyperboloid of curvature -c,
    for rows sorted by expert e: (M, 2h), (M, 1), (E, 2h), (E, 2h), (M, 1), (M, 1), (M,), (E,) -> (M, h), (M, 1)."""
    return torch.ops.leafward.expert_swiglu(p, t, w, b, over, c, expert, ends)


def expert_combine(routed: Tensor, everywhere: Tensor, slot: Tensor, share: Tensor, c: float) -> Tensor:
    """Centroid of each token's points, `routed` (M, n) at rows `slot` (N, k) with weights `share` (N, k) and
    `everywhere` (S·N, n) with weight one -> (N, n)."""
    return torch.ops.leafward.expert_combine(routed, everywhere, slot, share, c)


Summands = tuple[Tensor, Tensor, Tensor, Tensor]
"""A linear map before its sum: product, bias, time of the input, time column."""


def latent_lanes(
    queries: Summands,
    latents: Summands,
    k_rope: Tensor,
    table: tuple[Tensor, Tensor],
    scale: Tensor,
    heads: int,
    c: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Lanes of latent attention in a half type, all of one width: from the maps of queries, (B,T,H(nope+rope)), and of
    latent points, (B,T,H(nope+value)), and the shared key (B,T,rope), already rotated -> three of (B,H,T,·)."""
    lanes = torch.ops.leafward.latent_lanes(*queries, *latents, k_rope, *table, scale, heads, c)
    q, k, v = (x.transpose(1, 2) for x in lanes)
    return q, k, v


use(os.environ.get("LEAFWARD_KERNELS", "torch"))
