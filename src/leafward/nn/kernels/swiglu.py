"""SwiGLU of a Lorentz linear map, and the time of the result, in one pass.

(gate, value) = p + b + t w_t with p the bare matrix product, h = silu(gate)·value, t_h = √(1/c + |h|²). On the way
back the gradients of b, t and w_t are sums over numbers that are at hand; apart, they are passes over 2h columns.
"""

# The kernels are written in Triton's language, which only looks like Python.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from leafward.nn.kernels.launch import operator, programs, single, tile, wrap_triton


@triton.jit
def _halves(p_ptr, b_ptr, w_ptr, t, start, lane, mask, HIDDEN: tl.constexpr):
    """Gate and value of one row, and their time columns."""
    w_gate = tl.load(w_ptr + lane, mask=mask, other=0.0).to(tl.float32)
    w_value = tl.load(w_ptr + HIDDEN + lane, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(p_ptr + start + lane, mask=mask, other=0.0).to(tl.float32)
    value = tl.load(p_ptr + start + HIDDEN + lane, mask=mask, other=0.0).to(tl.float32)
    gate += tl.load(b_ptr + lane, mask=mask, other=0.0).to(tl.float32) + t * w_gate
    value += tl.load(b_ptr + HIDDEN + lane, mask=mask, other=0.0).to(tl.float32) + t * w_value
    return gate, value, w_gate, w_value


@triton.jit
def _forward(p_ptr, b_ptr, t_ptr, w_ptr, h_ptr, t_h_ptr, c, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):
    c = single(c)
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    mask = lane < HIDDEN
    t = tl.load(t_ptr + row).to(tl.float32)
    gate, value, _, _ = _halves(p_ptr, b_ptr, w_ptr, t, row * 2 * HIDDEN, lane, mask, HIDDEN)
    h = gate * tl.sigmoid(gate) * value
    tl.store(h_ptr + row * HIDDEN + lane, h.to(h_ptr.dtype.element_ty), mask=mask)
    tl.store(t_h_ptr + row, tl.sqrt(1.0 / c + tl.sum(h * h, axis=0)))


@triton.jit
def _backward(
    p_ptr, b_ptr, t_ptr, w_ptr, dh_ptr, dt_h_ptr, dp_ptr, dt_ptr, db_ptr, dw_ptr, rows, c,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    c = single(c)
    program = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    inside = lane < HIDDEN
    db_gate, db_value = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    dw_gate, dw_value = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for index in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.cast(index, tl.int64)
        start = row * 2 * HIDDEN
        t = tl.load(t_ptr + row).to(tl.float32)
        gate, value, w_gate, w_value = _halves(p_ptr, b_ptr, w_ptr, t, start, lane, inside, HIDDEN)
        dh = tl.load(dh_ptr + row * HIDDEN + lane, mask=inside, other=0.0).to(tl.float32)
        dt_h = tl.load(dt_h_ptr + row).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        h = silu * value
        dh += h * (dt_h / tl.sqrt(1.0 / c + tl.sum(h * h, axis=0)))
        dgate = dh * value * (sigmoid + silu * (1.0 - sigmoid))
        dvalue = dh * silu
        tl.store(dp_ptr + start + lane, dgate.to(dp_ptr.dtype.element_ty), mask=inside)
        tl.store(dp_ptr + start + HIDDEN + lane, dvalue.to(dp_ptr.dtype.element_ty), mask=inside)
        tl.store(dt_ptr + row, tl.sum(dgate * w_gate + dvalue * w_value, axis=0))
        db_gate += dgate
        db_value += dvalue
        dw_gate += t * dgate
        dw_value += t * dvalue
    part = program * 2 * HIDDEN
    tl.store(db_ptr + part + lane, db_gate, mask=inside)
    tl.store(db_ptr + part + HIDDEN + lane, db_value, mask=inside)
    tl.store(dw_ptr + part + lane, dw_gate, mask=inside)
    tl.store(dw_ptr + part + HIDDEN + lane, dw_value, mask=inside)


@operator
def swiglu_lift(product: Tensor, bias: Tensor, t: Tensor, time_weight: Tensor, c: float) -> tuple[Tensor, Tensor]:
    product, t = product.contiguous(), t.contiguous()
    h, t_h = _like(product)
    (block,), warps = tile(h.shape[-1])
    sizes = {"HIDDEN": h.shape[-1], "BLOCK": block, "num_warps": warps}
    wrap_triton(_forward)[(t.numel(),)](product, bias, t, time_weight, h, t_h, c, **sizes)
    return h, t_h


def _like(product: Tensor) -> tuple[Tensor, Tensor]:
    """Room for h and its time."""
    shape = product.shape[:-1]
    return product.new_empty(*shape, product.shape[-1] // 2), product.new_empty(*shape, 1, dtype=torch.float32)


@swiglu_lift.register_fake
def _(product, bias, t, time_weight, c):
    return _like(product)


@operator
def swiglu_lift_backward(
    product: Tensor, bias: Tensor, t: Tensor, time_weight: Tensor, dh: Tensor, dt_h: Tensor, c: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    product, t, dh, dt_h = (tensor.contiguous() for tensor in (product, t, dh, dt_h))
    hidden, rows = dh.shape[-1], t.numel()
    share = programs(product, rows)
    dp, dt = torch.empty_like(product), torch.empty_like(t)
    db, dw = t.new_empty(share, 2 * hidden), t.new_empty(share, 2 * hidden)
    (block,), warps = tile(hidden, share=256)
    sizes = {"HIDDEN": hidden, "BLOCK": block, "num_warps": warps}
    wrap_triton(_backward)[(share,)](product, bias, t, time_weight, dh, dt_h, dp, dt, db, dw, rows, c, **sizes)
    return dp, db.sum(dim=0).to(bias.dtype), dt, dw.sum(dim=0).to(time_weight.dtype).reshape(time_weight.shape)


@swiglu_lift_backward.register_fake
def _(product, bias, t, time_weight, dh, dt_h, c):
    return tuple(torch.empty_like(part) for part in (product.contiguous(), bias, t.contiguous(), time_weight))


def _setup(ctx, inputs, output) -> None:
    *tensors, ctx.c = inputs
    ctx.save_for_backward(*tensors)


def _gradient(ctx, dh, dt_h):
    return *torch.ops.leafward.swiglu_lift_backward(*ctx.saved_tensors, dh, dt_h, ctx.c), None


swiglu_lift.register_autograd(_gradient, setup_context=_setup)
