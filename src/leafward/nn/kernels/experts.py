"""What lies between and behind the two matrix products of a mixture of experts, in one pass each.

Between them, for a row of expert e with u = p + t w_e, p the bare product and ρ_e = √(c/c_e) the way over:
(gate, value) = ρ_e u + b_e, h = silu(gate)·value, t_h = √(1/c_e + |h|²).

Behind them, for a token with its points x_i (rows of its routed experts, wherever sorting put them, then the shared
ones) and weights w_i: a = Σ w_i x_i, A_i = √(1 + c|x_i|²), T = Σ w_i A_i and

    q = −c⟨a,a⟩_L = (T + √c|a|) · Σ w_i [1/(A_i + √c|x_i|) + √c|x_i − |x_i|â|²/(2|x_i|)],   z = a/√q,

positive terms only, as in `leafward.geometry.lorentz.centroid`. Back, with G the gradient of z and
∂q = −½ (G·z)/q: ∂x_i = w_i [G/√q + 2 ∂q c (x_i T/A_i − a)], ∂w_i = (G·x_i)/√q + 2 ∂q (A_i T − c x_i·a). Far out both
brackets are small differences of large numbers along â; so the parts along â and across it are worked out apart.

Without gradients `expert_hidden` does routed and shared experts at once, with c_e from its parameter, and
`expert_blend` takes bare products in place of points and holds all of a token's: it is decoded in fewer launches.
"""

# The kernels are written in Triton's language, which only looks like Python.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from leafward.nn.grouped import segment_sums
from leafward.nn.kernels.launch import operator, single, tile, wrap_triton

_CHUNK = 4
"""Rows of a program in the backward pass: neighbours share an expert, so its columns come from the nearest cache. Read
for every row from the one behind it, they would be more bytes than the rows."""


@triton.jit
def _halves(p_ptr, t, w_ptr, expert, row, lane, mask, HIDDEN: tl.constexpr):
    """u of one row, gate first, and its time columns."""
    own = expert * 2 * HIDDEN + lane
    at = row * 2 * HIDDEN + lane
    w_gate = tl.load(w_ptr + own, mask=mask, other=0.0).to(tl.float32)
    w_value = tl.load(w_ptr + HIDDEN + own, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(p_ptr + at, mask=mask, other=0.0).to(tl.float32) + t * w_gate
    value = tl.load(p_ptr + HIDDEN + at, mask=mask, other=0.0).to(tl.float32) + t * w_value
    return gate, value, w_gate, w_value


@triton.jit
def _brought_over(u_gate, u_value, b_ptr, over, expert, lane, mask, HIDDEN: tl.constexpr):
    """ρ u + b, gate first."""
    own = expert * 2 * HIDDEN + lane
    gate = over * u_gate + tl.load(b_ptr + own, mask=mask, other=0.0).to(tl.float32)
    return gate, over * u_value + tl.load(b_ptr + HIDDEN + own, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _hidden_row(
    p_ptr, w_ptr, b_ptr, h_ptr, t_h_ptr, t, over, c, expert, row, HIDDEN: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Write h and its time."""
    lane = tl.arange(0, BLOCK)
    mask = lane < HIDDEN
    gate, value, _, _ = _halves(p_ptr, t, w_ptr, expert, row, lane, mask, HIDDEN)
    gate, value = _brought_over(gate, value, b_ptr, over, expert, lane, mask, HIDDEN)
    h = gate * tl.sigmoid(gate) * value
    tl.store(h_ptr + row * HIDDEN + lane, h.to(h_ptr.dtype.element_ty), mask=mask)
    tl.store(t_h_ptr + row, tl.sqrt(1.0 / c + tl.sum(h * h, axis=0)))


@triton.jit
def _swiglu(
    p_ptr, t_ptr, w_ptr, b_ptr, over_ptr, c_ptr, expert_ptr, h_ptr, t_h_ptr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    expert, t = tl.load(expert_ptr + row), tl.load(t_ptr + row).to(tl.float32)
    over, c = tl.load(over_ptr + expert).to(tl.float32), tl.load(c_ptr + expert).to(tl.float32)
    _hidden_row(p_ptr, w_ptr, b_ptr, h_ptr, t_h_ptr, t, over, c, expert, row, HIDDEN, BLOCK)


@triton.jit
def _swiglu_back(
    p_ptr, t_ptr, w_ptr, b_ptr, over_ptr, c_ptr, expert_ptr, dh_ptr, dt_h_ptr, dp_ptr, dt_ptr, dover_ptr, dc_ptr,
    rows, CHUNK: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0) * CHUNK
    for row in range(start, tl.minimum(start + CHUNK, rows)):
        _swiglu_back_row(
            p_ptr, t_ptr, w_ptr, b_ptr, over_ptr, c_ptr, expert_ptr, dh_ptr, dt_h_ptr, dp_ptr, dt_ptr, dover_ptr,
            dc_ptr, tl.cast(row, tl.int64), HIDDEN, BLOCK,
        )  # fmt: skip


@triton.jit
def _swiglu_back_row(
    p_ptr, t_ptr, w_ptr, b_ptr, over_ptr, c_ptr, expert_ptr, dh_ptr, dt_h_ptr, dp_ptr, dt_ptr, dover_ptr, dc_ptr, row,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    expert = tl.load(expert_ptr + row)
    lane = tl.arange(0, BLOCK)
    mask = lane < HIDDEN
    over, c = tl.load(over_ptr + expert).to(tl.float32), tl.load(c_ptr + expert).to(tl.float32)
    t = tl.load(t_ptr + row).to(tl.float32)
    u_gate, u_value, w_gate, w_value = _halves(p_ptr, t, w_ptr, expert, row, lane, mask, HIDDEN)
    gate, value = _brought_over(u_gate, u_value, b_ptr, over, expert, lane, mask, HIDDEN)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    h = silu * value
    t_h = tl.sqrt(1.0 / c + tl.sum(h * h, axis=0))
    dt_h = tl.load(dt_h_ptr + row).to(tl.float32)
    dh = tl.load(dh_ptr + row * HIDDEN + lane, mask=mask, other=0.0).to(tl.float32) + h * (dt_h / t_h)
    dgate, dvalue = dh * value * (sigmoid + silu * (1.0 - sigmoid)), dh * silu
    tl.store(dover_ptr + row, tl.sum(dgate * u_gate + dvalue * u_value, axis=0))
    tl.store(dc_ptr + row, -0.5 * dt_h / (t_h * c * c))
    dgate, dvalue = over * dgate, over * dvalue
    at = row * 2 * HIDDEN + lane
    tl.store(dp_ptr + at, dgate.to(dp_ptr.dtype.element_ty), mask=mask)
    tl.store(dp_ptr + HIDDEN + at, dvalue.to(dp_ptr.dtype.element_ty), mask=mask)
    tl.store(dt_ptr + row, tl.sum(dgate * w_gate + dvalue * w_value, axis=0))


@operator
def expert_swiglu(
    p: Tensor, t: Tensor, w: Tensor, b: Tensor, over: Tensor, c: Tensor, expert: Tensor, ends: Tensor
) -> tuple[Tensor, Tensor]:
    p, t, w, b, over, c = (x.contiguous() for x in (p, t, w, b, over, c))
    h, t_h = _like_hidden(p)
    (block,), warps = tile(h.shape[-1])
    sizes = {"HIDDEN": h.shape[-1], "BLOCK": block, "num_warps": warps}
    wrap_triton(_swiglu)[(len(p),)](p, t, w, b, over, c, expert, h, t_h, **sizes)
    return h, t_h


def _like_hidden(p: Tensor) -> tuple[Tensor, Tensor]:
    """Room for h and its time."""
    return p.new_empty(p.shape[0], p.shape[1] // 2), p.new_empty(p.shape[0], 1, dtype=torch.float32)


@expert_swiglu.register_fake
def _(p, t, w, b, over, c, expert, ends):
    return _like_hidden(p)


@operator
def expert_swiglu_backward(
    p: Tensor, t: Tensor, w: Tensor, b: Tensor, over: Tensor, c: Tensor, expert: Tensor, dh: Tensor, dt_h: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    p, t, w, b, over, c, dh, dt_h = (x.contiguous() for x in (p, t, w, b, over, c, dh, dt_h))
    dp, dt, dover, dc = _like_rows(p, t)
    (block,), warps = tile(dh.shape[-1])
    sizes = {"CHUNK": _CHUNK, "HIDDEN": dh.shape[-1], "BLOCK": block, "num_warps": warps}
    grid = (triton.cdiv(len(p), _CHUNK),)
    wrap_triton(_swiglu_back)[grid](p, t, w, b, over, c, expert, dh, dt_h, dp, dt, dover, dc, len(p), **sizes)
    return dp, dt, dover, dc


def _like_rows(p: Tensor, t: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Room for the gradients of p and t, and each row's share in those of ρ and c."""
    return p.new_empty(p.shape), t.new_empty(t.shape), t.new_empty(t.shape), t.new_empty(t.shape)


@expert_swiglu_backward.register_fake
def _(p, t, w, b, over, c, expert, dh, dt_h):
    return _like_rows(p, t)


def _setup_swiglu(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _gradient_swiglu(ctx, dh, dt_h):
    *inputs, ends = ctx.saved_tensors
    _, t, w, b, over, c, expert = inputs
    dp, dt, *shares = torch.ops.leafward.expert_swiglu_backward(*inputs, dh, dt_h)
    dw, db = segment_sums(torch.cat([t, torch.ones_like(t)], dim=-1).to(dp.dtype), dp, ends).unbind(dim=1)
    db = db / over.unsqueeze(-1)  # dp has ρ in it
    dover = dc = None
    if ctx.needs_input_grad[4] or ctx.needs_input_grad[5]:
        own = (expert.unsqueeze(-1) == torch.arange(len(over), device=expert.device)).to(t.dtype)
        dover, dc = (own.mT @ torch.cat(shares, dim=-1)).to(c.dtype).unbind(dim=-1)
    return dp, dt, dw.to(w.dtype), db.to(b.dtype), dover, dc, None, None


expert_swiglu.register_autograd(_gradient_swiglu, setup_context=_setup_swiglu)


@triton.jit
def _point(
    routed_ptr, everywhere_ptr, slot_ptr, share_ptr, token, tokens, lane, mask,
    INDEX: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One point of a token and its weight."""
    if INDEX < K:
        at = tl.load(slot_ptr + token * K + INDEX) * WIDTH + lane
        weight = tl.load(share_ptr + token * K + INDEX).to(tl.float32)
        x = tl.load(routed_ptr + at, mask=mask, other=0.0)
    else:
        at = ((INDEX - K) * tokens + token) * WIDTH + lane
        weight = 1.0
        x = tl.load(everywhere_ptr + at, mask=mask, other=0.0)
    return x.to(tl.float32), weight


@triton.jit
def _measured(x, ray, c):
    """√c|x|, A = √(1 + c|x|²), and √c|x − |x|â|²/(2|x|): how far x strays from the direction â."""
    r = tl.maximum(tl.sqrt(tl.sum(x * x, axis=0)), 1e-18)
    astray = x - r * ray
    bend = 0.5 * tl.sqrt(c) * tl.sum(astray * astray, axis=0) / r
    return tl.sqrt(c) * r, tl.sqrt(1.0 + c * r * r), bend


@triton.jit
def _summed(
    routed_ptr, everywhere_ptr, slot_ptr, share_ptr, token, tokens, lane, mask, c,
    K: tl.constexpr, S: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """a, its direction and √c|a|; Σ w, T and q. Points are read again where they are needed: the cache holds them."""
    a, total = tl.zeros((BLOCK,), tl.float32), 0.0
    for index in tl.static_range(K + S):
        x, weight = _point(
            routed_ptr, everywhere_ptr, slot_ptr, share_ptr, token, tokens, lane, mask, index, K, WIDTH
        )  # fmt: skip
        a += weight * x
        total += weight
    length = tl.sqrt(tl.sum(a * a, axis=0))
    ray, reach = a / tl.maximum(length, 1e-18), tl.sqrt(c) * length
    time, deficit = 0.0, 0.0
    for index in tl.static_range(K + S):
        x, weight = _point(
            routed_ptr, everywhere_ptr, slot_ptr, share_ptr, token, tokens, lane, mask, index, K, WIDTH
        )  # fmt: skip
        own, cosh, bend = _measured(x, ray, c)
        time += weight * cosh
        deficit += weight * (1.0 / (cosh + own) + bend)
    return a, ray, reach, total, time, (time + reach) * deficit


@triton.jit
def _combine(
    routed_ptr, everywhere_ptr, slot_ptr, share_ptr, out_ptr, tokens, c,
    K: tl.constexpr, S: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    c = single(c)
    token, lane = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    mask = lane < WIDTH
    a, _, _, _, _, q = _summed(
        routed_ptr, everywhere_ptr, slot_ptr, share_ptr, token, tokens, lane, mask, c, K, S, WIDTH, BLOCK
    )  # fmt: skip
    tl.store(out_ptr + token * WIDTH + lane, (a / tl.sqrt(q)).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _combine_back(
    routed_ptr, everywhere_ptr, slot_ptr, share_ptr, dout_ptr, drouted_ptr, deverywhere_ptr, dshare_ptr, tokens, c,
    K: tl.constexpr, S: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    c = single(c)
    token, lane = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    mask = lane < WIDTH
    a, ray, reach, total, time, q = _summed(
        routed_ptr, everywhere_ptr, slot_ptr, share_ptr, token, tokens, lane, mask, c, K, S, WIDTH, BLOCK
    )  # fmt: skip
    g = tl.load(dout_ptr + token * WIDTH + lane, mask=mask, other=0.0).to(tl.float32)
    shrink, along = 1.0 / tl.sqrt(q), tl.sum(g * ray, axis=0)
    dq = -0.5 * shrink * along * reach / (q * tl.sqrt(c))
    # Points are centred twice: what rounding leaves at one that outweighs the others would be multiplied by c|a|².
    mean = a / total
    off = tl.zeros((BLOCK,), tl.float32)
    for index in tl.static_range(K + S):
        x, weight = _point(
            routed_ptr, everywhere_ptr, slot_ptr, share_ptr, token, tokens, lane, mask, index, K, WIDTH
        )  # fmt: skip
        off += weight * (x - mean)
    off /= total
    for index in tl.static_range(K + S):
        x, weight = _point(
            routed_ptr, everywhere_ptr, slot_ptr, share_ptr, token, tokens, lane, mask, index, K, WIDTH
        )  # fmt: skip
        own, cosh, bend = _measured(x, ray, c)
        # √c times the part of x T/A − a along â, and the part of x across it.
        ahead = (q * cosh - time * time / cosh) / (own * time + reach * cosh) - bend * time / cosh
        across = (x - mean) - off
        across -= tl.sum(across * ray, axis=0) * ray
        dx = shrink * (g - along * (reach * ahead / q) * ray) + (2.0 * dq * c * time / cosh) * across
        dx = (weight * dx).to(drouted_ptr.dtype.element_ty)
        # Where they stand is worked out here once more: handed over by `_point`, the compiler would take what that
        # reads for what is written, and copy it.
        if index < K:
            tl.store(drouted_ptr + tl.load(slot_ptr + token * K + index) * WIDTH + lane, dx, mask=mask)
            # A T − c x·a, again as a sum of positive terms.
            product = (time * time + own * own * q) / (cosh * time + own * reach) + reach * bend
            tl.store(dshare_ptr + token * K + index, shrink * tl.sum(g * x, axis=0) + 2.0 * dq * product)
        else:
            tl.store(deverywhere_ptr + ((index - K) * tokens + token) * WIDTH + lane, dx, mask=mask)


def _shape(routed: Tensor, everywhere: Tensor, share: Tensor) -> dict[str, int]:
    tokens, active = share.shape
    (block,), warps = tile(routed.shape[-1])
    sizes = {"K": active, "S": everywhere.shape[0] // tokens, "WIDTH": routed.shape[-1]}
    # Half the warps: about twenty sums that wait for each other.
    return sizes | {"BLOCK": block, "num_warps": max(1, warps // 2)}


@operator
def expert_combine(routed: Tensor, everywhere: Tensor, slot: Tensor, share: Tensor, c: float) -> Tensor:
    routed, everywhere, slot, share = (x.contiguous() for x in (routed, everywhere, slot, share))
    out = _like_token(routed, share)
    sizes = _shape(routed, everywhere, share)
    wrap_triton(_combine)[(len(share),)](routed, everywhere, slot, share, out, len(share), c, **sizes)
    return out


def _like_token(routed: Tensor, share: Tensor) -> Tensor:
    return routed.new_empty(share.shape[0], routed.shape[-1])


@expert_combine.register_fake
def _(routed, everywhere, slot, share, c):
    return _like_token(routed, share)


@operator
def expert_combine_backward(
    routed: Tensor, everywhere: Tensor, slot: Tensor, share: Tensor, dout: Tensor, c: float
) -> tuple[Tensor, Tensor, Tensor]:
    routed, everywhere, slot, share, dout = (x.contiguous() for x in (routed, everywhere, slot, share, dout))
    drouted, deverywhere, dshare = (torch.empty_like(x) for x in (routed, everywhere, share))
    grads = drouted, deverywhere, dshare
    sizes = _shape(routed, everywhere, share)
    wrap_triton(_combine_back)[(len(share),)](routed, everywhere, slot, share, dout, *grads, len(share), c, **sizes)
    return grads


@expert_combine_backward.register_fake
def _(routed, everywhere, slot, share, dout, c):
    return tuple(x.new_empty(x.shape) for x in (routed, everywhere, share))


def _setup_combine(ctx, inputs, output) -> None:
    *tensors, ctx.c = inputs
    ctx.save_for_backward(*tensors)


def _gradient_combine(ctx, dout):
    routed, everywhere, share = torch.ops.leafward.expert_combine_backward(*ctx.saved_tensors, dout, ctx.c)
    return routed, everywhere, None, share, None


expert_combine.register_autograd(_gradient_combine, setup_context=_setup_combine)


@triton.jit
def _curvature(theta_ptr, expert, mask, low, high):
    """c_e = low (high/low)^sigmoid(θ_e), as in `leafward.geometry.Curvature`."""
    theta = tl.load(theta_ptr + expert, mask=mask, other=0.0).to(tl.float32)
    return low * tl.exp(tl.log(high / low) * tl.sigmoid(theta))


@triton.jit
def _hidden(
    t_ptr, order_ptr, expert_ptr, routed_ptr, theta_ptr, w_ptr, b_ptr, h_ptr, t_h_ptr,
    shared_ptr, shared_theta_ptr, shared_w_ptr, shared_b_ptr, shared_h_ptr, shared_t_h_ptr, tokens, low, high, c,
    K: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row of a routed expert, or behind those one of a shared expert."""
    c, low, high = single(c), single(low), single(high)
    row = tl.program_id(0).to(tl.int64)
    if row < tokens * K:
        expert, token = tl.load(expert_ptr + row), tl.load(order_ptr + row) // K
        own, t = _curvature(theta_ptr, expert, True, low, high), tl.load(t_ptr + token).to(tl.float32)
        _hidden_row(
            routed_ptr, w_ptr, b_ptr, h_ptr, t_h_ptr, t, tl.sqrt(c / own), own, expert, row, HIDDEN, BLOCK
        )  # fmt: skip
    else:
        row -= tokens * K
        expert, token = row // tokens, row % tokens
        own, t = _curvature(shared_theta_ptr, expert, True, low, high), tl.load(t_ptr + token).to(tl.float32)
        _hidden_row(
            shared_ptr, shared_w_ptr, shared_b_ptr, shared_h_ptr, shared_t_h_ptr, t, tl.sqrt(c / own), own, expert, row,
            HIDDEN, BLOCK,
        )  # fmt: skip


@operator
def expert_hidden(
    t: Tensor,
    order: Tensor,
    expert: Tensor,
    routed: Tensor,
    theta: Tensor,
    w: Tensor,
    b: Tensor,
    shared: Tensor,
    shared_theta: Tensor,
    shared_w: Tensor,
    shared_b: Tensor,
    low: float,
    high: float,
    c: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    at = [x.contiguous() for x in (t, order, expert)]
    own = [x.contiguous() for x in (routed, theta, w, b)]
    others = [x.contiguous() for x in (shared, shared_theta, shared_w, shared_b)]
    h, shared_h = _like_hidden(routed), _like_hidden(shared)
    (block,), warps = tile(h[0].shape[-1])
    sizes = {"K": len(order) // len(t), "HIDDEN": h[0].shape[-1], "BLOCK": block, "num_warps": warps}
    grid = (len(routed) + len(shared),)
    wrap_triton(_hidden)[grid](*at, *own, *h, *others, *shared_h, len(t), low, high, c, **sizes)
    return *h, *shared_h


@expert_hidden.register_fake
def _(t, order, expert, routed, theta, w, b, shared, *others):
    return *_like_hidden(routed), *_like_hidden(shared)


@triton.jit
def _blend(
    expert_ptr, slot_ptr, share_ptr, routed_ptr, routed_t_ptr, theta_ptr, w_ptr, b_ptr,
    shared_ptr, shared_t_ptr, shared_theta_ptr, shared_w_ptr, shared_b_ptr, out_ptr, tokens, low, high, c,
    K: tl.constexpr, S: tl.constexpr, WIDTH: tl.constexpr, POINTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    c, low, high = single(c), single(low), single(high)
    token, lane = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)[None, :]
    index, mask = tl.arange(0, POINTS)[:, None], lane < WIDTH
    chosen = index < K
    row = tl.load(slot_ptr + token * K + index, mask=chosen, other=0)
    weight = tl.load(share_ptr + token * K + index, mask=chosen, other=0.0).to(tl.float32)
    expert = tl.load(expert_ptr + row, mask=chosen, other=0)
    own = expert * WIDTH + lane
    x = tl.load(routed_ptr + row * WIDTH + lane, mask=chosen & mask, other=0.0).to(tl.float32)
    t = tl.load(routed_t_ptr + row, mask=chosen, other=0.0)
    curvature = _curvature(theta_ptr, expert, chosen, low, high)
    w = tl.load(w_ptr + own, mask=chosen & mask, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + own, mask=chosen & mask, other=0.0).to(tl.float32)
    if S > 0:
        shared = (index >= K) & (index < K + S)
        row, own = (index - K) * tokens + token, (index - K) * WIDTH + lane
        weight = tl.where(shared, 1.0, weight)
        x += tl.load(shared_ptr + row * WIDTH + lane, mask=shared & mask, other=0.0).to(tl.float32)
        t += tl.load(shared_t_ptr + row, mask=shared, other=0.0)
        curvature = tl.where(shared, _curvature(shared_theta_ptr, index - K, shared, low, high), curvature)
        w += tl.load(shared_w_ptr + own, mask=shared & mask, other=0.0).to(tl.float32)
        b += tl.load(shared_b_ptr + own, mask=shared & mask, other=0.0).to(tl.float32)
    x = tl.sqrt(curvature / c) * (x + t * w + b)
    a = tl.sum(weight * x, axis=0)[None, :]
    length = tl.sqrt(tl.sum(a * a, axis=1))[:, None]
    r = tl.maximum(tl.sqrt(tl.sum(x * x, axis=1))[:, None], 1e-18)
    astray = x - r * (a / tl.maximum(length, 1e-18))
    bend = 0.5 * tl.sqrt(c) * tl.sum(astray * astray, axis=1)[:, None] / r
    cosh = tl.sqrt(1.0 + c * r * r)
    time = tl.sum(weight * cosh, axis=0)[None, :]
    q = (time + tl.sqrt(c) * length) * tl.sum(weight * (1.0 / (cosh + tl.sqrt(c) * r) + bend), axis=0)[None, :]
    tl.store(out_ptr + token * WIDTH + lane, (a / tl.sqrt(q)).to(out_ptr.dtype.element_ty), mask=mask)


@operator
def expert_blend(
    expert: Tensor,
    slot: Tensor,
    share: Tensor,
    routed: Tensor,
    routed_time: Tensor,
    theta: Tensor,
    w: Tensor,
    b: Tensor,
    shared: Tensor,
    shared_time: Tensor,
    shared_theta: Tensor,
    shared_w: Tensor,
    shared_b: Tensor,
    low: float,
    high: float,
    c: float,
) -> Tensor:
    rows = [x.contiguous() for x in (expert, slot, share, routed, routed_time, theta, w, b)]
    everywhere = [x.contiguous() for x in (shared, shared_time, shared_theta, shared_w, shared_b)]
    out = _like_token(routed, share)
    sizes = _shape(routed, shared, share)
    sizes["POINTS"] = triton.next_power_of_2(sizes["K"] + sizes["S"])
    wrap_triton(_blend)[(len(share),)](*rows, *everywhere, out, len(share), low, high, c, **sizes | {"num_warps": 4})
    return out


@expert_blend.register_fake
def _(expert, slot, share, routed, *others):
    return _like_token(routed, share)
