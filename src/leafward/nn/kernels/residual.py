"""Residual, RMSNorm and time in one pass over x and y, and one pass back.

Row by row, with a = x + w y as points of the ambient space and C = −c⟨x,y⟩_L:

    q = −c⟨a,a⟩_L = 1 + w² + 2wC,   z = scale·a/√q,   h = g·z/√(mean z² + eps),   t = √(1/c + |h|²).

Back, with G the whole gradient of z: ∂q = −½ (G·z)/q, ∂x = scale·G/√q + 2w ∂q c(x t_y/t_x − y), and y likewise.
Nothing but x and y is kept for it; the rest is worked out again, which costs no memory traffic.
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
def _hyperbolic_cosine(x, y, xx, yy, c):
    """√c t_x, √c t_y and C of two rows with the squares |x|² and |y|²: a sum of positive numbers, as in
    `leafward.nn.residual.weighted_sum`."""
    r, u = tl.maximum(tl.sqrt(xx), 1e-18), tl.maximum(tl.sqrt(yy), 1e-18)
    balance = tl.sqrt(u) / tl.sqrt(r)
    across = balance * x - y / balance
    big_x, big_y = tl.sqrt(1.0 + c * r * r), tl.sqrt(1.0 + c * u * u)
    level = (1.0 + c * r * r + c * u * u) / (big_x * big_y + c * r * u)
    return big_x, big_y, level + 0.5 * c * tl.sum(across * across, axis=0)


@triton.jit
def _forward(
    x_ptr, y_ptr, log_weight_ptr, gain_ptr, z_ptr, h_ptr, t_ptr, scale, eps, c, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    scale, eps, c = single(scale), single(eps), single(c)
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    inside = lane < WIDTH
    at = row * WIDTH + lane
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + at, mask=inside, other=0.0).to(tl.float32)
    gain = tl.load(gain_ptr + lane, mask=inside, other=0.0).to(tl.float32)
    weight = tl.exp(tl.load(log_weight_ptr).to(tl.float32))
    _, _, cosh = _hyperbolic_cosine(x, y, tl.sum(x * x, axis=0), tl.sum(y * y, axis=0), c)
    z = scale / tl.sqrt(1.0 + weight * weight + 2.0 * weight * cosh) * (x + weight * y)
    z = z.to(z_ptr.dtype.element_ty)
    tl.store(z_ptr + at, z, mask=inside)
    z = z.to(tl.float32)
    h = gain * z / tl.sqrt(tl.sum(z * z, axis=0) / WIDTH + eps)
    tl.store(h_ptr + at, h.to(h_ptr.dtype.element_ty), mask=inside)
    tl.store(t_ptr + row, tl.sqrt(1.0 / c + tl.sum(h * h, axis=0)))


@triton.jit
def _add(a, b, d, e, f, g, h, i, j, k, a2, b2, d2, e2, f2, g2, h2, i2, j2, k2):
    return a + a2, b + b2, d + d2, e + e2, f + f2, g + g2, h + h2, i + i2, j + j2, k + k2


@triton.jit
def _backward(
    x_ptr, y_ptr, log_weight_ptr, gain_ptr, dz_ptr, dh_ptr, dt_ptr, dx_ptr, dy_ptr, dlog_weight_ptr, dgain_ptr,
    rows, scale, eps, c, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    scale, eps, c = single(scale), single(eps), single(c)
    program = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    inside = lane < WIDTH
    gain = tl.load(gain_ptr + lane, mask=inside, other=0.0).to(tl.float32)
    weight = tl.exp(tl.load(log_weight_ptr).to(tl.float32))
    dgain = tl.zeros((BLOCK,), tl.float32)
    for index in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.cast(index, tl.int64)
        at = row * WIDTH + lane
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + at, mask=inside, other=0.0).to(tl.float32)
        dz = tl.load(dz_ptr + at, mask=inside, other=0.0).to(tl.float32)
        dh = tl.load(dh_ptr + at, mask=inside, other=0.0).to(tl.float32)
        dt = tl.load(dt_ptr + row).to(tl.float32)
        a = x + weight * y
        ga = gain * a
        e = gain * dh
        # Every sum that follows is linear in these ten, so the row's threads meet twice and not eight times.
        xx, yy, aa, ay, gaga, gagy, ea, ey, za, zy = tl.reduce(
            (x * x, y * y, a * a, a * y, ga * ga, ga * gain * y, e * a, e * y, dz * a, dz * y), 0, _add
        )
        big_x, big_y, cosh = _hyperbolic_cosine(x, y, xx, yy, c)
        squared = 1.0 + weight * weight + 2.0 * weight * cosh
        shrink = scale / tl.sqrt(squared)
        rate = 1.0 / tl.sqrt(shrink * shrink * aa / WIDTH + eps)
        unit = shrink * rate  # times a: the row of mean square one
        pull = dt / tl.sqrt(1.0 / c + unit * unit * gaga) * unit  # times ga: what the time adds to dh
        radial = (ea + pull * gaga) * unit / WIDTH
        dgain += (dh + pull * ga) * (unit * a)
        dz += rate * (e + pull * gain * ga - (radial * unit) * a)
        dz_a = za + rate * (ea + pull * gaga - radial * unit * aa)
        dz_y = zy + rate * (ey + pull * gagy - radial * unit * ay)
        dsquared = -0.5 * shrink / squared * dz_a
        turn = 2.0 * weight * dsquared * c
        dx = shrink * dz + turn * (x * (big_y / big_x) - y)
        dy = weight * shrink * dz + turn * (y * (big_x / big_y) - x)
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        tl.store(dy_ptr + at, dy.to(dy_ptr.dtype.element_ty), mask=inside)
        tl.store(dlog_weight_ptr + row, weight * (shrink * dz_y + 2.0 * dsquared * (weight + cosh)))
    tl.store(dgain_ptr + program * WIDTH + lane, dgain, mask=inside)


@operator
def residual_norm(
    x: Tensor, y: Tensor, log_weight: Tensor, gain: Tensor, scale: float, eps: float, c: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    x, y = x.contiguous(), y.contiguous()
    z, h, t = _like(x, dtype)
    (block,), warps = tile(x.shape[-1])
    sizes = {"WIDTH": x.shape[-1], "BLOCK": block, "num_warps": warps}
    wrap_triton(_forward)[(t.numel(),)](x, y, log_weight, gain, z, h, t, scale, eps, c, **sizes)
    return z, h, t


def _like(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Room for z, h and t."""
    t = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    return torch.empty_like(x), torch.empty_like(x, dtype=dtype), t


@residual_norm.register_fake
def _(x, y, log_weight, gain, scale, eps, c, dtype):
    return _like(x.contiguous(), dtype)


@operator
def residual_norm_backward(
    x: Tensor,
    y: Tensor,
    log_weight: Tensor,
    gain: Tensor,
    dz: Tensor,
    dh: Tensor,
    dt: Tensor,
    scale: float,
    eps: float,
    c: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, y, dz, dh, dt = (tensor.contiguous() for tensor in (x, y, dz, dh, dt))
    width, rows = x.shape[-1], dt.numel()
    share = programs(x, rows)
    dx, dy = torch.empty_like(x), torch.empty_like(y)
    dlog_weight, dgain = dt.new_empty(rows), dt.new_empty(share, width)
    (block,), warps = tile(width)
    sizes = {"WIDTH": width, "BLOCK": block, "num_warps": warps}
    wrap_triton(_backward)[(share,)](
        x, y, log_weight, gain, dz, dh, dt, dx, dy, dlog_weight, dgain, rows, scale, eps, c, **sizes
    )
    return dx, dy, dlog_weight.sum().to(log_weight.dtype).reshape(log_weight.shape), dgain.sum(dim=0).to(gain.dtype)


@residual_norm_backward.register_fake
def _(x, y, log_weight, gain, dz, dh, dt, scale, eps, c):
    parts = x.contiguous(), y.contiguous(), log_weight, gain
    return tuple(torch.empty_like(part) for part in parts)


def _setup(ctx, inputs, output) -> None:
    x, y, log_weight, gain, ctx.scale, ctx.eps, ctx.c, _ = inputs
    ctx.save_for_backward(x, y, log_weight, gain)


def _gradient(ctx, dz, dh, dt):
    grads = torch.ops.leafward.residual_norm_backward(*ctx.saved_tensors, dz, dh, dt, ctx.scale, ctx.eps, ctx.c)
    return *grads, None, None, None, None


residual_norm.register_autograd(_gradient, setup_context=_setup)
