"""What the kernels of the cluster mixer share: assignment, aggregate and dispatch in registers, and the backward pass.

Per problem: TALL places for tokens, WIDE for centres, `together` (TALL, WIDE) says which pairs exist. Matrix products
take their factors in the type of the map and add up in float32.
"""

# The kernels are written in Triton's language, which only looks like Python.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

SQUARE_FLOOR = tl.constexpr(1e-12)  # as in leafward.systems.hcformer.mixer
_LEAST = 16  # of each side of a matrix product


def tile_sizes(tokens: int, centres: int, channels: int) -> dict[str, int]:
    """Powers of two that hold a problem, and the warps to work on it."""
    tall, wide, deep = (max(_LEAST, triton.next_power_of_2(size)) for size in (tokens, centres, channels))
    return {"TALL": tall, "WIDE": wide, "DEEP": deep, "num_warps": max(1, min(8, tall * deep // 512))}


@triton.jit
def product(x, y, dtype: tl.constexpr):
    """x y with factors in `dtype`: (n, k), (k, m) -> (n, m) in float32."""
    return tl.dot(x.to(dtype), y.to(dtype), input_precision="ieee")


@triton.jit
def rows_of(ptr, start, exists, D: tl.constexpr, DEEP: tl.constexpr):
    """Rows of D channels from `start` (n,) on: (n, DEEP), zero where none `exists`."""
    lane = tl.arange(0, DEEP)
    return tl.load(ptr + start[:, None] + lane[None, :], mask=exists[:, None] & (lane < D)[None, :], other=0.0)


@triton.jit
def write_rows(ptr, start, exists, rows, D: tl.constexpr, DEEP: tl.constexpr):
    """The inverse of `rows_of`."""
    lane = tl.arange(0, DEEP)
    mask = exists[:, None] & (lane < D)[None, :]
    tl.store(ptr + start[:, None] + lane[None, :], rows.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def regions(height, width, K: tl.constexpr, WIDE: tl.constexpr):
    """Of K² centres, over and over (WIDE,): where the rows and columns of their tokens begin and end, as `_regions` of
    `leafward.systems.hcformer.mixer` has it, and how many tokens those are."""
    i, j = tl.arange(0, WIDE) % (K * K) // K, tl.arange(0, WIDE) % K
    top, bottom = i * height // K, ((i + 1) * height + K - 1) // K
    left, right = j * width // K, ((j + 1) * width + K - 1) // K
    return top, bottom, left, right, ((bottom - top) * (right - left)).to(tl.float32)


@triton.jit
def shares(logits, together):
    """Softmax over the centres of every token (TALL, WIDE); a token without any gets nothing."""
    logits = tl.where(together, logits, -1e30)
    weights = tl.where(together, tl.exp(logits - tl.max(logits, axis=1)[:, None]), 0.0)
    total = tl.sum(weights, axis=1)
    return weights / tl.where(total > 0.0, total, 1.0)[:, None]


@triton.jit
def gathered(a, values, centres, dtype: tl.constexpr):
    """v'_m = (v_m + Σ_n A_nm v_n)/(1 + Σ_n A_nm), and the denominator: (TALL, WIDE), (TALL, DEEP), (WIDE, DEEP) ->
    (WIDE, DEEP), (WIDE,)."""
    total = 1.0 + tl.sum(a, axis=0)
    return (centres + product(tl.trans(a), values, dtype)) / total[:, None], total


@triton.jit
def exchange_back(a, values, middle, total, dout, dtype: tl.constexpr):
    """From the gradient of out = A v' to those of the logits, of the tokens' values and of the centres' values."""
    dmiddle = product(tl.trans(a), dout, dtype)
    dcentres = dmiddle / total[:, None]
    dtotal = -tl.sum(dcentres * middle, axis=1)
    da = product(dout, tl.trans(middle), dtype) + product(values, tl.trans(dcentres), dtype) + dtotal[None, :]
    dlogits = a * (da - tl.sum(a * da, axis=1)[:, None])
    return dlogits, product(a, dcentres, dtype), dcentres
