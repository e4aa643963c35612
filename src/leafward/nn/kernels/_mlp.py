"""x + keep γ (W₂ GELU(W₁ norm(x) + b₁) + b₂) for narrow x, in one pass over x, and back without the hidden layer.

A program holds a few rows of x and goes through the hidden units in chunks: the units of a chunk live in registers
only. Back, with g = keep ∂z, u the units before GELU Φ(u)u and v = Φ(u)u:

    ∂u = (γ g W₂)(Φ(u) + u φ(u));   ∂norm(x) = ∂u W₁;   ∂W₁ = ∂uᵀ norm(x);   S = vᵀ g;   s = Σ g;
    ∂W₂ = γ Sᵀ,   ∂b₂ = γ s,   ∂γ = rows of Sᵀ · W₂ + b₂ s.

Units are worked out again, once by rows (for x) and once by chunks (for the weights): they cost less to compute than to
keep, being many times as wide as x.
"""

# The kernels are written in Triton's language, which only looks like Python.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportIndexIssue=false

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from leafward.nn.kernels._image_norm import norm_backward
from leafward.nn.kernels._launch import operator, programs, wrap_triton

_ROWS = 64
_SHORT_ROWS = 32  # where two accumulators stay in registers
_CHUNK = 64


@triton.jit
def _tile(index, rows, places, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Where the rows of a tile lie, which of them there are, and their images.

    Not in one function with what is read there: the compiler takes all that an address comes with for written to.
    """
    row = index * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    # The start by itself, so that the many offsets from it fit 32 bits.
    offset = tl.arange(0, ROWS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    return tl.cast(index, tl.int64) * ROWS * WIDTH + offset, inside[:, None], tl.where(inside, row // places, 0)


@triton.jit
def _load_rows(x_ptr, moments_ptr, norm_w_ptr, norm_b_ptr, at, inside, image, WIDTH: tl.constexpr):
    """A tile of x and its norm."""
    lane = tl.arange(0, WIDTH)
    mean, rate = tl.load(moments_ptr + image * 2), tl.load(moments_ptr + image * 2 + 1)
    w, b = tl.load(norm_w_ptr + lane).to(tl.float32), tl.load(norm_b_ptr + lane).to(tl.float32)
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    return x, (x - mean[:, None]) * rate[:, None] * w[None, :] + b[None, :]


@triton.jit
def _load_gradient(dz_ptr, keep_ptr, image, at, inside, KEEP: tl.constexpr):
    """g of a tile."""
    g = tl.load(dz_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if KEEP:
        g *= tl.load(keep_ptr + image).to(tl.float32)[:, None]
    return g


@triton.jit
def _normal_below(u):
    """Φ(u), the share of a standard normal variable below u; GELU is u Φ(u)."""
    return 0.5 + 0.5 * tl.erf(u * 0.7071067811865476)


@triton.jit
def _gelu_back(u, dv):
    """v and ∂u."""
    below = _normal_below(u)
    return u * below, dv * (below + u * 0.3989422804014327 * tl.exp(-0.5 * u * u))


@triton.jit
def _forward(
    x_ptr, moments_ptr, norm_w_ptr, norm_b_ptr, w1_ptr, b1_ptr, w2_ptr, b2_ptr, gamma_ptr, keep_ptr, z_ptr,
    rows, places, KEEP: tl.constexpr, WIDTH: tl.constexpr, HIDDEN: tl.constexpr, ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    half = w1_ptr.dtype.element_ty
    lane = tl.arange(0, WIDTH)
    at, inside, image = _tile(tl.program_id(0), rows, places, WIDTH, ROWS)
    x, normed = _load_rows(x_ptr, moments_ptr, norm_w_ptr, norm_b_ptr, at, inside, image, WIDTH)
    normed = normed.to(half)
    y = tl.zeros((ROWS, WIDTH), tl.float32)
    for start in range(0, HIDDEN, CHUNK):
        unit = start + tl.arange(0, CHUNK)
        w1 = tl.load(w1_ptr + unit[None, :] * WIDTH + lane[:, None])
        u = tl.dot(normed, w1, input_precision="ieee") + tl.load(b1_ptr + unit).to(tl.float32)[None, :]
        v = u * _normal_below(u)
        w2 = tl.load(w2_ptr + lane[None, :] * HIDDEN + unit[:, None])
        y = tl.dot(v.to(half), w2, y, input_precision="ieee")
    scale = tl.load(gamma_ptr + lane).to(tl.float32)[None, :]
    y = scale * (y + tl.load(b2_ptr + lane).to(tl.float32)[None, :])
    if KEEP:
        y *= tl.load(keep_ptr + image).to(tl.float32)[:, None]
    tl.store(z_ptr + at, (x + y).to(z_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward_rows(
    x_ptr, moments_ptr, norm_w_ptr, norm_b_ptr, w1_ptr, b1_ptr, w2_ptr, gamma_ptr, keep_ptr, dz_ptr, dnormed_ptr,
    rows, places, KEEP: tl.constexpr, WIDTH: tl.constexpr, HIDDEN: tl.constexpr, ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    half = w1_ptr.dtype.element_ty
    lane = tl.arange(0, WIDTH)
    at, inside, image = _tile(tl.program_id(0), rows, places, WIDTH, ROWS)
    _x, normed = _load_rows(x_ptr, moments_ptr, norm_w_ptr, norm_b_ptr, at, inside, image, WIDTH)
    normed = normed.to(half)
    g = _load_gradient(dz_ptr, keep_ptr, image, at, inside, KEEP)
    g = (g * tl.load(gamma_ptr + lane).to(tl.float32)[None, :]).to(half)
    dnormed = tl.zeros((ROWS, WIDTH), tl.float32)
    for start in range(0, HIDDEN, CHUNK):
        unit = start + tl.arange(0, CHUNK)
        w1 = tl.load(w1_ptr + unit[:, None] * WIDTH + lane[None, :])
        w2 = tl.load(w2_ptr + lane[:, None] * HIDDEN + unit[None, :])
        u = tl.dot(normed, tl.trans(w1), input_precision="ieee") + tl.load(b1_ptr + unit).to(tl.float32)[None, :]
        _v, du = _gelu_back(u, tl.dot(g, w2, input_precision="ieee"))
        dnormed = tl.dot(du.to(half), w1, dnormed, input_precision="ieee")
    tl.store(dnormed_ptr + at, dnormed.to(dnormed_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward_chunk(
    x_ptr, moments_ptr, norm_w_ptr, norm_b_ptr, w1_ptr, b1_ptr, w2_ptr, gamma_ptr, keep_ptr, dz_ptr,
    dw1_ptr, db1_ptr, s_ptr, total_ptr,
    rows, places, KEEP: tl.constexpr, WIDTH: tl.constexpr, HIDDEN: tl.constexpr, ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Units stand in rows here: so they go into the products over places as they come out of those over channels."""
    half = w1_ptr.dtype.element_ty
    lane = tl.arange(0, WIDTH)
    unit = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    w1 = tl.load(w1_ptr + unit[:, None] * WIDTH + lane[None, :])
    w2 = tl.load(w2_ptr + lane[None, :] * HIDDEN + unit[:, None])
    b1 = tl.load(b1_ptr + unit).to(tl.float32)
    gamma = tl.load(gamma_ptr + lane).to(tl.float32)
    dw1, s = tl.zeros((CHUNK, WIDTH), tl.float32), tl.zeros((CHUNK, WIDTH), tl.float32)
    db1, total = tl.zeros((CHUNK,), tl.float32), tl.zeros((WIDTH,), tl.float32)
    for index in range(tl.program_id(1), tl.cdiv(rows, ROWS), tl.num_programs(1)):
        at, inside, image = _tile(index, rows, places, WIDTH, ROWS)
        _x, normed = _load_rows(x_ptr, moments_ptr, norm_w_ptr, norm_b_ptr, at, inside, image, WIDTH)
        normed = normed.to(half)
        g = _load_gradient(dz_ptr, keep_ptr, image, at, inside, KEEP)
        u = tl.dot(w1, tl.trans(normed), input_precision="ieee") + b1[:, None]
        v, du = _gelu_back(u, tl.dot(w2, tl.trans((g * gamma[None, :]).to(half)), input_precision="ieee"))
        db1 += tl.sum(du, axis=1)
        total += tl.sum(g, axis=0)
        dw1 = tl.dot(du.to(half), normed, dw1, input_precision="ieee")
        s = tl.dot(v.to(half), g.to(half), s, input_precision="ieee")
    share = tl.program_id(1)
    to = (share * HIDDEN + unit)[:, None] * WIDTH + lane[None, :]
    tl.store(dw1_ptr + to, dw1)
    tl.store(s_ptr + to, s)
    tl.store(db1_ptr + share * HIDDEN + unit, db1)
    if tl.program_id(0) == 0:
        tl.store(total_ptr + share * WIDTH + lane, total)


@operator
def normed_mlp(
    x: Tensor,
    moments: Tensor,
    norm_w: Tensor,
    norm_b: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    gamma: Tensor,
    keep: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    x, w1, w2 = x.contiguous(), w1.to(dtype).contiguous(), w2.to(dtype).contiguous()
    z = torch.empty_like(x, dtype=torch.promote_types(x.dtype, gamma.dtype))
    rows, given = _given(x, w1, keep)
    tensors = x, moments, norm_w, norm_b, w1, b1, w2, b2, gamma, gamma if keep is None else keep, z
    wrap_triton(_forward)[(triton.cdiv(rows, _ROWS),)](*tensors, ROWS=_ROWS, **given)
    return z


def _given(x: Tensor, w1: Tensor, keep: Tensor | None) -> tuple[int, dict[str, int | bool]]:
    """Rows of x, and what all three kernels are given beside tensors."""
    width, places = x.shape[-1], math.prod(x.shape[1:-1])
    rows = len(x) * places
    sizes = {"WIDTH": width, "HIDDEN": len(w1), "CHUNK": _CHUNK, "num_warps": 4 if width < 128 else 8}
    return rows, {"rows": rows, "places": places, "KEEP": keep is not None} | sizes


@normed_mlp.register_fake
def _(x, moments, norm_w, norm_b, w1, b1, w2, b2, gamma, keep, dtype):
    return x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, gamma.dtype))


@operator
def normed_mlp_backward(
    x: Tensor,
    moments: Tensor,
    norm_w: Tensor,
    norm_b: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    gamma: Tensor,
    keep: Tensor | None,
    dtype: torch.dtype,
    dz: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    x, dz = x.contiguous(), dz.contiguous()
    first, second = w1.to(dtype).contiguous(), w2.to(dtype).contiguous()
    rows, given = _given(x, w1, keep)
    chunks = len(w1) // _CHUNK
    tensors = x, moments, norm_w, norm_b, first, b1, second, gamma, gamma if keep is None else keep, dz
    dnormed = torch.empty_like(x, dtype=dtype)
    wrap_triton(_backward_rows)[(triton.cdiv(rows, _ROWS),)](*tensors, dnormed, ROWS=_ROWS, **given)
    shares = max(1, programs(x, triton.cdiv(rows, _SHORT_ROWS)) // (2 * chunks))
    dw1, s = (x.new_empty(shares, *w1.shape, dtype=torch.float32) for _ in range(2))
    db1, total = (x.new_empty(shares, size, dtype=torch.float32) for size in w1.shape)
    wrap_triton(_backward_chunk)[(chunks, shares)](
        *tensors, dw1, db1, s, total, ROWS=_SHORT_ROWS, num_stages=2, **given
    )
    dx, dnorm_w, dnorm_b = norm_backward(x, moments, norm_w, dnormed, dz)
    dw1, db1, s, total = (part.sum(dim=0) for part in (dw1, db1, s.mT, total))
    dgamma = torch.linalg.vecdot(s, w2.float()) + b2 * total
    wide = gamma.float()
    grads = dnorm_w, dnorm_b, dw1, db1, wide[:, None] * s, wide * total, dgamma
    kinds = norm_w, norm_b, w1, b1, w2, b2, gamma
    of = [grad.to(kind.dtype).contiguous() for grad, kind in zip(grads, kinds, strict=True)]
    return dx, of[0], of[1], of[2], of[3], of[4], of[5], of[6]


@normed_mlp_backward.register_fake
def _(x, moments, norm_w, norm_b, w1, b1, w2, b2, gamma, keep, dtype, dz):
    return x.new_empty(x.shape), *(p.new_empty(p.shape) for p in (norm_w, norm_b, w1, b1, w2, b2, gamma))


def _setup(ctx, inputs, output) -> None:
    *tensors, ctx.dtype = inputs
    ctx.save_for_backward(*tensors)


def _gradient(ctx, dz):
    dx, *grads = torch.ops.leafward.normed_mlp_backward(*ctx.saved_tensors, ctx.dtype, dz)
    return dx, None, *grads, None, None


normed_mlp.register_autograd(_gradient, setup_context=_setup)
