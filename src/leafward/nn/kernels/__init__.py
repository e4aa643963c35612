"""Triton kernels for what the compiler does not fuse by itself, each beside a plain form of equal value.

    from leafward.nn import kernels
    kernels.use("triton")        # or LEAFWARD_KERNELS=triton in the environment; "torch" for the plain forms

Without a choice, layers of language models take the plain forms, and those of vision the kernels on a CUDA device. A
kernel serves float32 and half types on such a device, and on the CPU under TRITON_INTERPRET=1. The layers ask `serve`
(`serve_vision`) and go on in plain torch where the answer is no. Each kernel is an operator of PyTorch with its own
gradient, so a compiled graph keeps it whole.
"""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

from leafward.errors import UsageError, nearest, require

CHOICES = ("torch", "triton")
_SERVED = (torch.float32, torch.bfloat16, torch.float16)
_VISION = ("_image_norm", "_mlp", "_cluster")
_choice = "torch"
_settled = False  # whether somebody has chosen
_vision_ready = False


def prepare_vision() -> None:
    """Load the kernels of the vision layers where they can run, so that `serve_vision` may say yes."""
    global _vision_ready
    if not _vision_ready and (torch.cuda.is_available() or interpreted()) and find_spec("triton") is not None:
        for name in _VISION:
            import_module(f"leafward.nn.kernels.{name}")
        _vision_ready = True


def serve_vision(x: Tensor) -> bool:
    """As `serve`, but kernels of the vision layers also take what lies on a CUDA device when nobody has chosen."""
    return _vision_ready and (serve(x) if _settled else x.is_cuda and x.dtype in _SERVED)


def use(which: str) -> None:
    """Choose the plain forms or the kernels, for all layers from now on."""
    global _choice, _settled
    if which not in CHOICES:
        raise UsageError(f"kernels are {which!r}; {nearest(which, CHOICES)}")
    if which == "triton":
        require("triton", "lm")
        for name in ("_residual_norm", "_swiglu", "_head_lanes", "_latent_lanes", "_experts"):
            import_module(f"leafward.nn.kernels.{name}")
    _choice, _settled = which, True


def chosen() -> str:
    return _choice


def serve(x: Tensor) -> bool:
    """Whether kernels take `x`."""
    return _choice == "triton" and x.dtype in _SERVED and (x.is_cuda or interpreted())


def interpreted() -> bool:
    """Whether Triton runs in its interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def residual_norm(
    x: Tensor, y: Tensor, log_weight: Tensor, gain: Tensor, scale: float, eps: float, c: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """z = scale · (x + w y)/(√c|x + w y|_L), its RMSNorm h in `dtype` and the time of h:
    (..., n), (..., n), log w (1,), (n,) -> (..., n), (..., n), (..., 1)."""
    return torch.ops.leafward.residual_norm(x, y, log_weight, gain, scale, eps, c, dtype)


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
    """silu(gate) · value of (gate, value) = over_e (p + t w_e) + b_e, and its time at curvature -c_e, for rows sorted
    by expert e: (M, 2h), (M, 1), (E, 2h), (E, 2h), (E,), (E,), (M,), (E,) -> (M, h), (M, 1)."""
    return torch.ops.leafward.expert_swiglu(p, t, w, b, over, c, expert, ends)


def expert_combine(routed: Tensor, everywhere: Tensor, slot: Tensor, share: Tensor, c: float) -> Tensor:
    """Centroid of each token's points, `routed` (M, n) at rows `slot` (N, k) with weights `share` (N, k) and
    `everywhere` (S·N, n) with weight one -> (N, n)."""
    return torch.ops.leafward.expert_combine(routed, everywhere, slot, share, c)


def image_moments(x: Tensor, eps: float) -> Tensor:
    """Mean and 1/√(variance + eps) over all places and channels of each image: (B, ..., C) -> (B, 2) in float32."""
    return torch.ops.leafward.image_moments(x, eps)


def image_norm(x: Tensor, moments: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
    """x normed by its own `moments`, then w · + b, in `dtype`: (B, ..., C), (B, 2), (C,), (C,) -> (B, ..., C)."""
    return torch.ops.leafward.image_norm(x, moments, weight, bias, dtype)


def scaled_add(x: Tensor, y: Tensor, gamma: Tensor, keep: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """z = x + keep · γ · y in the wider type of x and γ, and its `image_moments`:
    (B, ..., C), (B, ..., C), (C,), (B,) -> (B, ..., C), (B, 2)."""
    return torch.ops.leafward.scaled_add(x, y, gamma, keep, eps)


def mlp_fits(width: int, hidden: int, dtype: torch.dtype) -> bool:
    """Whether `normed_mlp` takes maps of so many channels: tiles are powers of two, and wide ones fill a program, as
    weights in float32 do."""
    return width in (16, 32, 64, 128) and hidden % 64 == 0 and (dtype != torch.float32 or interpreted())


def normed_mlp(
    x: Tensor,
    moments: Tensor,
    norm: tuple[Tensor, Tensor],
    first: tuple[Tensor, Tensor],
    second: tuple[Tensor, Tensor],
    gamma: Tensor,
    keep: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """x + keep · γ · second(GELU(first(norm(x)))), norm by `image_moments`, products in `dtype`, all three as pairs of
    weight and bias: (B, ..., C), (B, 2) -> (B, ..., C). What lies between the two products is never in memory."""
    return torch.ops.leafward.normed_mlp(x, moments, *norm, *first, *second, gamma, keep, dtype)


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


def cluster_fits(tokens: int, centres: int, head_dim: int) -> bool:
    """Whether the kernels of the cluster mixer hold a problem of this size."""
    return tokens <= 256 and centres <= 16 and head_dim <= 64


def cluster_patches(
    e: Tensor, alpha: Tensor, bias: Tensor, side: tuple[int, int], centres: int
) -> tuple[Tensor, Tensor]:
    """The patch level on an embedded map, cut into windows of p × q tokens with k × k centres, and the sums of its
    result and of its squares over channels: (B, H, W, 2hd), (h,), (h, k, p, k, q) -> (B, H, W, hd), (2, B, H, W)."""
    return torch.ops.leafward.cluster_patches(e, alpha, bias, *side, centres)


def cluster_windows(e: Tensor, sharpness: Tensor, reach: Tensor | None, bias: Tensor) -> Tensor:
    """The window level on embedded windows and global centres, by Lorentz distances, or by cosines without `reach`:
    (B, G + K, 2hd), (h,), (h,), (h, k, n, k, m) -> (B, G, hd)."""
    return torch.ops.leafward.cluster_windows(e, sharpness, reach, bias)


if "LEAFWARD_KERNELS" in os.environ:
    use(os.environ["LEAFWARD_KERNELS"])
