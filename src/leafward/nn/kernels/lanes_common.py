"""What the kernels that write the lanes of attention share: one token's heads to their lanes, and the backward pass.

Per token and head: x = p + b + t w_t, rotated (HoPE), its time τ = √(1/c + |x|²), and the lanes of
`leafward.nn.lanes.query_lanes` (kind 0), `key_lanes` (1) and `value_lanes` (2) for half precision. The kinds differ
in what they do with the time.

A head has D coordinates. The first OWN stand in the product, in columns from COLUMN + head · STEP on; the others are
one vector for all heads (the shared key of latent attention), which comes as it is. Coordinates FIRST … FIRST + TURNING
are rotated. WIDTH lanes are written per head, D of them for coordinates. TALL × WIDE is the tile that holds all heads.
"""

# The kernels are written in Triton's language, which only looks like Python.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from leafward.nn.kernels.launch import single


def to_eights(width: int) -> int:
    return -(-width // 8) * 8


def places(cos: Tensor, length: int) -> tuple[int, int]:
    """Tokens in a sequence, and steps between the tables of two sequences, which may share one."""
    return length, cos.shape[-2] * cos.shape[-1] if cos.ndim == 3 and len(cos) > 1 else 0


@triton.jit
def _angle(
    cos_ptr, sin_ptr, row, length, batch_step, FIRST: tl.constexpr, TURNING: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """cos and sin of a token's pairs, (1, WIDE/2); pairs other than those that turn stand still."""
    pair = tl.arange(0, WIDE // 2)[None, :] - FIRST // 2
    at = (row // length) * batch_step + (row % length) * (TURNING // 2) + pair
    turns = (pair >= 0) & (pair < TURNING // 2)
    cos = tl.load(cos_ptr + at, mask=turns, other=1.0).to(tl.float32)
    return cos, tl.load(sin_ptr + at, mask=turns, other=0.0).to(tl.float32)


@triton.jit
def _turned(x, cos, sin, TALL: tl.constexpr, WIDE: tl.constexpr):
    """Pairs of lanes rotated."""
    even, odd = tl.split(tl.reshape(x, (TALL, WIDE // 2, 2)))
    return tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), (TALL, WIDE))


@triton.jit
def write_lanes(
    p_ptr, b_ptr, t_ptr, w_ptr, shared_ptr, cos_ptr, sin_ptr, scale_ptr, out_ptr, length, batch_step, row_width, c,
    KIND: tl.constexpr, HEADS: tl.constexpr, COLUMN: tl.constexpr, STEP: tl.constexpr, OWN: tl.constexpr,
    D: tl.constexpr, FIRST: tl.constexpr, TURNING: tl.constexpr,
    WIDTH: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The lanes of one token's queries, keys or values."""
    row = tl.program_id(0).to(tl.int64)
    head, lane = tl.arange(0, TALL)[:, None], tl.arange(0, WIDE)[None, :]
    inside, own = (head < HEADS) & (lane < OWN), COLUMN + head * STEP + lane
    t = tl.load(t_ptr + row).to(tl.float32)
    x = tl.load(p_ptr + row * row_width + own, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(b_ptr + own, mask=inside, other=0.0).to(tl.float32)
    x += t * tl.load(w_ptr + own, mask=inside, other=0.0).to(tl.float32)
    if OWN < D:
        others = (lane >= OWN) & (lane < D)
        x += tl.load(shared_ptr + row * (D - OWN) + lane - OWN, mask=others, other=0.0).to(tl.float32)
    if TURNING > 0:
        cos, sin = _angle(cos_ptr, sin_ptr, row, length, batch_step, FIRST, TURNING, WIDE)
        x = _turned(x, cos, sin, TALL, WIDE)
    time = tl.sqrt(1.0 / single(c) + tl.sum(x * x, axis=1))[:, None]
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
def read_lanes_back(
    lanes_ptr, dlanes_ptr, t_ptr, w_ptr, cos_ptr, sin_ptr, scale_ptr,
    dp_ptr, dt_ptr, dscale_ptr, db_ptr, dw_ptr, dshared_ptr, rows, length, batch_step, row_width,
    KIND: tl.constexpr, HEADS: tl.constexpr, COLUMN: tl.constexpr, STEP: tl.constexpr, OWN: tl.constexpr,
    D: tl.constexpr, FIRST: tl.constexpr, TURNING: tl.constexpr,
    WIDTH: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The backward pass of `write_lanes`, over rows; the gradients of b and w are this program's parts of the sums.

    It reads x and τ off the lanes, which attention keeps anyway: nothing else of that size is held.
    """
    program = tl.program_id(0).to(tl.int64)
    head, lane = tl.arange(0, TALL)[:, None], tl.arange(0, WIDE)[None, :]
    present = (head < HEADS) & (lane < WIDTH)
    inside, own = (head < HEADS) & (lane < OWN), COLUMN + head * STEP + lane
    w = tl.load(w_ptr + own, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(scale_ptr).to(tl.float32)
    db, dw = tl.zeros((TALL, WIDE), tl.float32), tl.zeros((TALL, WIDE), tl.float32)
    for index in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.cast(index, tl.int64)
        t = tl.load(t_ptr + row).to(tl.float32)
        at = (row * HEADS + head) * WIDTH + lane
        x = tl.load(lanes_ptr + at, mask=present, other=0.0).to(tl.float32)
        dx = tl.load(dlanes_ptr + at, mask=present, other=0.0).to(tl.float32)
        # Lanes that add up to the time, and lanes whose gradient is that of the time: those that hold its head, which
        # is as good as the time itself, for its tail takes the rest.
        if KIND == 0:
            sums, timed = (lane == D) | (lane == D + 1), (lane == D) | (lane == D + 2)
        elif KIND == 1:
            sums, timed = (lane == D) | (lane == D + 2), (lane == D) | (lane == D + 1)
        else:
            sums, timed = (lane == D) | (lane == D + 1), lane == D
        time = tl.sum(tl.where(sums, x, 0.0), axis=1)[:, None]
        time = tl.where(time == 0.0, 1.0, time)  # rows beyond the heads
        dtime = tl.sum(tl.where(timed, dx, 0.0), axis=1)[:, None]
        x, dx = tl.where(lane < D, x, 0.0), tl.where(lane < D, dx, 0.0)
        if KIND == 0:  # the lanes hold scale·x and −scale·time
            dscale = tl.sum(dx * x, axis=1)[:, None] + dtime * time
            tl.store(dscale_ptr + row, tl.sum(tl.sum(dscale, axis=1), axis=0) / scale)
            dx, dtime = dx * scale, scale * dtime
        dx += x * (dtime / time)
        if TURNING > 0:
            cos, sin = _angle(cos_ptr, sin_ptr, row, length, batch_step, FIRST, TURNING, WIDE)
            dx = _turned(dx, cos, -sin, TALL, WIDE)
        tl.store(dp_ptr + row * row_width + own, dx.to(dp_ptr.dtype.element_ty), mask=inside)
        tl.store(dt_ptr + KIND * rows + row, tl.sum(tl.sum(dx * w, axis=1), axis=0))
        if OWN < D:
            others = (lane >= OWN) & (lane < D)
            dshared = tl.sum(dx, axis=0)[None, :].to(dshared_ptr.dtype.element_ty)
            tl.store(dshared_ptr + row * (D - OWN) + lane - OWN, dshared, mask=others)
        db += dx
        dw += t * dx
    tl.store(db_ptr + program * row_width + own, db, mask=inside)
    tl.store(dw_ptr + program * row_width + own, dw, mask=inside)
