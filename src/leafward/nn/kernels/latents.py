"""Latent attention: from the bare products of queries and of latent points to the lanes of attention, in one pass.

The lanes are those of `leafward.nn.kernels.lanes_common`, in the layout (B, T, heads, lanes), all of one width so
that attention need not pad them. Per head, the product of queries holds nope + rope columns, whose last are rotated;
the product of latent points holds nope columns of the key, joined by the shared rotated key, and those of the value.
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
    p_ptr, b_ptr, t_ptr, w_ptr, latent_p_ptr, latent_b_ptr, latent_t_ptr, latent_w_ptr, rope_ptr,
    cos_ptr, sin_ptr, scale_ptr, q_ptr, k_ptr, v_ptr, length, batch_step, query_width, latent_width, c,
    H: tl.constexpr, NOPE: tl.constexpr, D: tl.constexpr, E: tl.constexpr, TURNING: tl.constexpr,
    WIDTH: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    kind = tl.program_id(1)
    if kind == 0:
        write_lanes(
            p_ptr, b_ptr, t_ptr, w_ptr, rope_ptr, cos_ptr, sin_ptr, scale_ptr, q_ptr,
            length, batch_step, query_width, c, 0, H, 0, D, D, D, NOPE, TURNING, WIDTH, TALL, WIDE,
        )  # fmt: skip
    elif kind == 1:
        write_lanes(
            latent_p_ptr, latent_b_ptr, latent_t_ptr, latent_w_ptr, rope_ptr, cos_ptr, sin_ptr, scale_ptr, k_ptr,
            length, batch_step, latent_width, c, 1, H, 0, NOPE + E, NOPE, D, 0, 0, WIDTH, TALL, WIDE,
        )  # fmt: skip
    else:
        write_lanes(
            latent_p_ptr, latent_b_ptr, latent_t_ptr, latent_w_ptr, rope_ptr, cos_ptr, sin_ptr, scale_ptr, v_ptr,
            length, batch_step, latent_width, c, 2, H, NOPE, NOPE + E, E, E, 0, 0, WIDTH, TALL, WIDE,
        )  # fmt: skip


@triton.jit
def _backward(
    q_ptr, k_ptr, v_ptr, dq_ptr, dk_ptr, dv_ptr, t_ptr, w_ptr, latent_t_ptr, latent_w_ptr, cos_ptr, sin_ptr, scale_ptr,
    dp_ptr, db_ptr, dw_ptr, dlatent_p_ptr, dlatent_b_ptr, dlatent_w_ptr, drope_ptr, dt_ptr, dscale_ptr,
    rows, length, batch_step, query_width, latent_width,
    H: tl.constexpr, NOPE: tl.constexpr, D: tl.constexpr, E: tl.constexpr, TURNING: tl.constexpr,
    WIDTH: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    kind = tl.program_id(1)
    if kind == 0:
        read_lanes_back(
            q_ptr, dq_ptr, t_ptr, w_ptr, cos_ptr, sin_ptr, scale_ptr,
            dp_ptr, dt_ptr, dscale_ptr, db_ptr, dw_ptr, drope_ptr, rows, length, batch_step, query_width,
            0, H, 0, D, D, D, NOPE, TURNING, WIDTH, TALL, WIDE,
        )  # fmt: skip
    elif kind == 1:
        read_lanes_back(
            k_ptr, dk_ptr, latent_t_ptr, latent_w_ptr, cos_ptr, sin_ptr, scale_ptr, dlatent_p_ptr, dt_ptr, dscale_ptr,
            dlatent_b_ptr, dlatent_w_ptr, drope_ptr, rows, length, batch_step, latent_width,
            1, H, 0, NOPE + E, NOPE, D, 0, 0, WIDTH, TALL, WIDE,
        )  # fmt: skip
    else:
        read_lanes_back(
            v_ptr, dv_ptr, latent_t_ptr, latent_w_ptr, cos_ptr, sin_ptr, scale_ptr, dlatent_p_ptr, dt_ptr, dscale_ptr,
            dlatent_b_ptr, dlatent_w_ptr, drope_ptr, rows, length, batch_step, latent_width,
            2, H, NOPE, NOPE + E, E, E, 0, 0, WIDTH, TALL, WIDE,
        )  # fmt: skip


def _sizes(cos: Tensor, heads: int, widths: tuple[int, int], rope: int) -> dict[str, int]:
    """`widths` of the products of queries and of latent points."""
    d = widths[0] // heads
    sizes = {"H": heads, "NOPE": d - rope, "D": d, "E": widths[1] // heads - d + rope, "TURNING": 2 * cos.shape[-1]}
    width = _lanes(heads, widths, rope)
    (tall, wide), warps = tile(heads, width, share=1024)
    return sizes | {"WIDTH": width, "TALL": tall, "WIDE": wide, "num_warps": warps}


def _lanes(heads: int, widths: tuple[int, int], rope: int) -> int:
    """Lanes per head: room for a joined point or a value, and for the parts of its time."""
    d = widths[0] // heads
    return to_eights(max(d + 3, widths[1] // heads - d + rope + 2))


@operator
def latent_lanes(
    product: Tensor,
    bias: Tensor,
    t: Tensor,
    time_weight: Tensor,
    latent_product: Tensor,
    latent_bias: Tensor,
    latent_t: Tensor,
    latent_time_weight: Tensor,
    k_rope: Tensor,
    cos: Tensor,
    sin: Tensor,
    scale: Tensor,
    heads: int,
    c: float,
) -> tuple[Tensor, Tensor, Tensor]:
    whole = product, t, latent_product, latent_t, k_rope, cos, sin
    product, t, latent_product, latent_t, k_rope, cos, sin = (tensor.contiguous() for tensor in whole)
    outputs = _like(product, latent_product, k_rope, heads)
    widths = product.shape[-1], latent_product.shape[-1]
    sizes = _sizes(cos, heads, widths, k_rope.shape[-1])
    queries, latents = (product, bias, t, time_weight), (latent_product, latent_bias, latent_t, latent_time_weight)
    inputs = *queries, *latents, k_rope, cos, sin, scale
    wrap_triton(_forward)[(t.numel(), 3)](*inputs, *outputs, *places(cos, product.shape[1]), *widths, c, **sizes)
    return outputs


def _like(product: Tensor, latent_product: Tensor, k_rope: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Room for the lanes of queries, keys and values."""
    lanes = _lanes(heads, (product.shape[-1], latent_product.shape[-1]), k_rope.shape[-1])
    q, k, v = (product.new_empty(*product.shape[:2], heads, lanes) for _ in range(3))
    return q, k, v


@latent_lanes.register_fake
def _(
    product, bias, t, time_weight, latent_product, latent_bias, latent_t, latent_time_weight, k_rope,
    cos, sin, scale, heads, c,
):  # fmt: skip
    return _like(product, latent_product, k_rope, heads)


@operator
def latent_lanes_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    bias: Tensor,
    t: Tensor,
    time_weight: Tensor,
    latent_bias: Tensor,
    latent_t: Tensor,
    latent_time_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    scale: Tensor,
    rope: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    whole = q, k, v, dq, dk, dv, t, latent_t, cos, sin
    q, k, v, dq, dk, dv, t, latent_t, cos, sin = (tensor.contiguous() for tensor in whole)
    widths, rows = (bias.shape[0], latent_bias.shape[0]), t.numel()
    share = programs(q, rows)
    dp, dlatent_p, drope = (q.new_empty(*q.shape[:2], width) for width in (*widths, rope))
    db, dw, dlatent_b, dlatent_w = (t.new_empty(share, width) for width in widths for _ in range(2))
    dt, dscale = t.new_empty(3, rows), t.new_empty(rows)
    inputs = q, k, v, dq, dk, dv, t, time_weight, latent_t, latent_time_weight, cos, sin, scale
    outputs = dp, db, dw, dlatent_p, dlatent_b, dlatent_w, drope, dt, dscale
    sizes = _sizes(cos, q.shape[2], widths, rope)
    wrap_triton(_backward)[(share, 3)](*inputs, *outputs, rows, *places(cos, q.shape[1]), *widths, **sizes)
    summed = [
        part.sum(dim=0).to(like.dtype).reshape(like.shape)
        for part, like in ((db, bias), (dw, time_weight), (dlatent_b, latent_bias), (dlatent_w, latent_time_weight))
    ]
    return (
        *(dp, summed[0], dt[0].view_as(t).clone(), summed[1]),
        *(dlatent_p, summed[2], (dt[1] + dt[2]).view_as(latent_t), summed[3]),
        *(drope, dscale.sum().to(scale.dtype).reshape(scale.shape)),
    )


@latent_lanes_backward.register_fake
def _(q, k, v, dq, dk, dv, bias, t, time_weight, latent_bias, latent_t, latent_time_weight, cos, sin, scale, rope):
    dp, dlatent_p, drope = (q.new_empty(*q.shape[:2], width) for width in (bias.shape[0], latent_bias.shape[0], rope))
    small = bias, t.contiguous(), time_weight, latent_bias, latent_t.contiguous(), latent_time_weight, scale
    db, dt, dw, dlatent_b, dlatent_t, dlatent_w, dscale = (torch.empty_like(x) for x in small)
    return dp, db, dt, dw, dlatent_p, dlatent_b, dlatent_t, dlatent_w, drope, dscale


def _setup(ctx, inputs, output) -> None:
    _, bias, t, time_weight, _, latent_bias, latent_t, latent_time_weight, k_rope, cos, sin, scale, _, _ = inputs
    ctx.rope = k_rope.shape[-1]
    small = bias, t, time_weight, latent_bias, latent_t, latent_time_weight
    ctx.save_for_backward(*output, *small, cos, sin, scale)


def _gradient(ctx, dq, dk, dv):
    q, k, v, *rest = ctx.saved_tensors
    *grads, dscale = torch.ops.leafward.latent_lanes_backward(q, k, v, dq, dk, dv, *rest, ctx.rope)
    return *grads, None, None, dscale, None, None


latent_lanes.register_autograd(_gradient, setup_context=_setup)
