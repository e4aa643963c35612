"""From the bare product of queries, keys and values to the lanes that attention multiplies, in one pass.

The lanes are those of `leafward.nn.kernels.lanes_common`, in the layout (B, T, heads, lanes). One launch serves
queries, keys and values.
"""

# The kernels are written in Triton's language, which only looks like Python.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from leafward.nn.kernels.lanes_common import places, read_lanes_back, to_eights, write_lanes
from leafward.nn.kernels.launch import operator, programs, tile, wrap_triton


@triton.jit
def _forward(
    p_ptr, b_ptr, t_ptr, w_ptr, cos_ptr, sin_ptr, scale_ptr, q_ptr, k_ptr, v_ptr, length, batch_step, row_width, c,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, TURNING: tl.constexpr, WIDTH: tl.constexpr,
    TALL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    kind = tl.program_id(1)
    if kind == 0:
        write_lanes(
            p_ptr, b_ptr, t_ptr, w_ptr, p_ptr, cos_ptr, sin_ptr, scale_ptr, q_ptr, length, batch_step, row_width, c,
            0, H, 0, D, D, D, 0, TURNING, WIDTH, TALL, WIDE,
        )  # fmt: skip
    elif kind == 1:
        write_lanes(
            p_ptr, b_ptr, t_ptr, w_ptr, p_ptr, cos_ptr, sin_ptr, scale_ptr, k_ptr, length, batch_step, row_width, c,
            1, G, H * D, D, D, D, 0, TURNING, WIDTH, TALL, WIDE,
        )  # fmt: skip
    else:
        write_lanes(
            p_ptr, b_ptr, t_ptr, w_ptr, p_ptr, cos_ptr, sin_ptr, scale_ptr, v_ptr, length, batch_step, row_width, c,
            2, G, (H + G) * D, D, D, D, 0, 0, WIDTH, TALL, WIDE,
        )  # fmt: skip


@triton.jit
def _backward(
    q_ptr, k_ptr, v_ptr, dq_ptr, dk_ptr, dv_ptr, t_ptr, w_ptr, cos_ptr, sin_ptr, scale_ptr, dp_ptr, dt_ptr, dscale_ptr,
    db_ptr, dw_ptr, rows, length, batch_step, row_width,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, TURNING: tl.constexpr, WIDTH: tl.constexpr,
    TALL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    kind = tl.program_id(1)
    if kind == 0:
        read_lanes_back(
            q_ptr, dq_ptr, t_ptr, w_ptr, cos_ptr, sin_ptr, scale_ptr,
            dp_ptr, dt_ptr, dscale_ptr, db_ptr, dw_ptr, dp_ptr, rows, length, batch_step, row_width,
            0, H, 0, D, D, D, 0, TURNING, WIDTH, TALL, WIDE,
        )  # fmt: skip
    elif kind == 1:
        read_lanes_back(
            k_ptr, dk_ptr, t_ptr, w_ptr, cos_ptr, sin_ptr, scale_ptr,
            dp_ptr, dt_ptr, dscale_ptr, db_ptr, dw_ptr, dp_ptr, rows, length, batch_step, row_width,
            1, G, H * D, D, D, D, 0, TURNING, WIDTH, TALL, WIDE,
        )  # fmt: skip
    else:
        read_lanes_back(
            v_ptr, dv_ptr, t_ptr, w_ptr, cos_ptr, sin_ptr, scale_ptr,
            dp_ptr, dt_ptr, dscale_ptr, db_ptr, dw_ptr, dp_ptr, rows, length, batch_step, row_width,
            2, G, (H + G) * D, D, D, D, 0, 0, WIDTH, TALL, WIDE,
        )  # fmt: skip


def _sizes(cos: Tensor, heads: int, kv_heads: int, d: int) -> dict[str, int]:
    (tall, wide), warps = tile(heads, to_eights(d + 3), share=256)
    sizes = {"H": heads, "G": kv_heads, "D": d, "TURNING": 2 * cos.shape[-1], "WIDTH": to_eights(d + 3)}
    return sizes | {"TALL": tall, "WIDE": wide, "num_warps": warps}


@operator
def head_lanes(
    product: Tensor,
    bias: Tensor,
    t: Tensor,
    time_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    scale: Tensor,
    heads: int,
    kv_heads: int,
    c: float,
) -> tuple[Tensor, Tensor, Tensor]:
    product, t, cos, sin = (tensor.contiguous() for tensor in (product, t, cos, sin))
    outputs = _like(product, heads, kv_heads)
    length, width = product.shape[-2:]
    sizes = _sizes(cos, heads, kv_heads, width // (heads + 2 * kv_heads))
    inputs = product, bias, t, time_weight, cos, sin, scale
    wrap_triton(_forward)[(t.numel(), 3)](*inputs, *outputs, *places(cos, length), width, c, **sizes)
    return outputs


def _like(product: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Room for the lanes of queries, keys and values."""
    lanes = to_eights(product.shape[-1] // (heads + 2 * kv_heads) + 3)
    q, k, v = (product.new_empty(*product.shape[:2], count, lanes) for count in (heads, kv_heads, kv_heads))
    return q, k, v


@head_lanes.register_fake
def _(product, bias, t, time_weight, cos, sin, scale, heads, kv_heads, c):
    return _like(product, heads, kv_heads)


@operator
def head_lanes_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    bias: Tensor,
    t: Tensor,
    time_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    scale: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    q, k, v, dq, dk, dv, t, cos, sin = (x.contiguous() for x in (q, k, v, dq, dk, dv, t, cos, sin))
    heads, kv_heads, length, width, rows = q.shape[2], k.shape[2], q.shape[1], bias.shape[0], t.numel()
    share = programs(q, rows)
    dp = q.new_empty(*q.shape[:2], width)
    dt, dscale = t.new_empty(3, rows), t.new_empty(rows)
    db, dw = t.new_empty(share, width), t.new_empty(share, width)
    sizes = _sizes(cos, heads, kv_heads, width // (heads + 2 * kv_heads))
    inputs = q, k, v, dq, dk, dv, t, time_weight, cos, sin, scale
    wrap_triton(_backward)[(share, 3)](*inputs, dp, dt, dscale, db, dw, rows, *places(cos, length), width, **sizes)
    return (
        dp,
        db.sum(dim=0).to(bias.dtype),
        dt.sum(dim=0).view_as(t),
        dw.sum(dim=0).to(time_weight.dtype).reshape(time_weight.shape),
        dscale.sum().to(scale.dtype).reshape(scale.shape),
    )


@head_lanes_backward.register_fake
def _(q, k, v, dq, dk, dv, bias, t, time_weight, cos, sin, scale):
    dp = q.new_empty(*q.shape[:2], bias.shape[0])
    return dp, *(torch.empty_like(x) for x in (bias, t.contiguous(), time_weight, scale))


def _setup(ctx, inputs, output) -> None:
    _, *tensors, _, _, _ = inputs
    ctx.save_for_backward(*output, *tensors)


def _gradient(ctx, dq, dk, dv):
    q, k, v, *rest = ctx.saved_tensors
    dp, db, dt, dw, dscale = torch.ops.leafward.head_lanes_backward(q, k, v, dq, dk, dv, *rest)
    return dp, db, dt, dw, None, None, dscale, None, None, None


head_lanes.register_autograd(_gradient, setup_context=_setup)
