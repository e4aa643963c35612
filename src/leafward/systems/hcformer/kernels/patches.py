"""The patch level of the cluster mixer, one pass over the embedded map and one pass back.

Per window and head, with features f and values v of the tokens, f_m and v_m their means over the tokens of centre m:

    A = softmax_m(α cos(f_n, f_m) + b_nm),   v'_m = (v_m + Σ_n A_nm v_n)/(1 + Σ_n A_nm),   out_n = Σ_m A_nm v'_m.

A program takes one head of a group of windows that fill a tile. It finds their tokens on the map by itself, so nothing
is cut up before and put together after; beside out it writes Σ out and Σ out² over the channels of the head, from which
the norm that follows has its mean and variance. The backward pass works everything out again from the embedded map. A
window with more tokens than a tile holds, as large images have, is read three times by its program: for the centres,
for v' and for out. That has no backward pass.
"""

# The kernels are written in Triton's language, which only looks like Python.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from leafward.nn.kernels.launch import programs, wrap_triton
from leafward.systems.hcformer.kernels import most_tokens
from leafward.systems.hcformer.kernels.common import (
    SQUARE_FLOOR,
    exchange_back,
    gathered,
    product,
    regions,
    rows_of,
    shares,
    tile_sizes,
    write_rows,
)

TILE_TOKENS, TILE_CENTRES = 64, 16
"""Small windows go together as long as they fit this."""
_PART = 128
"""Tokens at a time of a window that does not fit a tile."""


@triton.jit
def _tokens(
    group, first, windows, down, across,
    P: tl.constexpr, Q: tl.constexpr, WINDOWS: tl.constexpr, TALL: tl.constexpr,
):  # fmt: skip
    """Tokens of a group of windows from the `first` on: index on the map, window in the group, row and column in it,
    whether it exists."""
    token = first + tl.arange(0, TALL)
    which, place = token // (P * Q), token % (P * Q)
    if WINDOWS == 1:  # then the divisions below are one for all and not one for each token
        window, exists = group, which == 0
    else:
        window = group * WINDOWS + which
        exists = (which < WINDOWS) & (window < windows)
    row, column = place // Q, place % Q
    image, inner = window // (down * across), window % (down * across)
    line = tl.cast(image, tl.int64) * (down * P) + (inner // across) * P + row
    return line * (across * Q) + (inner % across) * Q + column, which, row, column, exists


@triton.jit
def _pairs(
    which, row, column, exists, P: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """Of tokens and centres (TALL, WIDE): same window, membership as zeros and ones, where the bias stands in a table
    (K, P, K, Q); and the number of tokens of each centre."""
    centre = tl.arange(0, WIDE)
    home, i, j = centre // (K * K), centre % (K * K) // K, centre % K
    top, bottom, left, right, count = regions(P, Q, K, WIDE)
    together = exists[:, None] & (which[:, None] == home[None, :])
    inside = (row[:, None] >= top[None, :]) & (row[:, None] < bottom[None, :])
    inside &= (column[:, None] >= left[None, :]) & (column[:, None] < right[None, :])
    at = ((i[None, :] * P + row[:, None]) * K + j[None, :]) * Q + column[:, None]
    return together, (inside & together).to(tl.float32), at, count


@triton.jit
def _directions(centres):
    """Of centres, and their inverse lengths."""
    rate = tl.rsqrt(tl.sum(centres * centres, axis=1) + SQUARE_FLOOR)
    return centres * rate[:, None], rate


@triton.jit
def _assigned(f, direction, alpha, bias, together, dtype: tl.constexpr):
    """Assignments, inverse lengths of tokens, f · direction."""
    wide = f.to(tl.float32)
    rate = tl.rsqrt(tl.sum(wide * wide, axis=1) + SQUARE_FLOOR)
    raw = product(f, tl.trans(direction), dtype)
    return shares(raw * (rate * alpha)[:, None] + bias, together), rate, raw


@triton.jit
def _write(
    out_ptr, sums_ptr, out, token, exists, tokens, head,
    HEADS: tl.constexpr, D: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """What tokens get, and its sums for the norm."""
    out = out.to(out_ptr.dtype.element_ty)
    write_rows(out_ptr, token * (HEADS * D) + head * D, exists, out, D, DEEP)
    out = out.to(tl.float32)
    place = head * tl.cast(tokens, tl.int64) + token
    tl.store(sums_ptr + place, tl.sum(out, axis=1), mask=exists)
    tl.store(sums_ptr + HEADS * tl.cast(tokens, tl.int64) + place, tl.sum(out * out, axis=1), mask=exists)


@triton.jit
def _forward(
    e_ptr, alpha_ptr, bias_ptr, out_ptr, sums_ptr, windows, tokens, down, across,
    P: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, WINDOWS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
    TALL: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    # Heads of one group follow each other, so that they share what the cache fetched.
    head, group = tl.program_id(0) % HEADS, tl.program_id(0) // HEADS
    dtype = e_ptr.dtype.element_ty
    token, which, row, column, exists = _tokens(group, 0, windows, down, across, P, Q, WINDOWS, TALL)
    together, members, at, count = _pairs(which, row, column, exists, P, Q, K, WIDE)
    start = token * (2 * HEADS * D) + head * D
    f = rows_of(e_ptr, start, exists, D, DEEP)
    v = rows_of(e_ptr, start + HEADS * D, exists, D, DEEP)
    alpha = tl.load(alpha_ptr + head).to(tl.float32)
    bias = tl.load(bias_ptr + head * (K * P * K * Q) + at, mask=together, other=0.0).to(tl.float32)
    direction, _ = _directions(product(tl.trans(members), f, dtype) / count[:, None])
    a, _, _ = _assigned(f, direction, alpha, bias, together, dtype)
    middle, _ = gathered(a, v, product(tl.trans(members), v, dtype) / count[:, None], dtype)
    _write(out_ptr, sums_ptr, product(a, middle, dtype), token, exists, tokens, head, HEADS, D, DEEP)


@triton.jit
def _forward_parts(
    e_ptr, alpha_ptr, bias_ptr, out_ptr, sums_ptr, windows, tokens, down, across,
    P: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, WINDOWS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
    TALL: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """One window, in tiles."""
    head, window = tl.program_id(0) % HEADS, tl.program_id(0) // HEADS
    dtype = e_ptr.dtype.element_ty
    alpha = tl.load(alpha_ptr + head).to(tl.float32)
    centres, values = tl.zeros((WIDE, DEEP), tl.float32), tl.zeros((WIDE, DEEP), tl.float32)
    for first in range(0, P * Q, TALL):
        token, which, row, column, exists = _tokens(window, first, windows, down, across, P, Q, WINDOWS, TALL)
        _together, members, _at, _same = _pairs(which, row, column, exists, P, Q, K, WIDE)
        start = token * (2 * HEADS * D) + head * D
        centres += product(tl.trans(members), rows_of(e_ptr, start, exists, D, DEEP), dtype)
        values += product(tl.trans(members), rows_of(e_ptr, start + HEADS * D, exists, D, DEEP), dtype)
    _top, _bottom, _left, _right, count = regions(P, Q, K, WIDE)
    direction, _rate = _directions(centres / count[:, None])
    middle, total = values / count[:, None], tl.full((WIDE,), 1.0, tl.float32)
    for first in range(0, P * Q, TALL):
        token, which, row, column, exists = _tokens(window, first, windows, down, across, P, Q, WINDOWS, TALL)
        together, _members, at, _same = _pairs(which, row, column, exists, P, Q, K, WIDE)
        start = token * (2 * HEADS * D) + head * D
        bias = tl.load(bias_ptr + head * (K * P * K * Q) + at, mask=together, other=0.0).to(tl.float32)
        a, _lengths, _raw = _assigned(rows_of(e_ptr, start, exists, D, DEEP), direction, alpha, bias, together, dtype)
        total += tl.sum(a, axis=0)
        middle += product(tl.trans(a), rows_of(e_ptr, start + HEADS * D, exists, D, DEEP), dtype)
    middle /= total[:, None]
    for first in range(0, P * Q, TALL):
        token, which, row, column, exists = _tokens(window, first, windows, down, across, P, Q, WINDOWS, TALL)
        together, _members, at, _same = _pairs(which, row, column, exists, P, Q, K, WIDE)
        bias = tl.load(bias_ptr + head * (K * P * K * Q) + at, mask=together, other=0.0).to(tl.float32)
        f = rows_of(e_ptr, token * (2 * HEADS * D) + head * D, exists, D, DEEP)
        a, _lengths, _raw = _assigned(f, direction, alpha, bias, together, dtype)
        _write(out_ptr, sums_ptr, product(a, middle, dtype), token, exists, tokens, head, HEADS, D, DEEP)


@triton.jit
def _backward(
    e_ptr, alpha_ptr, bias_ptr, dout_ptr, dsums_ptr, de_ptr, dalpha_ptr, dbias_ptr,
    windows, tokens, down, across, groups, share,
    P: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, WINDOWS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
    TALL: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """Over groups; the gradients of α and of the bias are this program's parts of the sums."""
    head, first = tl.program_id(0) % HEADS, tl.program_id(0) // HEADS
    dtype = e_ptr.dtype.element_ty
    alpha = tl.load(alpha_ptr + head).to(tl.float32)
    dalpha, dbias = tl.zeros((TALL,), tl.float32), tl.zeros((TALL, WIDE), tl.float32)
    for group in range(first, groups, share):
        token, which, row, column, exists = _tokens(group, 0, windows, down, across, P, Q, WINDOWS, TALL)
        together, members, at, count = _pairs(which, row, column, exists, P, Q, K, WIDE)
        start = token * (2 * HEADS * D) + head * D
        f = rows_of(e_ptr, start, exists, D, DEEP)
        v = rows_of(e_ptr, start + HEADS * D, exists, D, DEEP)
        bias = tl.load(bias_ptr + head * (K * P * K * Q) + at, mask=together, other=0.0).to(tl.float32)
        direction, centre_rate = _directions(product(tl.trans(members), f, dtype) / count[:, None])
        a, rate, raw = _assigned(f, direction, alpha, bias, together, dtype)
        middle, total = gathered(a, v, product(tl.trans(members), v, dtype) / count[:, None], dtype)
        dout = rows_of(dout_ptr, token * (HEADS * D) + head * D, exists, D, DEEP).to(tl.float32)
        dsum = tl.load(dsums_ptr + token, mask=exists, other=0.0).to(tl.float32)
        dsquares = tl.load(dsums_ptr + tokens + token, mask=exists, other=0.0).to(tl.float32)
        real = (tl.arange(0, DEEP) < D)[None, :]
        dout += tl.where(real, dsum[:, None] + 2.0 * dsquares[:, None] * product(a, middle, dtype), 0.0)
        dlogits, dv, dcentres = exchange_back(a, v, middle, total, dout, dtype)
        dv += product(members, dcentres / count[:, None], dtype)
        write_rows(de_ptr, start + HEADS * D, exists, dv, D, DEEP)
        dbias += dlogits
        dcosine = dlogits * rate[:, None]  # of f · direction, but for α
        turn = tl.sum(dcosine * raw, axis=1)
        dalpha += turn
        dcosine *= alpha
        ddirection = product(tl.trans(dcosine), f, dtype)
        along = tl.sum(ddirection * direction, axis=1)
        dcentres = (ddirection - direction * along[:, None]) * (centre_rate / count)[:, None]
        df = product(dcosine, direction, dtype) + product(members, dcentres, dtype)
        df -= f.to(tl.float32) * (alpha * turn * rate * rate)[:, None]
        write_rows(de_ptr, start, exists, df, D, DEEP)
    which = tl.arange(0, TALL) // (P * Q)
    row, column = tl.arange(0, TALL) % (P * Q) // Q, tl.arange(0, TALL) % Q
    together, _, at, _ = _pairs(which, row, column, which < WINDOWS, P, Q, K, WIDE)
    part = (tl.program_id(0) * WINDOWS + which[:, None]) * (K * P * K * Q)
    tl.store(dbias_ptr + part + at, dbias, mask=together)
    tl.store(dalpha_ptr + tl.program_id(0), tl.sum(dalpha, axis=0))


def _sizes(e: Tensor, heads: int, side: tuple[int, int], centres: int) -> tuple[dict[str, int], dict[str, int]]:
    """Sizes that a kernel is made for, and those that it is given."""
    batch, height, width, channels = e.shape
    (p, q), d = side, channels // (2 * heads)
    down, across = height // p, width // q
    together = max(1, min(TILE_TOKENS // (p * q), TILE_CENTRES // centres**2))
    fixed = {"P": p, "Q": q, "K": centres, "WINDOWS": together, "HEADS": heads, "D": d}
    fixed |= tile_sizes(together * p * q, together * centres**2, d)
    windows = batch * down * across
    return fixed, {"windows": windows, "tokens": batch * height * width, "down": down, "across": across}


def patches_forward(
    e: Tensor, alpha: Tensor, bias: Tensor, side: tuple[int, int], centres: int
) -> tuple[Tensor, Tensor]:
    """(B, H, W, 2hd), (h,), (h, k, p, k, q) -> (B, H, W, hd), (2, B, H, W)."""
    fixed, given = _sizes(e, alpha.numel(), side, centres)
    out = e.new_empty(*e.shape[:-1], e.shape[-1] // 2)
    sums = e.new_empty(2, fixed["HEADS"], *e.shape[:-1], dtype=torch.float32)
    if math.prod(side) > most_tokens(fixed["D"], e.element_size(), e.device):
        fixed |= tile_sizes(_PART, centres**2, fixed["D"])
        wrap_triton(_forward_parts)[(given["windows"] * fixed["HEADS"],)](e, alpha, bias, out, sums, **given, **fixed)
    else:
        # Here a warp holds four times as much as in the backward pass: two fifths of the instructions are saved.
        fixed["num_warps"] = max(1, fixed["num_warps"] // 4)
        groups = triton.cdiv(given["windows"], fixed["WINDOWS"])
        wrap_triton(_forward)[(groups * fixed["HEADS"],)](e, alpha, bias, out, sums, **given, **fixed)
    return out, sums.sum(dim=1)


def patches_backward(
    e: Tensor, alpha: Tensor, bias: Tensor, dout: Tensor, dsums: Tensor, side: tuple[int, int], centres: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the embedded map, of α and of the bias."""
    fixed, given = _sizes(e, alpha.numel(), side, centres)
    groups, heads = triton.cdiv(given["windows"], fixed["WINDOWS"]), fixed["HEADS"]
    share = min(groups, triton.cdiv(programs(e, groups * heads), heads))
    de = torch.empty_like(e)
    dalpha = alpha.new_empty(share, heads, dtype=torch.float32)
    dbias = bias.new_empty(share, heads, fixed["WINDOWS"], *bias.shape[1:], dtype=torch.float32)
    wrap_triton(_backward)[(share * heads,)](
        e, alpha, bias, dout, dsums, de, dalpha, dbias, **given, groups=groups, share=share, **fixed
    )
    return de, dalpha.sum(dim=0).to(alpha.dtype), dbias.sum(dim=(0, 2)).to(bias.dtype)
