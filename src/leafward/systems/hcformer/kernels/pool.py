"""Means over the windows of a map and over the regions of its global centres, in one pass over it, and back.

A program goes over some groups of windows that fill a tile, and gives its part of the means of the centres. Both sums
are products with zeros and ones, which are exact in every type.
"""

# The kernels are written in Triton's language, which only looks like Python.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from leafward.nn.kernels.launch import operator, wrap_triton
from leafward.systems.hcformer.kernels import MOST_CENTRES
from leafward.systems.hcformer.kernels.common import product, regions

_GROUPS = 8
"""For one program, forward; back it has one."""
_BLOCK, _BLOCK_BACK = 32, 64
"""Channels of a program."""


@triton.jit
def _members(
    group, down, across, P: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, WINDOWS: tl.constexpr, TALL: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Places on the map of a group of windows (TALL,), which there are, to which window of the group and to which
    centre each belongs (WIDE, TALL), and the number of places of each centre."""
    token, one = tl.arange(0, TALL), tl.arange(0, WIDE)[:, None]
    which, place = token // (P * Q), token % (P * Q)
    window = group * WINDOWS + which
    exists = (which < WINDOWS) & (window < down * across)
    row, column = window // across * P + place // Q, window % across * Q + place % Q
    top, bottom, left, right, count = regions(down * P, across * Q, K, WIDE)
    inside = (row[None, :] >= top[:, None]) & (row[None, :] < bottom[:, None])
    inside &= (column[None, :] >= left[:, None]) & (column[None, :] < right[:, None])
    inside &= exists[None, :] & (one < K * K)
    return row * (across * Q) + column, exists, (which[None, :] == one) & exists[None, :], inside, count


@triton.jit
def _windows(group, down, across, WINDOWS: tl.constexpr, WIDE: tl.constexpr):
    """Windows of a group, and which there are."""
    one = tl.arange(0, WIDE)
    return group * WINDOWS + one, (one < WINDOWS) & (group * WINDOWS + one < down * across)


@triton.jit
def _forward(
    x_ptr, mean_ptr, part_ptr, down, across, groups, share, parts,
    P: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, WINDOWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    TALL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    blocks: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    lane, part = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK), (tl.program_id(0) // blocks).to(tl.int64)
    image, first = part // parts, (part % parts).to(tl.int32) * share
    dtype = x_ptr.dtype.element_ty
    x_ptr += image * (down * P) * (across * Q) * WIDTH
    mean_ptr += image * (down * across) * WIDTH
    total = tl.zeros((WIDE, BLOCK), tl.float32)
    for group in range(first, tl.minimum(first + share, groups)):
        place, exists, home, inside, _same = _members(group, down, across, P, Q, K, WINDOWS, TALL, WIDE)
        mask = exists[:, None] & (lane < WIDTH)[None, :]
        x = tl.load(x_ptr + place[:, None] * WIDTH + lane[None, :], mask=mask, other=0.0)
        total += product(inside, x, dtype)
        window, is_window = _windows(group, down, across, WINDOWS, WIDE)
        mean = product(home, x, dtype) / (P * Q)
        mask = is_window[:, None] & (lane < WIDTH)[None, :]
        tl.store(mean_ptr + window[:, None] * WIDTH + lane[None, :], mean.to(dtype), mask=mask)
    centre = tl.arange(0, WIDE)
    _top, _bottom, _left, _right, count = regions(down * P, across * Q, K, WIDE)
    total /= count[:, None]
    mask = (centre < K * K)[:, None] & (lane < WIDTH)[None, :]
    tl.store(part_ptr + (part * (K * K) + centre)[:, None] * WIDTH + lane[None, :], total, mask=mask)


@triton.jit
def _backward(
    dout_ptr, dx_ptr, down, across, groups,
    P: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, WINDOWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    TALL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    blocks: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    lane, group = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK), tl.program_id(0) // blocks % groups
    image = (tl.program_id(0) // blocks // groups).to(tl.int64)
    dtype = dx_ptr.dtype.element_ty
    dout_ptr += image * (down * across + K * K) * WIDTH
    dx_ptr += image * (down * P) * (across * Q) * WIDTH
    window, is_window = _windows(group, down, across, WINDOWS, WIDE)
    real, centre = (lane < WIDTH)[None, :], tl.arange(0, WIDE)
    at = dout_ptr + window[:, None] * WIDTH + lane[None, :]
    of_windows = tl.load(at, mask=is_window[:, None] & real, other=0.0).to(tl.float32)
    at = dout_ptr + (down * across + centre)[:, None] * WIDTH + lane[None, :]
    of_centres = tl.load(at, mask=(centre < K * K)[:, None] & real, other=0.0).to(tl.float32)
    place, exists, home, inside, count = _members(group, down, across, P, Q, K, WINDOWS, TALL, WIDE)
    dx = product(tl.trans(home), of_windows / (P * Q), dtype)
    dx += product(tl.trans(inside), of_centres / count[:, None], dtype)
    tl.store(dx_ptr + place[:, None] * WIDTH + lane[None, :], dx.to(dtype), mask=exists[:, None] & real)


def _sizes(grid: tuple[int, int], side: tuple[int, int], centres: int, width: int) -> dict[str, int]:
    """What both kernels are given beside tensors; on tensor cores each side of a product has at least sixteen."""
    (down, across), (p, q) = grid, side
    together = max(1, min(64 // (p * q), MOST_CENTRES))
    tall = max(16, triton.next_power_of_2(together * p * q))
    given = {"down": down, "across": across, "groups": triton.cdiv(down * across, together)}
    given |= {"P": p, "Q": q, "K": centres, "WINDOWS": together, "WIDTH": width}
    return given | {"TALL": tall, "WIDE": MOST_CENTRES, "num_warps": max(1, tall // 64)}


@operator
def cluster_pool(x: Tensor, rows: int, columns: int, centres: int) -> Tensor:
    x = x.contiguous()
    images, height, width, channels = x.shape
    sizes = _sizes((height // rows, width // columns), (rows, columns), centres, channels)
    parts = triton.cdiv(sizes["groups"], _GROUPS)
    share = triton.cdiv(sizes["groups"], parts)
    means = x.new_empty(images, sizes["down"] * sizes["across"], channels)
    part = x.new_empty(images, parts, centres**2, channels, dtype=torch.float32)
    programs = images * parts * triton.cdiv(channels, _BLOCK)
    wrap_triton(_forward)[(programs,)](x, means, part, share=share, parts=parts, BLOCK=_BLOCK, **sizes)
    return torch.cat([means, part.sum(dim=1).to(x.dtype)], dim=1)


@cluster_pool.register_fake
def _(x, rows, columns, centres):
    windows = (x.shape[1] // rows) * (x.shape[2] // columns)
    return x.new_empty(x.shape[0], windows + centres**2, x.shape[3])


@operator
def cluster_pool_backward(dout: Tensor, height: int, width: int, rows: int, columns: int, centres: int) -> Tensor:
    dout = dout.contiguous()
    images, _, channels = dout.shape
    sizes = _sizes((height // rows, width // columns), (rows, columns), centres, channels)
    dx = dout.new_empty(images, height, width, channels)
    programs = images * sizes["groups"] * triton.cdiv(channels, _BLOCK_BACK)
    wrap_triton(_backward)[(programs,)](dout, dx, BLOCK=_BLOCK_BACK, **sizes)
    return dx


@cluster_pool_backward.register_fake
def _(dout, height, width, rows, columns, centres):
    return dout.new_empty(dout.shape[0], height, width, dout.shape[2])


def _setup(ctx, inputs, output) -> None:
    x, *ctx.sizes = inputs
    ctx.map = x.shape[1:3]


def _gradient(ctx, dout):
    return torch.ops.leafward.cluster_pool_backward(dout, *ctx.map, *ctx.sizes), None, None, None


cluster_pool.register_autograd(_gradient, setup_context=_setup)
