"""Multi-head attention and latent attention over points of the hyperboloid."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leafward.errors import UsageError
from leafward.geometry.lorentz import centroid_of_sum
from leafward.geometry.scalars import wide
from leafward.nn import kernels
from leafward.nn.lanes import (
    BLOCK,
    Visible,
    centroid_lanes,
    dispatch,
    key_lanes,
    masked,
    query_lanes,
    value_lanes,
)
from leafward.nn.linear import Linear, weight_and_bias
from leafward.nn.norm import RMSNorm
from leafward.nn.rotary import Table, rotate
from leafward.nn.space import LORENTZ, Space, positive, working_dtype

CAUSAL = Visible()
Store = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""A cache's way in: takes the new keys and values (B, G, T, ·), gives all of them so far (B, G, S, ·)."""


@dataclass(frozen=True)
class PointStore:
    """A cache that keeps the space parts of keys and values, all of one width (B,G,T,width), positions applied; their
    times follow from them."""

    update: Store
    width: int


class _Scored(nn.Module):
    """What both kinds share: a learned positive factor on the scores, and the output projection of the heads.

    `layer_idx`, `is_causal` and `num_key_value_groups` are what attention functions of transformers ask for.
    """

    layer_idx: int | None = None
    """Which layer of a model it is, for caches and attention functions that tell layers apart."""
    is_causal = True
    num_key_value_groups = 1

    def __init__(self, width: int, heads: int, head_width: int, score_scale: float, sharpness: float, space: Space):
        super().__init__()
        if not 0.0 < score_scale < math.inf:
            raise UsageError(f"score_scale must be a positive finite number, got {score_scale!r}")
        self.heads, self.head_width, self.space = heads, head_width, space
        self.score_scale, self.sharpness = score_scale, sharpness
        self.log_scale = nn.Parameter(torch.empty(1))
        self.out = Linear(heads * head_width, width, points=heads, space=space)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.log_scale, math.log(self.score_scale))

    @property
    def scale(self) -> Tensor:
        """The factor on ⟨q,k⟩_L, (1,)."""
        return torch.exp(self.log_scale) * self.sharpness

    def leave(self, q: Tensor, k: Tensor, v: Tensor, rule: Visible) -> Tensor:
        """Lanes q, k, v (B, H or G, T or S, ·) -> (B, T, width)."""
        needed = -(-(self.head_width + 2) // 8) * 8  # values may come wider, to meet the queries
        total = dispatch(q, k, v, rule, self)[..., :needed]
        return self.out.of_lanes(centroid_lanes(total, self.head_width, self.space).transpose(1, 2))

    def by_points(self, q: Tensor, k: Tensor, v: Tensor, rule: Visible, store: PointStore) -> Tensor:
        """Space parts of queries (B,H,T,·), keys and values (B,G,T,·), and those that the store has -> (B,T,width)."""
        widths = k.shape[-1], v.shape[-1]
        k, v = store.update(*(F.pad(x, (0, store.width - x.shape[-1])) for x in (k, v)))
        k, v, space = k[..., : widths[0]], v[..., : widths[1]], self.space
        return self.leave(query_lanes(q, self.scale, space), key_lanes(k, space), value_lanes(v, space), rule)


class Attention(_Scored):
    """Multi-head Lorentz attention (docs/helm.md, eq. 7 to 9): (B, T, width) -> (B, T, width).

    Each head's query, key and value is a point with `head_width` space coordinates; the score is minus the squared
    Lorentzian distance, the output the Lorentzian centroid of the values. `kv_heads` below `heads` gives
    grouped-query attention. `score_scale` is the start of the learned factor on ⟨q,k⟩_L (default 1/√head_width; the
    authors' 2/τ is 2/√(heads · (head_width + 1))); `sharpness` multiplies it (see `Stretch`).
    """

    def __init__(
        self,
        width: int,
        heads: int,
        head_width: int | None = None,
        kv_heads: int | None = None,
        score_scale: float | None = None,
        sharpness: float = 1.0,
        space: Space = LORENTZ,
    ) -> None:
        positive(width=width, heads=heads)
        if head_width is None and width % heads:
            raise UsageError(f"width={width} does not split into heads={heads}; give head_width")
        head_width, kv_heads = head_width or width // heads, kv_heads or heads
        if heads % kv_heads:
            raise UsageError(f"heads={heads} is not a multiple of kv_heads={kv_heads}")
        super().__init__(width, heads, head_width, score_scale or head_width**-0.5, sharpness, space)
        self.kv_heads, self.num_key_value_groups = kv_heads, heads // kv_heads
        self.qkv = Linear(width, (heads + 2 * kv_heads) * head_width, space=space)

    def forward(
        self,
        s: Tensor,
        table: Table | None = None,
        rule: Visible = CAUSAL,
        store: Store | PointStore | None = None,
        t: Tensor | None = None,
    ) -> Tensor:
        """s (B,T,width), t (B,T,1): its time, where the caller has it. The store keeps lanes, ready for the product."""
        if isinstance(store, PointStore):
            return self.by_points(*self.project(s, t, table), rule, store)
        q, k, v = self.lanes(s, t, table)
        if store is not None:
            k, v = store(k, v)
        return self.leave(q, k, v, rule)

    def lanes(self, s: Tensor, t: Tensor | None, table: Table | None) -> tuple[Tensor, Tensor, Tensor]:
        """Lanes of queries (B,H,T,·), keys and values (B,G,T,·)."""
        qkv, space = self.qkv, self.space
        served = kernels.serve(s) and kernels.head_lanes_fits(working_dtype(s))
        if served and table is not None and qkv.plain and qkv.time_weight is not None and qkv.bias is not None:
            t = space.time(s) if t is None else t
            parts = F.linear(s, qkv.weight), qkv.bias, t, qkv.time_weight
            return kernels.head_lanes(*parts, table, self.scale, self.heads, self.kv_heads, space.c)
        q, k, v = self.project(s, t, table)
        return query_lanes(q, self.scale, space), key_lanes(k, space), value_lanes(v, space)

    def project(self, s: Tensor, t: Tensor | None, table: Table | None) -> tuple[Tensor, Tensor, Tensor]:
        """Space parts of queries (B,H,T,d), keys and values (B,G,T,d), positions applied."""
        heads = self.qkv(s, t).unflatten(-1, (self.heads + 2 * self.kv_heads, -1)).transpose(1, 2)
        q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        return (q, k, v) if table is None else (rotate(q, table), rotate(k, table), v)


class LatentAttention(_Scored):
    """HELM's HMLA (B, T, width) -> (B, T, width): keys and values from one latent point per token.

    Equations 10 and 11 of docs/helm.md.

    A head's query and key join `nope_width` coordinates without position and `rope_width` with HoPE (those of the
    key shared by all heads), and the time is that of the joined point. `latent` is the width of the latent
    key/value point, `query_latent` of the latent query (None: queries straight from the stream). All widths count
    space coordinates only.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        latent: int,
        nope_width: int,
        rope_width: int,
        value_width: int,
        query_latent: int | None = None,
        score_scale: float | None = None,
        sharpness: float = 1.0,
        eps: float = 1e-6,
        space: Space = LORENTZ,
    ) -> None:
        positive(width=width, heads=heads, latent=latent, nope_width=nope_width, rope_width=rope_width)
        positive(value_width=value_width)
        joined = nope_width + rope_width
        super().__init__(width, heads, value_width, score_scale or joined**-0.5, sharpness, space)
        self.latent, self.nope_width, self.rope_width, self.value_width = latent, nope_width, rope_width, value_width
        if query_latent is None:
            self.query = Linear(width, heads * joined, space=space)
        else:
            self.query = nn.Sequential(
                Linear(width, query_latent, space=space),
                RMSNorm(query_latent, eps),
                Linear(query_latent, heads * joined, space=space),
            )
        self.compress = Linear(width, latent + rope_width, space=space)
        self.latent_norm = RMSNorm(latent, eps)
        self.expand = Linear(latent, heads * (nope_width + value_width), space=space)

    def forward(
        self,
        s: Tensor,
        table: Table,
        rule: Visible = CAUSAL,
        store: Store | PointStore | None = None,
        t: Tensor | None = None,
    ) -> Tensor:
        """s (B,T,width), t (B,T,1): its time, where the caller has it. The store keeps `remembered`."""
        if self.space.curved and t is None:
            t = self.space.time(s)
        points = store if isinstance(store, PointStore) else None
        store = None if isinstance(store, PointStore) else store
        if store is not None and self.fits_decoding(s, table, rule):
            return self.decoded(s, t, table, rule, store)
        latent, latent_t, k_rope = self.compressed(s, t, table)
        if store is None and points is None and self.fits_lanes(s):
            return self.leave(*self.kernel_lanes(s, t, latent, latent_t, k_rope, table), rule)
        q, heads = self.queries(s, t, table), self.expand(latent, latent_t).unflatten(-1, (self.heads, -1))
        if store is not None:
            memory = store(*self.remembered(latent, latent_t, k_rope, heads))
            if memory[0].shape[2] > s.shape[1]:
                return self.recalled(q, *memory, rule)
        k_nope, v = heads.transpose(1, 2).split([self.nope_width, self.value_width], dim=-1)
        k, space = torch.cat([k_nope, k_rope.expand(-1, self.heads, -1, -1)], dim=-1), self.space
        if points is not None:
            return self.by_points(q, k, v, rule, points)
        return self.leave(query_lanes(q, self.scale, space), key_lanes(k, space), value_lanes(v, space), rule)

    def fits_lanes(self, s: Tensor) -> bool:
        """Whether the kernel of `kernel_lanes` takes this."""
        fits = kernels.latent_lanes_fits(self.nope_width, working_dtype(s))
        return self.space.curved and fits and kernels.serve(s) and self._last_query().plain and self.expand.plain

    def fits_decoding(self, s: Tensor, table: Table, rule: Visible) -> bool:
        """Whether the kernels of `decoded` take this: one token per sequence, without gradients."""
        if s.shape[1] > 1 or not rule.causal or rule.given is not None or not kernels.serve_inference(s):
            return False
        narrow = 2 * table[0].shape[-1] <= self.rope_width
        plain = all(linear.plain for linear in (self._last_query(), self.compress, self.expand, self.out))
        return narrow and plain and kernels.decoding_fits(self.latent, self.rope_width, working_dtype(s), s.device)

    def decoded(self, s: Tensor, t: Tensor | None, table: Table, rule: Visible, store: Store) -> Tensor:
        """One token per sequence (B,1,width) with the cache, by kernels: what `remembered` and `recalled` do."""
        space, norm, expansion = self.space, self.latent_norm, _parameters(self.expand)
        shape = self.heads, self.nope_width, norm.eps, space.c
        queries, latents = _mapped(*self.asking(s, t)), _mapped(self.compress, s, t)
        query, rank, *new = kernels.latent_ask(queries, latents, norm.weight, expansion, table, self.scale, *shape)
        memory = store(*new)
        seen = rule.places(1, memory[0].shape[2], s.device), rule.window, rule.documents
        maps = expansion, _parameters(self.out), self.nope_width
        return kernels.latent_recall((query, rank), memory, *seen, *maps, space.c)

    def kernel_lanes(
        self, s: Tensor, t: Tensor | None, latent: Tensor, latent_t: Tensor | None, k_rope: Tensor, table: Table
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Lanes of queries, keys and values, each (B,H,T,·)."""
        queries, latents = _summands(*self.asking(s, t)), _summands(self.expand, latent, latent_t)
        return kernels.latent_lanes(queries, latents, k_rope.squeeze(1), table, self.scale, self.heads, self.space.c)

    def asking(self, s: Tensor, t: Tensor | None) -> tuple[Linear, Tensor, Tensor | None]:
        """The linear map that gives the queries, what it is given, and the time of that."""
        if isinstance(self.query, Linear):
            return self.query, s, t
        compress, norm, expand = self.query
        assert isinstance(compress, Linear)
        assert isinstance(norm, RMSNorm)
        assert isinstance(expand, Linear)
        return expand, *norm.lifted(compress(s, t), self.space)

    def _last_query(self) -> Linear:
        """The linear map that gives the queries."""
        linear = self.query if isinstance(self.query, Linear) else self.query[-1]
        assert isinstance(linear, Linear)
        return linear

    def queries(self, s: Tensor, t: Tensor | None, table: Table) -> Tensor:
        """(B,T,width) -> (B,H,T,nope+rope)."""
        linear, x, x_t = self.asking(s, t)
        q = linear(x, x_t).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        nope, rope = q.split([self.nope_width, self.rope_width], dim=-1)
        return torch.cat([nope, rotate(rope, table)], dim=-1)

    def compressed(self, s: Tensor, t: Tensor | None, table: Table) -> tuple[Tensor, Tensor | None, Tensor]:
        """What a token leaves behind: latent point (B,T,latent), its time, and rotated shared key (B,1,T,rope)."""
        latent, rope = self.compress(s, t).split([self.latent, self.rope_width], dim=-1)
        return *self.latent_norm.lifted(latent, self.space), rotate(rope.unsqueeze(1), table)

    def remembered(
        self, latent: Tensor, latent_t: Tensor | None, k_rope: Tensor, heads: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What the cache keeps of each token: [latent; k_rope] (B,1,T,·) and [time of latent; times of keys; times of
        values] (B,1,T,·), that is latent + rope + 1 + 2·heads numbers; in flat space there are no times.

        Apart from each other, so that the points keep an aligned width: products read the cache as it lies.
        """
        points = torch.cat([latent.unsqueeze(1), k_rope], dim=-1)
        if latent_t is None:
            return points, points[..., :0]
        # Keys and values in sums of one length, so that one kernel gives them all.
        span = max(heads.shape[-1], self.rope_width)
        own, shared = (F.pad(wide(x), (0, span - x.shape[-1])).square() for x in (heads, k_rope.transpose(1, 2)))
        is_key = torch.arange(span, device=own.device) < self.nope_width
        k_t = torch.sqrt(1.0 / self.space.c + (torch.where(is_key, own, 0.0) + shared).sum(dim=-1))
        v_t = torch.sqrt(1.0 / self.space.c + torch.where(is_key, 0.0, own).sum(dim=-1))
        return points, torch.cat([latent_t, k_t, v_t], dim=-1).to(points.dtype).unsqueeze(1)

    def recalled(self, q: Tensor, points: Tensor, times: Tensor, rule: Visible) -> Tensor:
        """Attention of queries (B,H,T,·) straight to the cache (B,1,S,·), with `expand` absorbed into queries and
        outputs -> (B,T,width). It is exact:

        q·k = (W_kᵀq)·[t_c; c] + q_rope·k_rope − t_q t_k, plus q·b_k, which is one number for all keys, and
        Σ w v = W_v Σ w [t_c; c] + b_v, while Σ w t_v is a sum over times that the cache keeps. What belongs to times
        is a rank-one term of the scores and a sum beside the softmax: no product of its own.

        Queries come by blocks, so that no T × S scores are held.
        """
        at = rule.places(q.shape[2], points.shape[2], q.device)
        keys = torch.arange(points.shape[2], device=q.device)
        step = max(1, BLOCK // self.heads)
        blocks = []
        for first in range(0, q.shape[2], step):
            part = slice(first, first + step)
            seen = rule.mask(len(q), at[part], keys) if rule.given is None else rule.given[:, :, part]
            blocks.append(self._recall(q[:, :, part], points[:, 0], times[:, 0], seen))
        return torch.cat(blocks, dim=1)

    def _recall(self, q: Tensor, points: Tensor, times: Tensor, seen: Tensor) -> Tensor:
        """One block of `recalled`: points and times (B,S,·), the mask of the queries (B,·,T,S)."""
        weight, column, bias = self._expansion(q)
        times = wide(times).mT.unsqueeze(2)  # (B, 1 + 2H, 1, S): of latent points, of keys, of values
        nope, rope = q.split([self.nope_width, self.rope_width], dim=-1)
        scale = self.scale.to(wide(q).dtype)
        absorbed = torch.einsum("bhtd,hdr->bhtr", nope, weight[:, : self.nope_width])
        query = (scale * torch.cat([absorbed, rope], dim=-1)).to(q.dtype)
        scores = wide(query.flatten(1, 2) @ points.mT).unflatten(1, q.shape[1:3])
        if column is not None:
            # A sum over all of q, as that of its time is: one kernel gives both.
            along = (wide(q) * F.pad(column[:, : self.nope_width].mT, (0, self.rope_width))).sum(dim=-1, keepdim=True)
            scores = scores + scale * (along * times[:, :1] - self.space.time(q) * times[:, 1 : 1 + self.heads])
        share = masked(scores, seen).softmax(dim=-1).to(q.dtype)
        total = (share.flatten(1, 2) @ points[..., : self.latent]).unflatten(1, q.shape[1:3])
        value = torch.einsum("bhtr,hdr->bhtd", total, weight[:, self.nope_width :]) + bias
        if column is None:
            return self.out(value.transpose(1, 2).flatten(2))
        share = wide(share)
        along = (share * times[:, :1]).sum(dim=-1, keepdim=True)
        value = wide(value) + along * column[:, self.nope_width :].mT
        s, t = centroid_of_sum(value, (share * times[:, 1 + self.heads :]).sum(dim=-1, keepdim=True), self.space.c)
        return self.out(s.to(q.dtype).transpose(1, 2).flatten(2), t.transpose(1, 2).flatten(2))

    def _expansion(self, like: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """`expand` by heads: weight (H, nope+value, latent), its time column, the values' bias (H, 1, value)."""
        expand = self.expand
        weight, bias = expand.weight, expand.bias
        if not expand.plain:
            weight, bias = weight_and_bias(expand.linear, self.latent, like)
        assert bias is not None
        column = None if expand.time_weight is None else expand.time_weight.unflatten(0, (self.heads, -1))
        bias = bias.unflatten(0, (self.heads, 1, -1))[..., self.nope_width :]
        return weight.unflatten(0, (self.heads, -1)), column, bias


def _mapped(linear: Linear, s: Tensor, t: Tensor | None) -> kernels.Mapped:
    """A linear map but for its term of time."""
    return F.linear(s, linear.weight, linear.bias), t, linear.time_weight


def _parameters(linear: Linear) -> tuple[Tensor, Tensor | None, Tensor]:
    assert linear.bias is not None
    return linear.weight, linear.time_weight, linear.bias


def _summands(linear: Linear, s: Tensor, t: Tensor | None) -> kernels.Summands:
    """A curved linear map, before its product, bias and time column are added up."""
    assert linear.bias is not None
    assert linear.time_weight is not None
    assert t is not None
    return F.linear(s, linear.weight), linear.bias, t, linear.time_weight
