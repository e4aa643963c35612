"""Latent attention of one new token per sequence to the cache, from its first products on.

`latent_ask` makes of the products of a token what is asked and what is kept, per head, with [k; v] = W [t_c; c] + b
from the latent point c: the query W_kᵀq beside its rotated part, the numbers q·w and −t_q of its rank-one term, the
point [c; k_rope] and the times t_c, t_k, t_v. Keys and values themselves are not written: only their times are needed.

`latent_recall` is `LatentAttention.recalled`: programs share the keys of a sequence, each with its own running softmax,
a second kernel joins their parts and takes them through W_v and back to the hyperboloid, a third out of the heads, with
the term of their times. Weights are rounded before they are summed, for points, for times and for their own total
alike: t² − |s|², which cancels, sees one set of weights.

In flat space there are no times. No gradients: this is for inference.
"""

# The kernels are written in Triton's language, which only looks like Python.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from leafward.nn.kernels import decoding_keys
from leafward.nn.kernels.launch import operator, single, wrap_triton

_ROWS = 16
"""Tokens or heads of a program: the least that a product takes."""
_MOST_PARTS = 64
"""Of the keys of a sequence: what joins them holds all at once."""
_TILE = 2**15
"""Bytes of a matrix that a program holds at once."""


@triton.jit
def _pairs(
    p_ptr, w_ptr, t, cos_ptr, sin_ptr, pair, mask, CURVED: tl.constexpr, TURNING: tl.constexpr
):  # fmt: skip
    """The even and the odd coordinates of p + t w, rotated: (TOKENS, pairs) each."""
    turns = mask & (pair < TURNING // 2)
    even = tl.load(p_ptr + 2 * pair, mask=mask, other=0.0).to(tl.float32)
    odd = tl.load(p_ptr + 2 * pair + 1, mask=mask, other=0.0).to(tl.float32)
    if CURVED:
        even += t * tl.load(w_ptr + 2 * pair, mask=mask, other=0.0).to(tl.float32)
        odd += t * tl.load(w_ptr + 2 * pair + 1, mask=mask, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + pair, mask=turns, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + pair, mask=turns, other=0.0).to(tl.float32)
    return even * cos - odd * sin, even * sin + odd * cos


@triton.jit
def _mapped(p_ptr, w_ptr, t, lane, mask, CURVED: tl.constexpr):
    """Coordinates of p + t w: (TOKENS, lanes)."""
    x = tl.load(p_ptr + lane, mask=mask, other=0.0).to(tl.float32)
    if CURVED:
        x += t * tl.load(w_ptr + lane, mask=mask, other=0.0).to(tl.float32)
    return x


@triton.jit
def _ask(
    q_ptr, q_w_ptr, q_t_ptr, l_ptr, l_w_ptr, l_t_ptr, gain_ptr, weight_ptr, column_ptr, bias_ptr, cos_ptr, sin_ptr,
    scale_ptr, query_ptr, rank_ptr, points_ptr, times_ptr, tokens, angle_step, eps, c,
    CURVED: tl.constexpr, HEADS: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, TURNING: tl.constexpr,
    VALUE: tl.constexpr, LATENT: tl.constexpr, WIDE_NOPE: tl.constexpr, WIDE_ROPE: tl.constexpr,
    WIDE_LATENT: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One head of some tokens. The last axis of programs: its query; what is left behind but for the times of heads;
    the time of its key; the time of its value."""
    token, head, role = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None], tl.program_id(1), tl.program_id(2)
    here = token < tokens
    token = token.to(tl.int64)
    half: tl.constexpr = points_ptr.dtype.element_ty
    c, eps = single(c), single(eps)
    l_ptr += token * (LATENT + ROPE)
    weight_ptr += head * (NOPE + VALUE) * LATENT
    column_ptr += head * (NOPE + VALUE)
    bias_ptr += head * (NOPE + VALUE)
    lane, pair = tl.arange(0, WIDE_LATENT)[None, :], tl.arange(0, WIDE_ROPE // 2)[None, :]
    cos_ptr += token * angle_step
    sin_ptr += token * angle_step
    if role == 0:
        _query(
            q_ptr + (token * HEADS + head) * (NOPE + ROPE), q_w_ptr + head * (NOPE + ROPE), q_t_ptr, weight_ptr,
            column_ptr, cos_ptr, sin_ptr, scale_ptr, query_ptr + (token * HEADS + head) * (LATENT + ROPE),
            rank_ptr + (token * HEADS + head) * 2, token, here, pair, c, half,
            CURVED, NOPE, ROPE, TURNING, LATENT, WIDE_NOPE, CHUNK, PRECISION,
        )  # fmt: skip
    elif role == 1:
        if head == 0:
            _leave(
                l_ptr, l_w_ptr, l_t_ptr, gain_ptr, cos_ptr, sin_ptr, points_ptr + token * (LATENT + ROPE),
                times_ptr + token * (1 + 2 * HEADS), token, here, lane, pair, eps, c, half, CURVED, ROPE, TURNING,
                LATENT,
            )  # fmt: skip
    else:
        if CURVED:
            l_t = tl.load(l_t_ptr + token, mask=here, other=0.0).to(tl.float32)
            paired = here & (pair < ROPE // 2)
            even, odd = _pairs(l_ptr + LATENT, l_w_ptr + LATENT, l_t, cos_ptr, sin_ptr, pair, paired, True, TURNING)
            shared = _squared(even) + _squared(odd)
            first, width = tl.where(role == 2, 0, NOPE), tl.where(role == 2, NOPE, VALUE)
            time = _expanded_time(
                l_ptr, l_w_ptr, l_t, gain_ptr, weight_ptr + first * LATENT, column_ptr + first, bias_ptr + first, width,
                tl.where(role == 2, shared, 0.0), here, lane, eps, c, half, LATENT, ROWS, PRECISION,
            )  # fmt: skip
            tl.store(times_ptr + token * (1 + 2 * HEADS) + 1 + (role - 2) * HEADS + head, time.to(half), mask=here)


@triton.jit
def _query(
    q_ptr, q_w_ptr, q_t_ptr, weight_ptr, column_ptr, cos_ptr, sin_ptr, scale_ptr, query_ptr, rank_ptr, token, here,
    pair, c,
    half: tl.constexpr, CURVED: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, TURNING: tl.constexpr,
    LATENT: tl.constexpr, WIDE_NOPE: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the queries of one head, brought to the latent points, and the numbers of their rank-one term."""
    scale, q_t = tl.load(scale_ptr).to(tl.float32), 0.0
    paired = here & (pair < ROPE // 2)
    if CURVED:
        q_t = tl.load(q_t_ptr + token, mask=here, other=0.0).to(tl.float32)
    place = tl.arange(0, WIDE_NOPE)[None, :]
    q = _mapped(q_ptr, q_w_ptr, q_t, place, here & (place < NOPE), CURVED).to(half)
    even, odd = _pairs(q_ptr + NOPE, q_w_ptr + NOPE, q_t, cos_ptr, sin_ptr, pair, paired, CURVED, TURNING)
    tl.store(query_ptr + LATENT + 2 * pair, (scale * even).to(half), mask=paired)
    tl.store(query_ptr + LATENT + 2 * pair + 1, (scale * odd).to(half), mask=paired)
    if CURVED:
        column = tl.load(column_ptr + place, mask=place < NOPE, other=0.0).to(tl.float32)
        along = tl.sum(q.to(tl.float32) * column, axis=1)[:, None]
        time = tl.sqrt(1.0 / c + _squared(q) + _squared(even) + _squared(odd))
        tl.store(rank_ptr, scale * along, mask=here)
        tl.store(rank_ptr + 1, -scale * time, mask=here)
    own = tl.arange(0, WIDE_NOPE)[:, None]
    for start in range(0, LATENT, CHUNK):
        part = start + tl.arange(0, CHUNK)[None, :]
        matrix = tl.load(weight_ptr + own * LATENT + part, mask=(own < NOPE) & (part < LATENT), other=0.0)
        absorbed = scale * tl.dot(q, matrix.to(half), input_precision=PRECISION)
        tl.store(query_ptr + part, absorbed.to(half), mask=here & (part < LATENT))


@triton.jit
def _squared(x):
    """|x|² in float32: (TOKENS, lanes) -> (TOKENS, 1)."""
    x = x.to(tl.float32)
    return tl.sum(x * x, axis=1)[:, None]


@triton.jit
def _leave(
    l_ptr, l_w_ptr, l_t_ptr, gain_ptr, cos_ptr, sin_ptr, point_ptr, time_ptr, token, here, lane, pair, eps, c,
    half: tl.constexpr, CURVED: tl.constexpr, ROPE: tl.constexpr, TURNING: tl.constexpr, LATENT: tl.constexpr,
):  # fmt: skip
    """Write the latent points, their times and the shared keys."""
    l_t = 0.0
    if CURVED:
        l_t = tl.load(l_t_ptr + token, mask=here, other=0.0).to(tl.float32)
    raw = _mapped(l_ptr, l_w_ptr, l_t, lane, here & (lane < LATENT), CURVED)
    gain = tl.load(gain_ptr + lane, mask=lane < LATENT, other=0.0).to(tl.float32)
    point = (raw * tl.rsqrt(_squared(raw) / LATENT + eps) * gain).to(half)
    paired = here & (pair < ROPE // 2)
    even, odd = _pairs(l_ptr + LATENT, l_w_ptr + LATENT, l_t, cos_ptr, sin_ptr, pair, paired, CURVED, TURNING)
    tl.store(point_ptr + lane, point, mask=here & (lane < LATENT))
    tl.store(point_ptr + LATENT + 2 * pair, even.to(half), mask=paired)
    tl.store(point_ptr + LATENT + 2 * pair + 1, odd.to(half), mask=paired)
    if CURVED:
        tl.store(time_ptr, tl.sqrt(1.0 / c + _squared(point)).to(half), mask=here)


@triton.jit
def _expanded_time(
    l_ptr, l_w_ptr, l_t, gain_ptr, weight_ptr, column_ptr, bias_ptr, width, squared, here, lane, eps, c,
    half: tl.constexpr, LATENT: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The times of `width` coordinates W [t_c; c] + b of the latent points c, on top of what is `squared` already."""
    # The matrix is on its way before anything is summed, and the product does not wait for the norm of the points.
    down, own = tl.trans(lane), tl.arange(0, ROWS)[None, :]
    upcoming = tl.load(weight_ptr + own * LATENT + down, mask=(own < width) & (down < LATENT), other=0.0)
    raw = _mapped(l_ptr, l_w_ptr, l_t, lane, here & (lane < LATENT), True)
    gained = raw * tl.load(gain_ptr + lane, mask=lane < LATENT, other=0.0).to(tl.float32)
    shrink = tl.rsqrt(_squared(raw) / LATENT + eps)
    latent_t, later = tl.sqrt(1.0 / c + shrink * shrink * _squared(gained)), shrink
    if half == tl.float16:  # has no room for points before they are normed
        gained, later = gained * shrink, 1.0
    for start in range(0, width, ROWS):
        place, matrix = start + own, upcoming
        after = place + ROWS
        upcoming = tl.load(weight_ptr + after * LATENT + down, mask=(after < width) & (down < LATENT), other=0.0)
        x = later * tl.dot(gained.to(half), matrix.to(half), input_precision=PRECISION)
        x += latent_t * tl.load(column_ptr + place, mask=place < width, other=0.0).to(tl.float32)
        x += tl.load(bias_ptr + place, mask=place < width, other=0.0).to(tl.float32)
        squared += _squared(x)
    return tl.sqrt(1.0 / c + squared)


@operator
def latent_ask(
    queries: Tensor,
    query_time: Tensor | None,
    query_column: Tensor | None,
    latents: Tensor,
    latent_time: Tensor | None,
    latent_column: Tensor | None,
    gain: Tensor,
    weight: Tensor,
    column: Tensor | None,
    bias: Tensor,
    cos: Tensor,
    sin: Tensor,
    scale: Tensor,
    heads: int,
    nope: int,
    eps: float,
    c: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    curved = column is not None
    queries, latents, gain, weight, bias = (x.contiguous() for x in (queries, latents, gain, weight, bias))
    cos, sin = cos.contiguous(), sin.contiguous()
    query, rank, points, times = _asked(queries, latents, heads, curved)
    # In flat space nothing reads or writes what stands in for a time.
    q_t, q_w, l_t, l_w, w = (
        gain if x is None else x.contiguous() for x in (query_time, query_column, latent_time, latent_column, column)
    )
    latent = weight.shape[1]
    sizes = {
        "CURVED": curved,
        "HEADS": heads,
        "NOPE": nope,
        "ROPE": latents.shape[-1] - latent,
        "TURNING": 2 * cos.shape[-1],
        "VALUE": weight.shape[0] // heads - nope,
        "LATENT": latent,
    }
    wide = {f"WIDE_{name}": max(16, triton.next_power_of_2(sizes[name])) for name in ("NOPE", "ROPE", "LATENT")}
    held = _TILE // points.dtype.itemsize
    chunk = max(16, min(wide["WIDE_LATENT"], held // wide["WIDE_NOPE"]))
    rows = max(16, min(triton.next_power_of_2(max(nope, sizes["VALUE"])), held // wide["WIDE_LATENT"]))
    step = cos.shape[-1] if cos.ndim == 3 and len(cos) > 1 else 0
    wrap_triton(_ask)[(triton.cdiv(len(queries), _ROWS), heads, 4 if curved else 2)](
        queries, q_w, q_t, latents, l_w, l_t, gain, weight, w, bias, cos, sin, scale, query, rank, points, times,
        len(queries), step, eps, c, CHUNK=chunk, ROWS=rows, TOKENS=_ROWS, PRECISION=_precision(points.dtype),
        num_warps=4, **sizes, **wide,
    )  # fmt: skip
    return query, rank, points, times


def _precision(dtype: torch.dtype) -> str:
    """How products of float32 are taken; half precision do not ask."""
    return "ieee" if dtype == torch.float32 else "tf32"


def _asked(queries: Tensor, latents: Tensor, heads: int, curved: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, width = len(queries), latents.shape[-1]
    return (
        queries.new_empty(batch, heads, width),
        queries.new_empty(batch, heads, 2 if curved else 0, dtype=torch.float32),
        latents.new_empty(batch, 1, 1, width),
        latents.new_empty(batch, 1, 1, 1 + 2 * heads if curved else 0),
    )


@latent_ask.register_fake
def _(
    queries, query_time, query_column, latents, latent_time, latent_column, gain, weight, column, bias, cos, sin, scale,
    heads, nope, eps, c,
):  # fmt: skip
    return _asked(queries, latents, heads, column is not None)


@triton.jit
def _times(times_ptr, key, column, known, step, stop):
    """Columns of the times of each key: (KEYS, lanes)."""
    mask = (key < stop)[:, None] & known[None, :]
    return tl.load(times_ptr + key[:, None].to(tl.int64) * step + column[None, :], mask=mask, other=0.0)


@triton.jit
def _columns(time, first, HEADS: tl.constexpr, OWN: tl.constexpr):
    """Which lanes of times there are for the heads from `first` on, and the column of a key's times that each reads."""
    index = tl.where(time <= OWN, time, time - OWN)  # of a head in this block, from one on
    known = (time == 0) | ((time <= 2 * OWN) & (first + index <= HEADS))
    return known, tl.where(time == 0, 0, first + index + tl.where(time <= OWN, 0, HEADS))


@triton.jit
def _factors(rank_ptr, present, time, own, half: tl.constexpr):
    """What multiplies the lanes of times in a score of each head: (TALL, lanes), in two pieces."""
    along = tl.load(rank_ptr, mask=present, other=0.0)[:, None]
    minus_t = tl.load(rank_ptr + 1, mask=present, other=0.0)[:, None]
    rank = tl.where(time[None, :] == 0, along, tl.where(time[None, :] == own, minus_t, 0.0))
    big = rank.to(half)
    return big, (rank - big.to(tl.float32)).to(half)


@triton.jit
def _points(row, there, lane, turned, LATENT: tl.constexpr, ROPE: tl.constexpr):
    """The latent coordinates and the rotated ones of rows that start at `row`."""
    x = tl.load(row + lane[None, :], mask=there & (lane < LATENT)[None, :], other=0.0)
    return x, tl.load(row + LATENT + turned[None, :], mask=there & (turned < ROPE)[None, :], other=0.0)


@triton.jit
def _seen(documents_ptr, key, at, stop, window, DOCUMENTS: tl.constexpr):
    """Which keys a token at `at` attends to: those of its window, and of its document."""
    seen = (key < stop) & (at - key < window)
    if DOCUMENTS:
        ids = tl.load(documents_ptr + key, mask=key < stop, other=0)
        seen = seen & (ids == tl.load(documents_ptr + at))
    return seen


@triton.jit
def _write_times(stats_ptr, time_sums, present, time, value):
    """Write the sums of the lane of t_c, which is the first, and of the lane `value` of each head's t_v."""
    sum_t = tl.sum(tl.where(time[None, :] == 0, time_sums, 0.0), axis=1)
    sum_v = tl.sum(tl.where(time[None, :] == value, time_sums, 0.0), axis=1)
    tl.store(stats_ptr, sum_t, mask=present)
    tl.store(stats_ptr + 1, sum_v, mask=present)


@triton.jit
def _recall(
    query_ptr, rank_ptr, points_ptr, times_ptr, at_ptr, documents_ptr, sum_ptr, stats_ptr, keys, span, window,
    points_step, point_step, times_step, time_step, documents_step,
    CURVED: tl.constexpr, DOCUMENTS: tl.constexpr, HEADS: tl.constexpr, ROPE: tl.constexpr, LATENT: tl.constexpr,
    WIDE_ROPE: tl.constexpr, WIDE_LATENT: tl.constexpr, WIDE_TIMES: tl.constexpr, OWN: tl.constexpr,
    TALL: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The part of some heads and some keys: Σ e^(s−m) of its points, and m, Σ e^(s−m) of ones, of t_c and of t_v.

    The times of a key are lanes of products like its coordinates: t_c first, then those of OWN heads' keys, then those
    of their values. What multiplies them in a score is in float32, and so comes in two pieces of a half-precision type.
    """
    batch, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    first = tl.program_id(2) * TALL
    head = first + tl.arange(0, TALL)
    present = head < HEADS
    lane, turned = tl.arange(0, WIDE_LATENT), tl.arange(0, WIDE_ROPE)
    half: tl.constexpr = points_ptr.dtype.element_ty
    points_ptr += batch * points_step
    row = query_ptr + (batch * HEADS + head)[:, None] * (LATENT + ROPE)
    q, q_turned = _points(row, present[:, None], lane, turned, LATENT, ROPE)
    at = tl.load(at_ptr).to(tl.int32)
    stop = tl.minimum(tl.minimum(part * span + span, keys), at + 1)
    most, total = tl.full((TALL,), -1e30, tl.float32), tl.zeros((TALL,), tl.float32)
    sums, time_sums = tl.zeros((TALL, WIDE_LATENT), tl.float32), tl.zeros((TALL, WIDE_TIMES), tl.float32)
    if CURVED:
        times_ptr += batch * times_step
        time, own = tl.arange(0, WIDE_TIMES), tl.arange(0, TALL)[:, None] + 1
        known, column = _columns(time, first, HEADS, OWN)
        big, small = _factors(rank_ptr + (batch * HEADS + head) * 2, present, time, own, half)
        # Read one step ahead: rows of an odd number of times do not come by themselves while products are taken.
        upcoming = _times(times_ptr, part * span + tl.arange(0, KEYS), column, known, time_step, stop)
    for start in range(part * span, stop, KEYS):
        key = start + tl.arange(0, KEYS)
        seen = _seen(documents_ptr + batch * documents_step, key, at, stop, window, DOCUMENTS)
        place, held = points_ptr + key[:, None].to(tl.int64) * point_step, (key < stop)[:, None]
        x, x_turned = _points(place, held, lane, turned, LATENT, ROPE)
        score = tl.dot(q, tl.trans(x), input_precision=PRECISION)
        score = tl.dot(q_turned, tl.trans(x_turned), score, input_precision=PRECISION)
        if CURVED:
            times = upcoming
            upcoming = _times(times_ptr, key + KEYS, column, known, time_step, stop)
            score = tl.dot(big, tl.trans(times), score, input_precision=PRECISION)
            score = tl.dot(small, tl.trans(times), score, input_precision=PRECISION)
        score = tl.where(seen[None, :], score, -1e30)
        higher = tl.maximum(most, tl.max(score, axis=1))
        fade, most = tl.exp(most - higher), higher
        share = tl.where(seen[None, :], tl.exp(score - higher[:, None]), 0.0).to(half)
        total = total * fade + tl.sum(share.to(tl.float32), axis=1)
        sums = tl.dot(share, x, sums * fade[:, None], input_precision=PRECISION)
        if CURVED:
            time_sums = tl.dot(share, times, time_sums * fade[:, None], input_precision=PRECISION)
    at_part = (batch * HEADS + head) * parts + part
    held = present[:, None] & (lane < LATENT)[None, :]
    tl.store(sum_ptr + at_part[:, None] * LATENT + lane[None, :], sums, mask=held)
    tl.store(stats_ptr + at_part * 4, most, mask=present)
    tl.store(stats_ptr + at_part * 4 + 1, total, mask=present)
    if CURVED:
        _write_times(stats_ptr + at_part * 4 + 2, time_sums, present, time, own + OWN)


@triton.jit
def _answer(
    sum_ptr, stats_ptr, weight_ptr, column_ptr, bias_ptr, s_ptr, t_ptr, parts, c,
    CURVED: tl.constexpr, HEADS: tl.constexpr, NOPE: tl.constexpr, VALUE: tl.constexpr, LATENT: tl.constexpr,
    WIDE_VALUE: tl.constexpr, PARTS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The parts of one head of one token joined: W_v Σ w [t_c; c] + b_v, scaled back to the hyperboloid."""
    batch, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    part, place = tl.arange(0, PARTS), tl.arange(0, WIDE_VALUE)
    there, own = part < parts, place < VALUE
    row = (batch * HEADS + head) * parts + part
    most = tl.load(stats_ptr + row * 4, mask=there, other=-1e30)
    share = tl.where(there, tl.exp(most - tl.max(most, axis=0)), 0.0)
    share /= tl.sum(share * tl.load(stats_ptr + row * 4 + 1, mask=there, other=0.0), axis=0)
    column_at = head * (NOPE + VALUE) + NOPE + place
    value = tl.load(bias_ptr + column_at, mask=own, other=0.0).to(tl.float32)
    for start in range(0, LATENT, CHUNK):
        lane = start + tl.arange(0, CHUNK)
        inside = there[:, None] & (lane < LATENT)[None, :]
        sums = tl.load(sum_ptr + row[:, None] * LATENT + lane[None, :], mask=inside, other=0.0)
        mean = tl.sum(share[:, None] * sums, axis=0)
        inside = own[:, None] & (lane < LATENT)[None, :]
        matrix = tl.load(weight_ptr + column_at[:, None] * LATENT + lane[None, :], mask=inside, other=0.0)
        value += tl.sum(matrix.to(tl.float32) * mean[None, :], axis=1)
    if CURVED:
        c = single(c)
        latent_t = tl.sum(share * tl.load(stats_ptr + row * 4 + 2, mask=there, other=0.0), axis=0)
        time = tl.sum(share * tl.load(stats_ptr + row * 4 + 3, mask=there, other=0.0), axis=0)
        value += latent_t * tl.load(column_ptr + column_at, mask=own, other=0.0).to(tl.float32)
        reach = tl.sqrt(tl.sum(value * value, axis=0))
        # The exact bound −⟨o,o⟩_L >= 1/c, as in `leafward.geometry.lorentz.centroid_of_sum`.
        shrink = tl.rsqrt(c * tl.maximum((time - reach) * (time + reach), 1.0 / c))
        value *= shrink
        time = tl.sqrt(1.0 / c + reach * reach * shrink * shrink)
        tl.store(t_ptr + batch * HEADS + head, time.to(t_ptr.dtype.element_ty))
    tl.store(s_ptr + (batch * HEADS + head) * VALUE + place, value.to(s_ptr.dtype.element_ty), mask=own)


@triton.jit
def _out(
    s_ptr, t_ptr, weight_ptr, column_ptr, bias_ptr, y_ptr, tokens, width,
    CURVED: tl.constexpr, HEADS: tl.constexpr, DEPTH: tl.constexpr, WIDE_HEADS: tl.constexpr, CHUNK: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """W s + W_t t + b of some tokens, some columns of it: DEPTH space coordinates, HEADS times."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None]
    own = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    here, inside = token < tokens, own < width
    y = tl.load(bias_ptr + own, mask=inside, other=0.0).to(tl.float32) + tl.zeros((TOKENS, COLUMNS), tl.float32)
    half: tl.constexpr = s_ptr.dtype.element_ty
    for start in range(0, DEPTH, CHUNK):
        across, down = start + tl.arange(0, CHUNK)[None, :], start + tl.arange(0, CHUNK)[:, None]
        matrix = tl.load(weight_ptr + own * DEPTH + down, mask=inside & (down < DEPTH), other=0.0)
        x = tl.load(s_ptr + token * DEPTH + across, mask=here & (across < DEPTH), other=0.0)
        y = tl.dot(x, matrix.to(half), y, input_precision=PRECISION)
    if CURVED:
        across, down = tl.arange(0, WIDE_HEADS)[None, :], tl.arange(0, WIDE_HEADS)[:, None]
        matrix = tl.load(column_ptr + own * HEADS + down, mask=inside & (down < HEADS), other=0.0)
        x = tl.load(t_ptr + token * HEADS + across, mask=here & (across < HEADS), other=0.0)
        y = tl.dot(x, matrix.to(half), y, input_precision=PRECISION)
    tl.store(y_ptr + token * width + own, y.to(half), mask=here & inside)


@operator
def latent_recall(
    query: Tensor,
    rank: Tensor,
    points: Tensor,
    times: Tensor,
    at: Tensor,
    window: int | None,
    documents: Tensor | None,
    weight: Tensor,
    column: Tensor | None,
    bias: Tensor,
    out_weight: Tensor,
    out_column: Tensor | None,
    out_bias: Tensor,
    nope: int,
    c: float,
) -> Tensor:
    batch, heads, width = query.shape
    keys, latent, curved = points.shape[2], weight.shape[1], column is not None
    points, times = points.to(query.dtype), times.to(query.dtype)  # under autocast a cache may be of another type
    points, times = (x if x.stride(-1) == 1 or not x.shape[-1] else x.contiguous() for x in (points, times))
    weight, bias = weight.contiguous(), bias.contiguous()
    column = bias if column is None else column.contiguous()
    blocks, own = triton.cdiv(heads, _ROWS), min(heads, _ROWS)
    wide_rope, wide_latent = (max(16, triton.next_power_of_2(size)) for size in (width - latent, latent))
    step = decoding_keys(latent, query.dtype)
    span = _span(query, batch * blocks, keys, step)
    parts = triton.cdiv(keys, span)
    sums = query.new_empty(batch, heads, parts, latent, dtype=torch.float32)
    stats = query.new_empty(batch, heads, parts, 4, dtype=torch.float32)
    sizes = {"CURVED": curved, "HEADS": heads, "LATENT": latent}
    ids = at if documents is None else documents.contiguous()
    wrap_triton(_recall)[(batch, parts, blocks)](
        query.contiguous(), rank, points, times, at, ids, sums, stats, keys, span, keys if window is None else window,
        points.stride(0), points.stride(2), times.stride(0), times.stride(2), ids.shape[-1],
        DOCUMENTS=documents is not None, ROPE=width - latent, WIDE_ROPE=wide_rope, WIDE_LATENT=wide_latent,
        WIDE_TIMES=max(16, triton.next_power_of_2(1 + 2 * own)), OWN=own, TALL=_ROWS, KEYS=step,
        PRECISION=_precision(query.dtype), num_warps=4, **sizes,
    )  # fmt: skip
    value = weight.shape[0] // heads - nope
    s, t = query.new_empty(batch, heads * value), query.new_empty(batch, heads)
    # Of two sizes only: each is compiled, and there are ever more keys.
    wide_value, all_parts = triton.next_power_of_2(value), 8 if parts <= 8 else _MOST_PARTS
    chunk = max(16, min(wide_latent, _TILE // (2 * max(wide_value, all_parts))))
    wrap_triton(_answer)[(batch, heads)](
        sums, stats, weight, column, bias, s, t, parts, c, **sizes,
        NOPE=nope, VALUE=value, WIDE_VALUE=wide_value, PARTS=all_parts, CHUNK=chunk, num_warps=4,
    )  # fmt: skip
    y = _answered(query, out_weight)
    out_column = out_bias if out_column is None else out_column.contiguous()
    tokens, columns = triton.cdiv(batch, _ROWS), triton.cdiv(y.shape[-1], _ROWS)
    wrap_triton(_out)[(tokens, columns)](
        s, t, out_weight.contiguous(), out_column, out_bias.contiguous(), y, batch, y.shape[-1],
        CURVED=curved, HEADS=heads, DEPTH=s.shape[1], WIDE_HEADS=max(16, triton.next_power_of_2(heads)),
        CHUNK=max(16, min(triton.next_power_of_2(s.shape[1]), 256)), TOKENS=_ROWS, COLUMNS=_ROWS,
        PRECISION=_precision(query.dtype), num_warps=4,
    )  # fmt: skip
    return y


def _span(x: Tensor, programs: int, keys: int, step: int) -> int:
    """Keys of a part, in whole steps, so that there are two parts for each multiprocessor."""
    units = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 4
    parts = max(1, min(_MOST_PARTS, 2 * units // max(1, programs)))
    return triton.cdiv(triton.cdiv(keys, parts), step) * step


def _answered(query: Tensor, out_weight: Tensor) -> Tensor:
    return query.new_empty(query.shape[0], 1, out_weight.shape[0])


@latent_recall.register_fake
def _(
    query, rank, points, times, at, window, documents, weight, column, bias, out_weight, out_column, out_bias, nope, c
):  # fmt: skip
    return _answered(query, out_weight)
