"""Triton kernels of HCFormer's layers, and what they take: each is called here, and lies in a module that needs Triton.

Importing this makes them known to `leafward.nn.kernels`, which loads them and says whether they serve.
"""

from __future__ import annotations

import torch
from torch import Tensor

from leafward.nn import kernels

MOST_CENTRES = 16  # of a tile, which is one program's work
MOST_TOKENS = 256


def image_moments(x: Tensor, eps: float) -> Tensor:
    """Mean and 1/√(variance + eps) over all places and channels of each image: (B, ..., C) -> (B, 2) in float32."""
    return torch.ops.leafward.image_moments(x, eps)


def image_norm(x: Tensor, moments: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x normed by its own `moments`, then w · + b, in `dtype`, and what `scaled_add` takes to stand for x:
    (B, ..., C), (B, 2), (C,), (C,) -> (B, ..., C), (B, ..., C).

    The second has no values. The gradient of x from the sum goes there, and so to the backward pass of the norm, which
    adds it to its own in the same pass over memory.
    """
    return torch.ops.leafward.image_norm(x, moments, weight, bias, dtype)


def scaled_add(
    x: Tensor, y: Tensor, gamma: Tensor, keep: Tensor | None, eps: float, stead: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """z = x + keep · γ · y in the wider type of x and γ, and its `image_moments`; the gradient of x goes to `stead`
    where that is given: (B, ..., C), (B, ..., C), (C,), (B,) -> (B, ..., C), (B, 2)."""
    return torch.ops.leafward.scaled_add(x, y, gamma, keep, eps, stead)


def mlp_fits(width: int, hidden: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `normed_mlp` takes maps of so many channels: tiles are powers of two, and wide ones fill a program, as
    weights in float32 do. By the compiler for compute capability 9.0 it needs 1 KiB of shared memory a channel."""
    if width not in (16, 32, 64, 128) or hidden % 64 or (dtype == torch.float32 and not kernels.INTERPRETED):
        return False
    return 1024 * width <= kernels.shared_memory(device)


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


def cluster_fits(
    tokens: int, centres: int, head_dim: int, dtype: torch.dtype, device: torch.device, back: bool = True
) -> bool:
    """Whether the kernels of the cluster mixer take windows of so many tokens and centres, or so many windows and
    global centres; `cluster_patches` without a way `back` takes any number of tokens."""
    if centres > MOST_CENTRES or head_dim > 64:
        return False
    return not back or tokens <= most_tokens(head_dim, dtype.itemsize, device)


@torch.compiler.assume_constant_result
def most_tokens(head_dim: int, itemsize: int, device: torch.device) -> int:
    """Of a window, that fit the shared memory of a multiprocessor at once: a power of two.

    The backward pass of `cluster_patches`, which needs the most, takes 5.2 to 6.9 times tokens · (channels + centres),
    by the compiler for compute capability 9.0.
    """
    channels = max(16, 1 << (head_dim - 1).bit_length())
    room = kernels.shared_memory(device) // (7 * itemsize * (channels + 16))
    return min(MOST_TOKENS, 1 << room.bit_length() - 1)


def pool_fits(tokens: int, centres: int) -> bool:
    """Whether `cluster_pool` takes windows of so many tokens and so many global centres."""
    return tokens <= MOST_TOKENS and centres <= MOST_CENTRES


def cluster_pool(x: Tensor, side: tuple[int, int], centres: int) -> Tensor:
    """Means over windows of p × q tokens and over the regions of k × k global centres, of a map without padding:
    (B, H, W, C) -> (B, G + k², C)."""
    return torch.ops.leafward.cluster_pool(x, *side, centres)


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


# As the layers that call them are imported: a call may be traced, where nothing can be.
kernels.provide(*(f"{__name__}.{name}" for name in ("norm", "mlp", "cluster", "pool")))
