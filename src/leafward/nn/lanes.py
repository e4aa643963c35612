"""Lorentz attention as a plain scaled dot product, so that the fused kernels of PyTorch serve it.

Minus the squared Lorentzian distance is 2/c + 2⟨q,k⟩_L: up to a constant, which the softmax forgets, the Euclidean
dot product of [q; -t_q] and [k; t_k]. So the time coordinate rides along as one more lane, negated in the query, and
once more in the value; the weighted sum is then scaled back to the hyperboloid.

Legend: B batch, H heads, G key/value heads (G divides H), T queries, S keys (the queries are the last T of S
positions), d and e space widths of keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils.checkpoint import checkpoint

from leafward.errors import UsageError
from leafward.geometry.lorentz import centroid_of_sum
from leafward.geometry.scalars import wide
from leafward.nn.space import Space

BLOCK = 256
"""Queries per step where a mask is needed and no fused kernel takes it by rule: memory is BLOCK × S, never T × S."""
FLEX_BLOCK = 128
"""Queries, and keys, of a block that the fused kernel either skips or looks into."""


Backend = Callable[[torch.nn.Module, Tensor, Tensor, Tensor], Tensor]
"""The module that attends, augmented queries (B,H,T,w), keys and values (B,G,S,w) -> softmax(q kᵀ) v, (B,H,T,w)."""


@dataclass(frozen=True)
class Visible:
    """Which keys a query sees. Build it once per batch with `visible`; all layers share it.

    Queries are the last of the keys, unless `positions` (T,) says where they stand: in a cache of fixed size the
    last keys are empty. Where somebody else has made a mask, `given` (B or 1, H or 1, T, S), it alone says what is
    seen: True, or what is added to the scores. A `backend` is another library's attention function, with its own rules.
    """

    causal: bool = True
    window: int | None = None
    documents: Tensor | None = None
    blocks: BlockMask | None = None
    positions: Tensor | None = None
    given: Tensor | None = None
    backend: Backend | None = None

    @property
    def plain(self) -> bool:
        """Nothing but (perhaps) causality."""
        return self.window is None and self.documents is None and self.positions is None and self.given is None

    def __call__(self, batch: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """The rule, on broadcasting indices: True where position `query` sees position `key`."""
        seen = query >= key if self.causal else (query >= 0) & (key >= 0)
        if self.window is not None:
            seen = seen & (query - key < self.window)
            if not self.causal:
                seen = seen & (key - query < self.window)
        if self.documents is not None:
            seen = seen & (self.documents[batch, query] == self.documents[batch, key])
        return seen

    def places(self, queries: int, keys: int, device: torch.device) -> Tensor:
        """Where `queries` queries stand among `keys` keys, (T,)."""
        return torch.arange(keys - queries, keys, device=device) if self.positions is None else self.positions

    def mask(self, batch: int, at: Tensor, keys: Tensor) -> Tensor:
        """(B,1,T,S) for queries at `at` (T,) and keys at `keys` (S,): BLOCK queries at most, or it is large."""
        index = torch.arange(batch, device=at.device)[:, None, None]
        return self(index, at[:, None], keys).expand(batch, -1, -1).unsqueeze(1)


def visible(
    causal: bool = True,
    window: int | None = None,
    documents: Tensor | None = None,
    length: int | None = None,
    device: torch.device | None = None,
    positions: Tensor | None = None,
) -> Visible:
    """Causality, a sliding `window` (a token sees itself and window-1 neighbours), and `documents` (B, S): ids of
    packed sequences, a token sees its own document only. Padding is a document of its own, for instance id -1.

    Given the `length` of the sequences, on a CUDA `device` (by default that of the documents), blocks of keys that no
    query of a block sees are skipped; this holds no S × S tensor. `positions`: see `Visible`.
    """
    if window is not None and window < 1:
        raise UsageError(f"window must be at least 1, got {window}")
    if documents is not None and documents.ndim != 2:
        raise UsageError(f"documents must have shape (batch, length), got {tuple(documents.shape)}")
    rule = Visible(causal, window, documents, positions=positions)
    if device is None and documents is not None:
        device = documents.device
    if rule.plain or positions is not None or length is None or device is None or device.type != "cuda":
        return rule
    return Visible(causal, window, documents, block_mask(rule, length, device))


def block_mask(rule: Visible, length: int, device: torch.device) -> BlockMask:
    """The pairs of blocks that may have something to see, for `flex_attention`, which asks the rule inside of each."""
    ids = torch.zeros(1, length, dtype=torch.long, device=device) if rule.documents is None else rule.documents
    kv_count, kv_index, q_count, q_index = _seen_blocks(ids, rule.causal, rule.window)
    return BlockMask(
        seq_lengths=(length, length),
        kv_num_blocks=kv_count,
        kv_indices=kv_index,
        full_kv_num_blocks=None,
        full_kv_indices=None,
        q_num_blocks=q_count,
        q_indices=q_index,
        full_q_num_blocks=None,
        full_q_indices=None,
        BLOCK_SIZE=(FLEX_BLOCK, FLEX_BLOCK),
        mask_mod=_by_head(rule),
    )


@torch.library.custom_op("leafward::seen_blocks", mutates_args=())
def _seen_blocks(documents: Tensor, causal: bool, window: int | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For each block of queries how many blocks of keys it may see, (B,1,n), and which, those first, (B,1,n,n); then
    the same for keys. Documents are compared by the range of their ids in a block, exact enough where ids ascend.

    An operator of its own, because the fused kernel takes these lists for contiguous, and PyTorch (2.11), where it
    compiles a whole model, lays out what it computes as it likes: with (16, 1024, 4, 1) as strides of (64, 1, 4, 4) the
    kernel read far beyond the list. For the same reason no list of wholly seen blocks is given.
    """
    length, device = documents.shape[1], documents.device
    first = torch.arange(0, length, FLEX_BLOCK, device=device)
    last = (first + FLEX_BLOCK).clamp_max(length) - 1
    seen = first <= last[:, None] if causal else torch.ones(len(first), len(first), dtype=torch.bool, device=device)
    if window is not None:
        near = first[:, None] - last < window
        seen = seen & near if causal else seen & near & near.T
    places = torch.arange(len(first) * FLEX_BLOCK, device=device).clamp_max(length - 1)
    low, high = documents[:, places].unflatten(1, (-1, FLEX_BLOCK)).aminmax(dim=-1)
    seen = seen & (low[:, :, None] <= high[:, None]) & (low[:, None] <= high[:, :, None])
    return *_listed(seen), *_listed(seen.mT)


def _listed(seen: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row of seen (B,n,n) the count, and the columns, those that are seen first: (B,1,n), (B,1,n,n)."""
    order = seen.int().argsort(dim=-1, descending=True, stable=True)
    return seen.sum(dim=-1, dtype=torch.int32).unsqueeze(1).contiguous(), order.int().unsqueeze(1).contiguous()


@_seen_blocks.register_fake
def _(documents: Tensor, causal: bool, window: int | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, blocks = len(documents), -(-documents.shape[1] // FLEX_BLOCK)
    count = documents.new_empty((batch, 1, blocks), dtype=torch.int32)
    index = documents.new_empty((batch, 1, blocks, blocks), dtype=torch.int32)
    return count, index, torch.empty_like(count), torch.empty_like(index)


def _by_head(rule: Visible) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The rule with the argument for the head that block masks want."""
    return lambda batch, head, query, key: rule(batch, query, key)


def attend(q: Tensor, k: Tensor, v: Tensor, scale: Tensor, rule: Visible, space: Space) -> tuple[Tensor, Tensor | None]:
    """Attention of points to points: space parts q (B,H,T,d), k (B,G,S,d), v (B,G,S,e), scale (1,)
    -> centroids (B,H,T,e) and their times (B,H,T,1), which are None in flat space.

    Scores are scale · (1/c + ⟨q,k⟩_L); the authors' temperature τ is 2/scale (docs/helm.md, eq. 7, 8).
    """
    e = v.shape[-1]
    lanes = query_lanes(q, scale, space), key_lanes(k, space), value_lanes(v, space)
    out = centroid_lanes(dispatch(*lanes, rule), e, space)
    return out[..., :e], out[..., e : e + 1] if space.curved else None


def score_lanes(q: Tensor, k: Tensor, scale: Tensor, space: Space) -> tuple[Tensor, Tensor]:
    """Lanes of queries and keys whose dot product is scale · ⟨q,k⟩_L."""
    return query_lanes(q, scale, space), key_lanes(k, space)


def query_lanes(q: Tensor, scale: Tensor, space: Space) -> Tensor:
    """[q; -t_q] · scale: (..., d) -> (..., lanes); the time is left out in flat space.

    In half precision each time takes lanes for its head and tail, h + l = t to twice the precision, and the product is
    h h' + l h' + h l': the padding has room for them, and the time product is the largest term of the score.
    """
    factor = wide(scale)
    if not space.curved:
        return _to_eights((q * factor).to(q.dtype))
    z, t = _padded(q, 3, space)
    head, tail = _head_tail(-factor * t, q.dtype)
    z = (z * factor).to(q.dtype)
    return _filled(z, q.shape[-1], [head] if tail is None else [head, tail, head])


def key_lanes(k: Tensor, space: Space) -> Tensor:
    """[k; t_k], to meet `query_lanes`: (..., d) -> (..., lanes)."""
    if not space.curved:
        return _to_eights(k)
    z, t = _padded(k, 3, space)
    head, tail = _head_tail(t, k.dtype)
    return _filled(z, k.shape[-1], [head] if tail is None else [head, head, tail])


def value_lanes(v: Tensor, space: Space) -> Tensor:
    """[v; t_v]: (..., e) -> (..., lanes). In a half-precision type the time is its nearest whole number and the rest.

    The sum over values comes back rounded to half precision, and the rounding of the time is what spoils t² − |s|²
    most. Where the values are nearly one point, the hard case, their whole numbers are mostly one number, whose
    weighted sum is exact, and the rest is small.
    """
    if not space.curved:
        return _to_eights(v)
    z, t = _padded(v, 2, space)
    if v.dtype.itemsize > 2:
        return _filled(z, v.shape[-1], [t])
    whole = t.round().to(v.dtype)
    return _filled(z, v.shape[-1], [(t - whole).to(v.dtype), whole])


def centroid_lanes(total: Tensor, e: int, space: Space) -> Tensor:
    """Sums over `value_lanes` (..., lanes) -> [s; t; 0…] (..., lanes), points of the hyperboloid.

    In flat space there is no time and nothing to scale back; lanes beyond e are zero already.
    """
    if not space.curved:
        return total
    o, lane = wide(total), torch.arange(total.shape[-1], device=total.device)
    times = (lane == e) | (lane == e + 1)  # without a lane for the whole number, that lane is zero
    t = torch.where(times, o, 0.0).sum(dim=-1, keepdim=True)
    s, t = centroid_of_sum(torch.where(lane < e, o, 0.0), t, space.c)
    return torch.where(lane == e, t, s).to(total.dtype)


def _padded(s: Tensor, halves: int, space: Space) -> tuple[Tensor, Tensor]:
    """s with zero lanes behind, as many as its times need (`halves` in half precision, else one) and to a multiple of
    8, and its time. The norm runs over the zeros too, so that one kernel can do both."""
    z = _to_eights(s, 1 if s.dtype.itemsize > 2 else halves)
    return z, space.time(z)


def _to_eights(s: Tensor, more: int = 0) -> Tensor:
    """s with at least `more` zero lanes behind, to a multiple of 8 as the fused kernels want."""
    width = -(-(s.shape[-1] + more) // 8) * 8
    return s if width == s.shape[-1] else F.pad(s, (0, width - s.shape[-1]))


def _filled(z: Tensor, at: int, lanes: list[Tensor]) -> Tensor:
    """z (..., w) with `lanes` (..., 1) in place of its zeros from `at` on."""
    if torch.compiler.is_compiling():  # joins the kernel that works out the times; cat would cut it in pieces
        index = torch.arange(z.shape[-1], device=z.device)
        for i, lane in enumerate(lanes):
            z = torch.where(index == at + i, lane.to(z.dtype), z)
        return z
    return torch.cat([z[..., :at], *(lane.to(z.dtype) for lane in lanes), z[..., at + len(lanes) :]], dim=-1)


def _head_tail(t: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """t rounded to `dtype`, and what that leaves in a half-precision type."""
    head = t.to(dtype)
    return head, (t - head).to(dtype) if dtype.itemsize == 2 else None


def pad_lanes(lanes: list[Tensor], least: int = 0) -> Tensor:
    """Lanes side by side, filled up with zeros to a multiple of 8 and at least `least`."""
    width = sum(lane.shape[-1] for lane in lanes)
    target = max(least, -(-width // 8) * 8)
    if target == width:
        return torch.cat(lanes, dim=-1)
    return torch.cat([*lanes, lanes[0].new_zeros(*lanes[0].shape[:-1], target - width)], dim=-1)


def dispatch(q: Tensor, k: Tensor, v: Tensor, rule: Visible, module: torch.nn.Module | None = None) -> Tensor:
    """softmax(q kᵀ) v over what `rule` lets through: (B,H,T,w), (B,G,S,w), (B,G,S,e) -> (B,H,T,e).

    The widths of q and v are brought together with zero lanes, since the fused kernels want one width. `module` is who
    asks, for a `backend`.
    """
    width = v.shape[-1]
    if q.shape[-1] != width:
        most = max(q.shape[-1], width)
        q, k, v = (F.pad(x, (0, most - x.shape[-1])) for x in (q, k, v))
    queries, keys = q.shape[2], k.shape[2]
    alike = bool(queries == keys)  # of sizes that an export leaves open, the comparison is no bool yet
    if rule.backend is not None:
        assert module is not None
        out = rule.backend(module, q, k, v)
    elif rule.given is not None:
        mask = rule.given
        out = _sdpa(q, k, v, mask.to(q.dtype) if mask.is_floating_point() else mask)
    elif rule.blocks is not None and alike:
        out = _compiled_flex()(q, k, v, block_mask=rule.blocks, scale=1.0, enable_gqa=q.shape[1] != k.shape[1])
        assert isinstance(out, Tensor)
    elif rule.plain and (alike or not rule.causal or queries == 1):
        out = _sdpa(q, k, v, causal=rule.causal and alike)
    else:
        out = _by_blocks(q, k, v, rule)
    return out[..., :width]


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    if q.shape[2] == 1 and (grouped or mask is not None):
        return _one_query(q, k, v, mask)
    if grouped and q.device.type == "cpu":  # there, enable_gqa falls back to a form that holds T × S scores
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        grouped = False
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=1.0, enable_gqa=grouped)


def _one_query(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """One query per head, (B,H,1,w): the heads of a group are the rows of two products over their shared keys.

    The fused kernels take a mask or groups only in forms that copy the keys or leave most of the device idle.
    """
    scores = wide(q.reshape(*k.shape[:2], -1, q.shape[-1]) @ k.mT)
    if mask is not None:
        if mask.shape[1] > 1:  # one for each head
            mask = mask.reshape(len(mask), *scores.shape[1:3], -1)
        scores = masked(scores, mask)
    return (scores.softmax(dim=-1).to(v.dtype) @ v).reshape(*q.shape[:3], -1)


def masked(scores: Tensor, mask: Tensor) -> Tensor:
    """Scores where a mask is True, -inf elsewhere; a mask of numbers is added."""
    return scores + mask if mask.is_floating_point() else scores.masked_fill(~mask, -torch.inf)


def _by_blocks(q: Tensor, k: Tensor, v: Tensor, rule: Visible) -> Tensor:
    """Blocks of queries, each against the keys it can see at all, under a mask of BLOCK × keys.

    In training a block is computed again in the backward pass; autograd would else keep every block's mask.
    """
    queries, keys = q.shape[2], k.shape[2]
    places = rule.places(queries, keys, q.device)
    again = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    out = []
    for start in range(0, queries, BLOCK):
        stop = min(start + BLOCK, queries)
        first, last = keys - queries + start, keys - queries + stop
        low, high = 0, keys
        if rule.positions is None:
            low = 0 if rule.window is None else max(0, first - rule.window + 1)
            high = last if rule.causal else keys if rule.window is None else min(keys, last + rule.window - 1)
        arguments = (q[:, :, start:stop], k[:, :, low:high], v[:, :, low:high], rule, places[start:stop], low)
        out.append(checkpoint(_block, *arguments, use_reentrant=False) if again else _block(*arguments))
    return torch.cat(out, dim=2)


def _block(q: Tensor, k: Tensor, v: Tensor, rule: Visible, at: Tensor, low: int) -> Tensor:
    return _sdpa(q, k, v, rule.mask(len(q), at, torch.arange(low, low + k.shape[2], device=q.device)))


@cache
def _compiled_flex() -> Callable:
    return torch.compile(flex_attention, dynamic=False)  # masks that depend on the batch do not go with unknown sizes
