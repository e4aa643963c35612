"""From the bare product of queries, keys and values to the lanes that attention multiplies, in one pass over each.

Per token and head: x = p + b + t w_t, rotated (HoPE; values are not), its time τ = √(1/c + |x|²), and the lanes of
:func:`leafward.nn.lanes.query_lanes`, `key_lanes` and `value_lanes` for half types, in the layout (B, T, heads, lanes).
The kinds differ in what they do with the time; each is a launch of its own.
"""

# The kernels are written in Triton's language, which only looks like Python.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from leafward.nn.kernels._launch import programs, tile

QUERY, KEY, VALUE = 0, 1, 2


@triton.jit
def _heads(p_ptr, b_ptr, w_ptr, t, start, own, mask):
    """A token's heads (heads, lanes), and the time column w_t of the map that made them."""
    w = tl.load(w_ptr + own, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(p_ptr + start + own, mask=mask, other=0.0).to(tl.float32)
    return x + tl.load(b_ptr + own, mask=mask, other=0.0).to(tl.float32) + t * w, w


@triton.jit
def _angle(cos_ptr, sin_ptr, row, length, batch_step, TURNING: tl.constexpr, WIDE: tl.constexpr):
    """cos and sin of a token's pairs, (1, WIDE/2); pairs beyond those that turn stand still."""
    pair = tl.arange(0, WIDE // 2)[None, :]
    at = (row // length) * batch_step + (row % length) * (TURNING // 2) + pair
    cos = tl.load(cos_ptr + at, mask=pair < TURNING // 2, other=1.0).to(tl.float32)
    return cos, tl.load(sin_ptr + at, mask=pair < TURNING // 2, other=0.0).to(tl.float32)


@triton.jit
def _turned(x, cos, sin, TALL: tl.constexpr, WIDE: tl.constexpr):
    """Pairs of lanes rotated."""
    even, odd = tl.split(tl.reshape(x, (TALL, WIDE // 2, 2)))
    return tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), (TALL, WIDE))


@triton.jit
def _forward(
    p_ptr, b_ptr, t_ptr, w_ptr, cos_ptr, sin_ptr, scale_ptr, out_ptr,
    length, batch_step, row_width, column, c,
    KIND: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, TURNING: tl.constexpr, WIDTH: tl.constexpr,
    TALL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head, lane = tl.arange(0, TALL)[:, None], tl.arange(0, WIDE)[None, :]
    t = tl.load(t_ptr + row).to(tl.float32)
    mask = (head < HEADS) & (lane < D)
    x, _ = _heads(p_ptr, b_ptr, w_ptr, t, row * row_width, column + head * D + lane, mask)
    if KIND != 2:
        cos, sin = _angle(cos_ptr, sin_ptr, row, length, batch_step, TURNING, WIDE)
        x = _turned(x, cos, sin, TALL, WIDE)
    time = tl.sqrt(1.0 / c + tl.sum(x * x, axis=1))[:, None]
    half = out_ptr.dtype.element_ty
    if KIND == 0:
        scale = tl.load(scale_ptr).to(tl.float32)
        x, time = x * scale, -scale * time
    if KIND == 2:
        top = tl.floor(time + 0.5).to(half).to(tl.float32)
        x = tl.where(lane == D, time - top, tl.where(lane == D + 1, top, x))
    else:
        top = time.to(half).to(tl.float32)
        rest = time - top
        if KIND == 0:
            x = tl.where((lane == D) | (lane == D + 2), top, tl.where(lane == D + 1, rest, x))
        else:
            x = tl.where((lane == D) | (lane == D + 1), top, tl.where(lane == D + 2, rest, x))
    tl.store(out_ptr + (row * HEADS + head) * WIDTH + lane, x.to(half), mask=(head < HEADS) & (lane < WIDTH))


@triton.jit
def _backward(
    p_ptr, b_ptr, t_ptr, w_ptr, cos_ptr, sin_ptr, scale_ptr, dout_ptr, dp_ptr, dt_ptr, dscale_ptr, db_ptr, dw_ptr,
    rows, length, batch_step, row_width, column, c,
    KIND: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, TURNING: tl.constexpr, WIDTH: tl.constexpr,
    TALL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    head, lane = tl.arange(0, TALL)[:, None], tl.arange(0, WIDE)[None, :]
    inside = (head < HEADS) & (lane < D)
    own = column + head * D + lane
    scale = tl.load(scale_ptr).to(tl.float32)
    db, dw = tl.zeros((TALL, WIDE), tl.float32), tl.zeros((TALL, WIDE), tl.float32)
    for index in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.cast(index, tl.int64)
        t = tl.load(t_ptr + row).to(tl.float32)
        x, w = _heads(p_ptr, b_ptr, w_ptr, t, row * row_width, own, inside)
        cos, sin = _angle(cos_ptr, sin_ptr, row, length, batch_step, TURNING, WIDE)
        if KIND != 2:
            x = _turned(x, cos, sin, TALL, WIDE)
        time = tl.sqrt(1.0 / c + tl.sum(x * x, axis=1))[:, None]
        at = (row * HEADS + head) * WIDTH + lane
        dx = tl.load(dout_ptr + at, mask=(head < HEADS) & (lane < WIDTH), other=0.0).to(tl.float32)
        # The lanes that hold the head of the time, which is as good as the time itself: its tail takes the rest.
        if KIND == 0:
            timed = (lane == D) | (lane == D + 2)
        elif KIND == 1:
            timed = (lane == D) | (lane == D + 1)
        else:
            timed = lane == D
        dtime = tl.sum(tl.where(timed, dx, 0.0), axis=1)[:, None]
        dx = tl.where(lane < D, dx, 0.0)
        if KIND == 0:
            dscale = tl.sum(dx * x, axis=1) - tl.sum(dtime * time, axis=1)
            tl.store(dscale_ptr + row, tl.sum(dscale, axis=0))
            dx, dtime = dx * scale, -scale * dtime
        dx += x * (dtime / time)
        if KIND != 2:
            dx = _turned(dx, cos, -sin, TALL, WIDE)
        tl.store(dp_ptr + row * row_width + own, dx.to(dp_ptr.dtype.element_ty), mask=inside)
        tl.store(dt_ptr + row, tl.sum(tl.sum(dx * w, axis=1), axis=0))
        db += dx
        dw += t * dx
    tl.store(db_ptr + program * row_width + own, db, mask=inside)
    tl.store(dw_ptr + program * row_width + own, dw, mask=inside)


def _launches(
    product: Tensor, cos: Tensor, heads: int, kv_heads: int, back: bool = False
) -> list[tuple[tuple[int, ...], dict[str, int]]]:
    """For queries, keys and values: length, steps between tables and between rows, first column; and the sizes."""
    d = product.shape[-1] // (heads + 2 * kv_heads)
    step = cos.shape[-2] * cos.shape[-1] if cos.ndim == 3 else 0
    launches, column = [], 0
    for kind, count in ((QUERY, heads), (KEY, kv_heads), (VALUE, kv_heads)):
        (tall, wide), warps = tile(count, _lanes(d), back=back)
        sizes = {"KIND": kind, "HEADS": count, "D": d, "TURNING": 2 * cos.shape[-1], "WIDTH": _lanes(d)}
        sizes |= {"TALL": tall, "WIDE": wide, "num_warps": warps}
        launches.append(((product.shape[1], step, product.shape[-1], column), sizes))
        column += count * d
    return launches


def _lanes(d: int) -> int:
    return -(-(d + 3) // 8) * 8


@torch.library.custom_op(
    "leafward::head_lanes",
    mutates_args=(),
    schema="(Tensor product, Tensor bias, Tensor t, Tensor time_weight, Tensor cos, Tensor sin, Tensor scale,"
    " int heads, int kv_heads, float c) -> (Tensor, Tensor, Tensor)",
)
def head_lanes(product, bias, t, time_weight, cos, sin, scale, heads, kv_heads, c):
    product, t, cos, sin = (tensor.contiguous() for tensor in (product, t, cos, sin))
    outputs = _like(product, heads, kv_heads)
    for out, (places, sizes) in zip(outputs, _launches(product, cos, heads, kv_heads), strict=True):
        _forward[(t.numel(),)](product, bias, t, time_weight, cos, sin, scale, out, *places, c, **sizes)
    return outputs


def _like(product: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Room for the lanes of queries, keys and values."""
    lanes = _lanes(product.shape[-1] // (heads + 2 * kv_heads))
    q, k, v = (product.new_empty(*product.shape[:2], count, lanes) for count in (heads, kv_heads, kv_heads))
    return q, k, v


@head_lanes.register_fake
def _(product, bias, t, time_weight, cos, sin, scale, heads, kv_heads, c):
    return _like(product, heads, kv_heads)


@torch.library.custom_op(
    "leafward::head_lanes_backward",
    mutates_args=(),
    schema="(Tensor product, Tensor bias, Tensor t, Tensor time_weight, Tensor cos, Tensor sin, Tensor scale,"
    " Tensor dq, Tensor dk, Tensor dv, int heads, int kv_heads, float c)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def head_lanes_backward(product, bias, t, time_weight, cos, sin, scale, dq, dk, dv, heads, kv_heads, c):
    product, t, cos, sin, dq, dk, dv = (x.contiguous() for x in (product, t, cos, sin, dq, dk, dv))
    width, rows = product.shape[-1], t.numel()
    share = programs(product, rows)
    dp = torch.empty_like(product)
    dt, dscale = t.new_empty(3, rows), t.new_empty(rows)
    db, dw = t.new_empty(share, width), t.new_empty(share, width)
    launches = _launches(product, cos, heads, kv_heads, back=True)
    for dout, dt_part, (places, sizes) in zip((dq, dk, dv), dt, launches, strict=True):
        inputs = product, bias, t, time_weight, cos, sin, scale, dout
        _backward[(share,)](*inputs, dp, dt_part, dscale, db, dw, rows, *places, c, **sizes)
    return (
        dp,
        db.sum(dim=0).to(bias.dtype),
        dt.sum(dim=0).view_as(t),
        dw.sum(dim=0).to(time_weight.dtype).reshape(time_weight.shape),
        dscale.sum().to(scale.dtype).reshape(scale.shape),
    )


@head_lanes_backward.register_fake
def _(product, bias, t, time_weight, cos, sin, scale, dq, dk, dv, heads, kv_heads, c):
    return tuple(torch.empty_like(x) for x in (product.contiguous(), bias, t.contiguous(), time_weight, scale))


def _setup(ctx, inputs, output) -> None:
    *tensors, ctx.heads, ctx.kv_heads, ctx.c = inputs
    ctx.save_for_backward(*tensors)


def _gradient(ctx, dq, dk, dv):
    dp, db, dt, dw, dscale = torch.ops.leafward.head_lanes_backward(
        *ctx.saved_tensors, dq, dk, dv, ctx.heads, ctx.kv_heads, ctx.c
    )
    return dp, db, dt, dw, None, None, dscale, None, None, None


head_lanes.register_autograd(_gradient, setup_context=_setup)
