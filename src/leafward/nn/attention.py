"""Multi-head attention and latent attention over points of the hyperboloid."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leafward.errors import UsageError
from leafward.nn import kernels
from leafward.nn.lanes import (
    Visible,
    centroid_lanes,
    dispatch,
    key_lanes,
    pad_lanes,
    query_lanes,
    value_lanes,
)
from leafward.nn.linear import Linear
from leafward.nn.norm import RMSNorm
from leafward.nn.rotary import Table, rotate
from leafward.nn.space import LORENTZ, Space, positive, working_dtype

CAUSAL = Visible()
Store = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""A cache's way in: takes the new keys and values (B, G, T, ·), gives all of them so far (B, G, S, ·)."""


class _Scored(nn.Module):
    """What both kinds share: a learned positive factor on the scores, and the way out of the heads."""

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
        total = dispatch(q, k, v, rule)
        return self.out.of_lanes(centroid_lanes(total, self.head_width, self.space).transpose(1, 2))


class Attention(_Scored):
    """Multi-head Lorentz attention (B, T, width) -> (B, T, width).

    Each head's query, key and value is a point with `head_width` space coordinates; the score is minus the squared
    Lorentzian distance, the output the Lorentzian centroid of the values. `kv_heads` below `heads` gives
    grouped-query attention. `score_scale` is the start of the learned factor on ⟨q,k⟩_L (default 1/√head_width; the
    authors' 2/τ is 2/√(heads · (head_width + 1))); `sharpness` multiplies it (see :class:`Stretch`).
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
        self.kv_heads = kv_heads
        self.qkv = Linear(width, (heads + 2 * kv_heads) * head_width, space=space)

    def forward(
        self,
        s: Tensor,
        table: Table | None = None,
        rule: Visible = CAUSAL,
        store: Store | None = None,
        t: Tensor | None = None,
    ) -> Tensor:
        """s (B,T,width), t (B,T,1): its time, where the caller has it. The store keeps lanes, ready for the product."""
        q, k, v = self.lanes(s, t, table)
        if store is not None:
            k, v = store(k, v)
        return self.leave(q, k, v, rule)

    def lanes(self, s: Tensor, t: Tensor | None, table: Table | None) -> tuple[Tensor, Tensor, Tensor]:
        """Lanes of queries (B,H,T,·), keys and values (B,G,T,·)."""
        qkv, space = self.qkv, self.space
        served = kernels.serve(s) and working_dtype(s).itemsize == 2
        if served and table is not None and qkv.time_weight is not None and qkv.bias is not None:
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
        store: Store | None = None,
        t: Tensor | None = None,
    ) -> Tensor:
        """s (B,T,width), t (B,T,1): its time, where the caller has it. The store keeps :meth:`remembered`."""
        q = self.queries(s, t, table)
        latent, k_rope = self.compressed(s, t, table)
        k_nope, v = self.expanded(latent)
        k = torch.cat([k_nope, k_rope.expand(-1, self.heads, -1, -1)], dim=-1)
        if store is not None:
            memory, _ = store(self.remembered(latent, k_rope, k, v), k[:, :1, :, :0])
            if memory.shape[2] > s.shape[1]:
                return self.recalled(q, memory, rule)
        space = self.space
        return self.leave(query_lanes(q, self.scale, space), key_lanes(k, space), value_lanes(v, space), rule)

    def remembered(self, latent: Tensor, k_rope: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """What the cache keeps of each token, (B,1,T,·): [latent; its time; k_rope; times of keys; times of values],
        that is latent + 1 + rope + 2·heads numbers; in flat space latent + rope."""
        if not self.space.curved:
            return torch.cat([latent.unsqueeze(1), k_rope], dim=-1)
        times = [self.space.time(x).permute(0, 3, 2, 1).to(k.dtype) for x in (k, v)]
        return torch.cat(
            [latent.unsqueeze(1), self.space.time(latent).unsqueeze(1).to(k.dtype), k_rope, *times], dim=-1
        )

    def recalled(self, q: Tensor, memory: Tensor, rule: Visible) -> Tensor:
        """Attention straight to the cache (B,1,S,·), with `expand` absorbed into queries and outputs. It is exact:

        q·k = (W_kᵀq)·[t_c; c] + q_rope·k_rope − t_q t_k, plus q·b_k, which is one number for all keys, and
        Σ w v = W_v Σ w [t_c; c] + b_v, while Σ w t_v is a sum over times that the cache keeps. All heads share the
        cache's lanes; a head's own times sit in lanes where the other heads' queries are zero.
        """
        weight, times, bias = self._expansion()
        nope, rope = q.split([self.nope_width, self.rope_width], dim=-1)
        own = torch.eye(self.heads, dtype=q.dtype, device=q.device)[:, None]
        lanes = [nope @ weight[:, : self.nope_width], rope]
        if times is not None:
            lanes.insert(1, nope @ times[:, : self.nope_width])
            lanes.append(-self.space.time(q).to(q.dtype) * own)
        memory = pad_lanes([memory])
        query = pad_lanes(lanes, memory.shape[-1]) * self.scale.to(q.dtype)
        total = dispatch(query, memory, memory, rule)
        value = total[..., : self.latent] @ weight[:, self.nope_width :].mT + bias
        if times is None:
            return self.out.of_lanes(value.transpose(1, 2))
        value = value + total[..., self.latent : self.latent + 1] * times[:, self.nope_width :].mT
        end = self.latent + 1 + self.rope_width + self.heads
        t = (total[..., end : end + self.heads] * own).sum(dim=-1, keepdim=True)
        return self.out.of_lanes(centroid_lanes(pad_lanes([value, t]), self.value_width, self.space).transpose(1, 2))

    def _expansion(self) -> tuple[Tensor, Tensor | None, Tensor]:
        """`expand` by heads: weight (H, nope+value, latent), its time column, the values' bias (H, 1, value)."""
        expand = self.expand
        assert expand.bias is not None
        times = None if expand.time_weight is None else expand.time_weight.unflatten(0, (self.heads, -1))
        bias = expand.bias.unflatten(0, (self.heads, 1, -1))[..., self.nope_width :]
        return expand.weight.unflatten(0, (self.heads, -1)), times, bias

    def queries(self, s: Tensor, t: Tensor | None, table: Table) -> Tensor:
        """(B,T,width) -> (B,H,T,nope+rope)."""
        q = self.query(s, t) if isinstance(self.query, Linear) else self.query(s)
        q = q.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        nope, rope = q.split([self.nope_width, self.rope_width], dim=-1)
        return torch.cat([nope, rotate(rope, table)], dim=-1)

    def compressed(self, s: Tensor, t: Tensor | None, table: Table) -> tuple[Tensor, Tensor]:
        """What a token leaves behind: latent point (B,T,latent) and rotated shared key (B,1,T,rope)."""
        latent, rope = self.compress(s, t).split([self.latent, self.rope_width], dim=-1)
        return self.latent_norm(latent), rotate(rope.unsqueeze(1), table)

    def expanded(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Keys without position (B,H,T,nope) and values (B,H,T,value) of latent points (B,T,latent)."""
        both = self.expand(latent).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k_nope, v = both.split([self.nope_width, self.value_width], dim=-1)
        return k_nope, v
