"""The window level of the cluster mixer: the windows of an image and its global centres, one head per program.

    A = softmax_m(−a asinh √S_nm + b_nm),   S = sinh²((ρ_n − ρ_m)/2) + sinh ρ_n sinh ρ_m sin²(θ_nm/2),   ρ = r|f|,

is −α times the Lorentz distance by `leafward.geometry.pairs.tangent_distances`, for a = 2α/√c and
r = √c s; without r it is a cos θ. Here 4 sin²(θ/2) is the sum of squared differences of unit vectors, channel by
channel, which does not cancel and so needs no float64. Aggregate and dispatch are those of the patch level.

Back: ∂cos θ/∂f_n = (y − cos θ x)/|f_n| with x, y the unit vectors.
"""

# The kernels are written in Triton's language, which only looks like Python.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from leafward.geometry.scalars import largest, tiny
from leafward.nn.kernels.launch import programs, wrap_triton
from leafward.systems.hcformer.kernels.common import (
    SQUARE_FLOOR,
    exchange_back,
    gathered,
    product,
    rows_of,
    shares,
    tile_sizes,
    write_rows,
)

_FARTHEST = tl.constexpr(math.asinh(largest(torch.float32)))
_TINY = tl.constexpr(tiny(torch.float32))
_ROUNDING = tl.constexpr(torch.finfo(torch.float32).eps ** 2)


@triton.jit
def _sinh(x):
    """Exact to rounding near zero, where the difference of exponentials cancels."""
    s = x * x
    series = x * (1.0 + s / 6.0 * (1.0 + s / 20.0 * (1.0 + s / 42.0 * (1.0 + s / 72.0))))
    return tl.where(s < 1.0, series, 0.5 * (tl.exp(x) - tl.exp(-x)))


@triton.jit
def _cosh(x):
    return 0.5 * (tl.exp(x) + tl.exp(-x))


@triton.jit
def _asinh(z):
    """By the logarithm, which is exact to rounding of 1 only, and a step of Newton's for small z."""
    time = tl.sqrt(1.0 + z * z)
    rough = tl.log(z + time)
    return rough - (_sinh(rough) - z) / time


@triton.jit
def _length(rows, LORENTZ: tl.constexpr):
    """Lengths and their inverses; a zero vector has none."""
    square = tl.sum(rows * rows, axis=1)
    if LORENTZ:
        length = tl.sqrt(square)
        return length, tl.where(length > _TINY, 1.0 / tl.maximum(length, _TINY), 0.0)
    return square, tl.rsqrt(square + SQUARE_FLOOR)


@triton.jit
def _angles(
    e_ptr, start, to, exists, real, inverse, centre_inverse,
    D: tl.constexpr, LORENTZ: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """cos θ, and sin²(θ/2) where that is wanted, of all pairs."""
    total = tl.zeros((TALL, WIDE), tl.float32)
    for channel in range(D):
        x = tl.load(e_ptr + start + channel, mask=exists, other=0.0).to(tl.float32) * inverse
        y = tl.load(e_ptr + to + channel, mask=real, other=0.0).to(tl.float32) * centre_inverse
        if LORENTZ:
            difference = x[:, None] - y[None, :]
            total += difference * difference
        else:
            total += x[:, None] * y[None, :]
    if LORENTZ:
        # Less than the rounding of unit vectors is one direction, as for the plain form: a multiplication fused with
        # the difference leaves that much of equal vectors.
        total = tl.where(total > _ROUNDING, total, 0.0)
        return 1.0 - 0.5 * total, 0.25 * total
    return total, total


@triton.jit
def _places(
    image, head, G, K: tl.constexpr, ROW: tl.constexpr, D: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr
):
    """Where the features of an image's windows and centres start, and which there are."""
    window, centre = tl.arange(0, TALL), tl.arange(0, WIDE)
    base = tl.cast(image, tl.int64) * (G + K * K) * ROW + head * D
    return base + window * ROW, base + (G + centre) * ROW, window < G, centre < K * K


@triton.jit
def _bias_places(head, down, across, K: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr):
    """Of windows and centres in a table (h, K, down, K, across)."""
    window, centre = tl.arange(0, TALL)[:, None], tl.arange(0, WIDE)[None, :]
    return (((head * K + centre // K) * down + window // across) * K + centre % K) * across + window % across


@triton.jit
def _radii(reach, length, centre_length):
    return tl.minimum(reach * length, _FARTHEST)[:, None], tl.minimum(reach * centre_length, _FARTHEST)[None, :]


@triton.jit
def _square(rho, sigma, lateral):
    """S of all pairs: sinh² of half the distance."""
    half = _sinh(0.5 * (rho - sigma))
    return half * half + _sinh(rho) * _sinh(sigma) * lateral


@triton.jit
def _distance_back(dsimilar, square, rho, sigma, lateral):
    """Gradients of −asinh √S in the radii ρ and σ and in cos θ."""
    steep = tl.sqrt(square) * tl.sqrt(1.0 + square)  # apart, because the square of the square may overflow
    # Equal points: the root has gradient zero there.
    dsquare = tl.where(square > 0.0, -0.5 * dsimilar / tl.where(steep > 0.0, steep, 1.0), 0.0)
    across_both, apart = _sinh(rho) * _sinh(sigma), 0.5 * _sinh(rho - sigma)
    drho = tl.sum(dsquare * (apart + _cosh(rho) * _sinh(sigma) * lateral), axis=1)
    dsigma = tl.sum(dsquare * (_sinh(rho) * _cosh(sigma) * lateral - apart), axis=0)
    return drho, dsigma, -0.5 * dsquare * across_both  # sin²(θ/2) is (1 − cos θ)/2


@triton.jit
def _forward(
    e_ptr, sharpness_ptr, reach_ptr, bias_ptr, out_ptr, down, across,
    K: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, LORENTZ: tl.constexpr,
    TALL: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    head, image = tl.program_id(0) % HEADS, tl.program_id(0) // HEADS
    dtype = e_ptr.dtype.element_ty
    windows = down * across
    start, to, exists, real = _places(image, head, windows, K, 2 * HEADS * D, D, TALL, WIDE)
    length, inverse = _length(rows_of(e_ptr, start, exists, D, DEEP).to(tl.float32), LORENTZ)
    centre_length, centre_inverse = _length(rows_of(e_ptr, to, real, D, DEEP).to(tl.float32), LORENTZ)
    similar, lateral = _angles(e_ptr, start, to, exists, real, inverse, centre_inverse, D, LORENTZ, TALL, WIDE)
    if LORENTZ:
        rho, sigma = _radii(tl.load(reach_ptr + head).to(tl.float32), length, centre_length)
        similar = -_asinh(tl.sqrt(_square(rho, sigma, lateral)))
    together = exists[:, None] & real[None, :]
    at = _bias_places(head, down, across, K, TALL, WIDE)
    logits = tl.load(sharpness_ptr + head).to(tl.float32) * similar
    a = shares(logits + tl.load(bias_ptr + at, mask=together, other=0.0).to(tl.float32), together)
    v = rows_of(e_ptr, start + HEADS * D, exists, D, DEEP)
    middle, _ = gathered(a, v, rows_of(e_ptr, to + HEADS * D, real, D, DEEP).to(tl.float32), dtype)
    place = (tl.cast(image, tl.int64) * windows + tl.arange(0, TALL)) * (HEADS * D) + head * D
    write_rows(out_ptr, place, exists, product(a, middle, dtype), D, DEEP)


@triton.jit
def _backward(
    e_ptr, sharpness_ptr, reach_ptr, bias_ptr, dout_ptr, de_ptr, dsharpness_ptr, dreach_ptr, dbias_ptr,
    images, share, down, across,
    K: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, LORENTZ: tl.constexpr,
    TALL: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """Over images; the gradients of a, r and b are this program's parts of the sums."""
    head, first = tl.program_id(0) % HEADS, tl.program_id(0) // HEADS
    dtype = e_ptr.dtype.element_ty
    windows = down * across
    sharpness = tl.load(sharpness_ptr + head).to(tl.float32)
    at = _bias_places(head, down, across, K, TALL, WIDE)
    dsharpness, dreach = tl.zeros((TALL,), tl.float32), tl.zeros((TALL,), tl.float32)
    dreach_centre, dbias = tl.zeros((WIDE,), tl.float32), tl.zeros((TALL, WIDE), tl.float32)
    for image in range(first, images, share):
        start, to, exists, real = _places(image, head, windows, K, 2 * HEADS * D, D, TALL, WIDE)
        together = exists[:, None] & real[None, :]
        f = rows_of(e_ptr, start, exists, D, DEEP).to(tl.float32)
        centre = rows_of(e_ptr, to, real, D, DEEP).to(tl.float32)
        length, inverse = _length(f, LORENTZ)
        centre_length, centre_inverse = _length(centre, LORENTZ)
        cosine, lateral = _angles(e_ptr, start, to, exists, real, inverse, centre_inverse, D, LORENTZ, TALL, WIDE)
        similar = cosine
        if LORENTZ:
            reach = tl.load(reach_ptr + head).to(tl.float32)
            rho, sigma = _radii(reach, length, centre_length)
            square = _square(rho, sigma, lateral)
            similar = -_asinh(tl.sqrt(square))
        bias = tl.load(bias_ptr + at, mask=together, other=0.0).to(tl.float32)
        a = shares(sharpness * similar + bias, together)
        v = rows_of(e_ptr, start + HEADS * D, exists, D, DEEP)
        middle, total = gathered(a, v, rows_of(e_ptr, to + HEADS * D, real, D, DEEP).to(tl.float32), dtype)
        place = (tl.cast(image, tl.int64) * windows + tl.arange(0, TALL)) * (HEADS * D) + head * D
        dout = rows_of(dout_ptr, place, exists, D, DEEP).to(tl.float32)
        dlogits, dv, dcentres = exchange_back(a, v, middle, total, dout, dtype)
        write_rows(de_ptr, start + HEADS * D, exists, dv, D, DEEP)
        write_rows(de_ptr, to + HEADS * D, real, dcentres, D, DEEP)
        dbias += dlogits
        dsharpness += tl.sum(dlogits * similar, axis=1)
        dsimilar = sharpness * dlogits
        dlength, dcentre_length = tl.zeros((TALL,), tl.float32), tl.zeros((WIDE,), tl.float32)
        if LORENTZ:
            drho, dsigma, dsimilar = _distance_back(dsimilar, square, rho, sigma, lateral)
            drho = tl.where(reach * length < _FARTHEST, drho, 0.0)
            dsigma = tl.where(reach * centre_length < _FARTHEST, dsigma, 0.0)
            dreach += drho * length
            dreach_centre += dsigma * centre_length
            dlength, dcentre_length = reach * drho, reach * dsigma
        x, y = f * inverse[:, None], centre * centre_inverse[:, None]
        pull = dsimilar * cosine
        dx = (product(dsimilar, y, tl.float32) - x * tl.sum(pull, axis=1)[:, None]) * inverse[:, None]
        dy = (product(tl.trans(dsimilar), x, tl.float32) - y * tl.sum(pull, axis=0)[:, None]) * centre_inverse[:, None]
        write_rows(de_ptr, start, exists, dx + x * dlength[:, None], D, DEEP)
        write_rows(de_ptr, to, real, dy + y * dcentre_length[:, None], D, DEEP)
    part = first * (HEADS * K * K) * windows
    together = (tl.arange(0, TALL) < windows)[:, None] & (tl.arange(0, WIDE) < K * K)[None, :]
    tl.store(dbias_ptr + part + at, dbias, mask=together)
    tl.store(dsharpness_ptr + tl.program_id(0), tl.sum(dsharpness, axis=0))
    tl.store(dreach_ptr + tl.program_id(0), tl.sum(dreach, axis=0) + tl.sum(dreach_centre, axis=0))


def _sizes(e: Tensor, bias: Tensor, lorentz: bool) -> tuple[dict[str, int | bool], dict[str, int]]:
    """Sizes that a kernel is made for, and those that it is given."""
    heads, k, down, _, across = bias.shape
    d = e.shape[-1] // (2 * heads)
    fixed = {"K": k, "HEADS": heads, "D": d, "LORENTZ": lorentz} | tile_sizes(down * across, k * k, d)
    return fixed, {"down": down, "across": across}


def windows_forward(e: Tensor, sharpness: Tensor, reach: Tensor | None, bias: Tensor) -> Tensor:
    """(B, G + K, 2hd), (h,), (h,), (h, k, n, k, m) -> (B, G, hd)."""
    fixed, given = _sizes(e, bias, reach is not None)
    out = e.new_empty(e.shape[0], given["down"] * given["across"], e.shape[-1] // 2)
    grid = (e.shape[0] * fixed["HEADS"],)
    wrap_triton(_forward)[grid](e, sharpness, sharpness if reach is None else reach, bias, out, **given, **fixed)
    return out


def windows_backward(
    e: Tensor, sharpness: Tensor, reach: Tensor | None, bias: Tensor, dout: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the embedding, of a and r (zero where there is no r) and of the bias."""
    fixed, given = _sizes(e, bias, reach is not None)
    images, heads = e.shape[0], fixed["HEADS"]
    share = min(images, triton.cdiv(programs(e, images * heads), heads))
    de = torch.empty_like(e)
    dsharpness, dreach = (sharpness.new_empty(share, heads, dtype=torch.float32) for _ in range(2))
    dbias = bias.new_empty(share, *bias.shape, dtype=torch.float32)
    radius = sharpness if reach is None else reach
    wrap_triton(_backward)[(share * heads,)](
        e, sharpness, radius, bias, dout, de, dsharpness, dreach, dbias, images, share, **given, **fixed
    )
    dsharpness, dreach = (part.sum(dim=0).to(sharpness.dtype) for part in (dsharpness, dreach))
    return de, dsharpness, dreach, dbias.sum(dim=0).to(bias.dtype)
