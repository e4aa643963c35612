"""x + keep γ (W₂ GELU(W₁ norm(x) + b₁) + b₂) for narrow x, in one pass over x, and back without a hidden layer kept.

A program holds a few rows of x and goes through the hidden units in chunks: the units of a chunk live in registers
only. Back, with g = keep ∂z, u the units before GELU Φ(u)u and v = Φ(u)u:

    ∂u = (γ g W₂)(Φ(u) + u φ(u));   ∂norm(x) = ∂u W₁;   ∂W₁ = ∂uᵀ norm(x);   S = vᵀ g;   s = Σ g;
    ∂W₂ = γ Sᵀ,   ∂b₂ = γ s,   ∂γ = rows of Sᵀ · W₂ + b₂ s.

Units are worked out again in the backward pass, being many times as wide as x; there they are written once, for the two
products over all rows, which the libraries do best.
"""

# The kernels are written in Triton's language, which only looks like Python.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportIndexIssue=false

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from leafward.nn.kernels.launch import operator, wrap_triton
from leafward.systems.hcformer.kernels.norm import norm_backward

_ROWS = 64
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
    """Φ(u), the share of a standard normal variable below u; GELU is u Φ(u).

    Instructions bound these kernels, not their products, and the library's erf was two thirds of those of the forward
    pass. So it is a polynomial in w = 2 (u/4.5)² − 1, fitted for the least largest error of u Φ(u), 2e-6;
    |u| > 4.5 counts as 4.5 in it, which errs by 3e-6 |u|: nothing to half precision.
    """
    s = tl.minimum(tl.maximum(u, -4.5), 4.5)
    w = s * s * 0.09876543209876543 - 1.0
    p = -0.00213515117 + w * 0.000674182789
    p = -0.00563994796 + w * (0.00335732977 + w * p)
    p = -0.0187801337 + w * (0.0109786474 + w * p)
    p = -0.0401631742 + w * (0.028415912 + w * p)
    p = -0.0771907003 + w * (0.0546883376 + w * p)
    return 0.5 + s * (0.156905123 + w * p)


@triton.jit
def _gelu_back(u, dv):
    """v and ∂u."""
    below = _normal_below(u)
    density = tl.exp2(u * u * -0.7213475204444817)  # exp(−u²/2), but for 1/√(2π)
    return u * below, dv * (below + (0.3989422804014327 * u) * density)


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
def _backward(
    x_ptr, moments_ptr, norm_w_ptr, norm_b_ptr, w1_ptr, b1_ptr, w2_ptr, gamma_ptr, keep_ptr, dz_ptr,
    dnormed_ptr, normed_ptr, g_ptr, v_ptr, du_ptr, db1_ptr,
    rows, places, KEEP: tl.constexpr, WIDTH: tl.constexpr, HIDDEN: tl.constexpr, ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    half = w1_ptr.dtype.element_ty
    lane = tl.arange(0, WIDTH)
    at, inside, image = _tile(tl.program_id(0), rows, places, WIDTH, ROWS)
    _x, normed = _load_rows(x_ptr, moments_ptr, norm_w_ptr, norm_b_ptr, at, inside, image, WIDTH)
    normed = normed.to(half)
    tl.store(normed_ptr + at, normed, mask=inside)
    g = _load_gradient(dz_ptr, keep_ptr, image, at, inside, KEEP)
    tl.store(g_ptr + at, g.to(half), mask=inside)
    g = (g * tl.load(gamma_ptr + lane).to(tl.float32)[None, :]).to(half)
    dnormed = tl.zeros((ROWS, WIDTH), tl.float32)
    for start in range(0, HIDDEN, CHUNK):
        unit = start + tl.arange(0, CHUNK)
        w1 = tl.load(w1_ptr + unit[:, None] * WIDTH + lane[None, :])
        w2 = tl.load(w2_ptr + lane[:, None] * HIDDEN + unit[None, :])
        u = tl.dot(normed, tl.trans(w1), input_precision="ieee") + tl.load(b1_ptr + unit).to(tl.float32)[None, :]
        v, du = _gelu_back(u, tl.dot(g, w2, input_precision="ieee"))
        to = program * ROWS * HIDDEN + (tl.arange(0, ROWS)[:, None] * HIDDEN + unit[None, :])
        tl.store(v_ptr + to, v.to(half), mask=inside)
        tl.store(du_ptr + to, du.to(half), mask=inside)
        tl.store(db1_ptr + program * HIDDEN + unit, tl.sum(du, axis=0))
        dnormed = tl.dot(du.to(half), w1, dnormed, input_precision="ieee")
    tl.store(dnormed_ptr + at, dnormed.to(dnormed_ptr.dtype.element_ty), mask=inside)


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
    """Rows of x, and what both kernels are given beside tensors."""
    width, places = x.shape[-1], math.prod(x.shape[1:-1])
    rows = len(x) * places
    sizes = {"WIDTH": width, "HIDDEN": len(w1), "CHUNK": _CHUNK, "num_warps": 4}
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
    grid = (triton.cdiv(rows, _ROWS),)
    tensors = x, moments, norm_w, norm_b, first, b1, second, gamma, gamma if keep is None else keep, dz
    dnormed, normed, g = (torch.empty_like(x, dtype=dtype) for _ in range(3))
    v, du = (x.new_empty(rows, len(w1), dtype=dtype) for _ in range(2))
    db1 = x.new_empty(*grid, len(w1), dtype=torch.float32)
    # With less read ahead two programs of the widest fit a multiprocessor, which is a quarter faster.
    ahead = {"num_stages": 2 if given["WIDTH"] > 64 else 3}
    wrap_triton(_backward)[grid](*tensors, dnormed, normed, g, v, du, db1, ROWS=_ROWS, **given, **ahead)
    dx, dnorm_w, dnorm_b = norm_backward(x, moments, norm_w, dnormed, dz)
    normed, g = normed.flatten(0, -2), g.flatten(0, -2)
    dw1, s = (du.mT @ normed), (g.mT @ v).float()
    db1, total = db1.sum(dim=0), g.sum(dim=0, dtype=torch.float32)
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
