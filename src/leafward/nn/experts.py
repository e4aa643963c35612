"""MiCE: a mixture of experts that live in spaces of different curvature (HELM, section on MiCE).

Legend: N tokens, k active experts per token, M = N·k rows (one per token and chosen expert), E routed and S shared
experts, n width, h hidden width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from leafward.errors import UsageError, need
from leafward.geometry import Curvature, lorentz
from leafward.geometry.lorentz import time_of_norm
from leafward.geometry.scalars import norm, wide
from leafward.nn import kernels
from leafward.nn.grouped import affine, collect, grouped_matmul, spread
from leafward.nn.space import LORENTZ, Space, positive, working_dtype

Matmul = Callable[[Tensor, Tensor], Tensor]
"""Rows (..., K) times the matrices (E, K, N) of their experts -> (..., N)."""


class Curvatures(Curvature):
    """One curvature per expert, in log space within bounds, spread evenly there at the start: () -> (count,).

    Fixed unless `trainable`. Bounds that are one number make it the curvature of all (the paper's MiCE-Const).
    """

    def __init__(self, count: int, low: float, high: float, trainable: bool = False) -> None:
        nn.Module.__init__(self)
        fine = 0.0 < low < high < math.inf or (0.0 < low == high < math.inf and not trainable)
        need(fine, "curvatures", "0 < low < high, or low = high where they are not learned", (low, high))
        self.low, self.high = float(low), float(high)
        self.theta = nn.Parameter(torch.empty(count), requires_grad=trainable)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        count = self.theta.shape[0]
        with torch.no_grad():
            self.theta.copy_(torch.logit((torch.arange(count) + 0.5) / count))

    def extra_repr(self) -> str:
        return f"count={self.theta.shape[0]}, low={self.low:g}, high={self.high:g}"


class Gate(nn.Module):
    """Chooses k experts per token: (B,T,n) -> experts (B,T,k), weights (B,T,k) summing to one, balance loss (B).

    Equations 13 and 14 of docs/helm.md.

    p = softmax(s Gᵀ) in float32; the top k of p + bias are chosen and weighted by p, renormalised. `bias` steers the
    choice only and is moved by `rebalance`, not by gradients. The balance loss of a sequence is DeepSeek-V3's,
    Σ_i f_i P_i with f_i the share of choices times E and P_i the mean of p; it is 1 under perfect balance.
    """

    bias: Tensor
    load: Tensor

    def __init__(self, width: int, experts: int, active: int) -> None:
        super().__init__()
        positive(width=width, experts=experts, active=active)
        if active > experts:
            raise UsageError(f"active={active} experts chosen out of only experts={experts}")
        self.experts, self.active = experts, active
        self.weight = nn.Parameter(torch.empty(experts, width))
        self.register_buffer("bias", torch.empty(experts))
        self.register_buffer("load", torch.empty(experts, dtype=torch.int64), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.weight.shape[1] ** -0.5)
        nn.init.zeros_(self.bias)
        nn.init.zeros_(self.load)

    def forward(self, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with torch.autocast(s.device.type, enabled=False):
            p = F.linear(wide(s), self.weight.to(wide(s).dtype)).softmax(dim=-1)
        chosen = (p.detach() + self.bias).topk(self.active, dim=-1).indices
        weights = p.gather(-1, chosen)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        picks = chosen.flatten(1)
        counts = torch.zeros_like(p[:, 0]).scatter_add(1, picks, torch.ones_like(picks, dtype=p.dtype))
        if self.training:
            self.load += counts.detach().sum(dim=0).long()
        balance = self.experts / picks.shape[1] * (counts * p.mean(dim=1)).sum(dim=-1)
        return chosen, weights, balance

    @torch.no_grad()
    def rebalance(self, rate: float = 1e-3) -> None:
        """Once per optimiser step: raise the bias of experts below the mean load, lower it above, by `rate`."""
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(self.load)
        load = self.load.to(self.bias.dtype)
        self.bias += rate * torch.sign(load.mean() - load)
        self.load.zero_()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Gate:
        # Sums of small steps and near-ties of probabilities do not survive a half-precision type.
        super()._apply(lambda x: _moved_wide(fn, x), recurse)
        return self


def _moved_wide(fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    moved = fn(x)
    return moved if moved.dtype.itemsize >= 4 else x.to(moved.device)


@dataclass(frozen=True)
class Sorted:
    """Rows sorted by expert: the expert of each (M,), where each expert's rows end (E,), and how to multiply them."""

    expert: Tensor
    ends: Tensor
    matmul: Matmul


Given = tuple[Tensor, Tensor | None, Sorted]
"""What a bank of experts is given: rows (M, n), their times (M, 1), and how they are sorted."""


class ExpertBank(nn.Module):
    """SwiGLU networks side by side, expert e on the hyperboloid of curvature -c_e (docs/helm.md, eq. 15).

    A point comes over by the homothety √(c/c_e), which takes its time along, and goes back by its inverse; between
    them each expert is a `FeedForward`. The homothety commutes with the products, so rows enter as they are.
    """

    def __init__(
        self, experts: int, width: int, hidden: int, curvatures: tuple[float, float], trainable: bool, space: Space
    ):
        super().__init__()
        positive(experts=experts, width=width, hidden=hidden)
        self.space = space
        self.curvature = Curvatures(experts, *curvatures, trainable=trainable) if space.curved else None
        self.up = ExpertLinear(experts, width, 2 * hidden, space)
        self.down = ExpertLinear(experts, hidden, width, space)

    def forward(self, s: Tensor, t: Tensor | None, rows: Sorted) -> Tensor:
        """s (M, n), its time t (M, 1) -> (M, n)."""
        if self.curvature is None or t is None:
            gate, value = self.up(s, None, rows).chunk(2, dim=-1)
            return self.down(F.silu(gate) * value, None, rows)
        hidden, t, over = self._hidden(self.curvature, s, t, rows)
        return (self.down(hidden, t, rows) / over[rows.expert].unsqueeze(-1)).to(hidden.dtype)

    @property
    def bounds(self) -> tuple[float, float]:
        """Of the curvatures; shared and routed experts of a layer have the same."""
        assert self.curvature is not None
        return self.curvature.low, self.curvature.high

    def parameters_of(self, linear: ExpertLinear) -> kernels.Bank:
        """What kernels need of one of the two maps, on the hyperboloid."""
        assert self.curvature is not None
        assert linear.time_weight is not None
        return self.curvature.theta, linear.time_weight.squeeze(1), linear.bias.squeeze(1)

    def _hidden(self, curvatures: Curvatures, s: Tensor, t: Tensor, rows: Sorted) -> tuple[Tensor, Tensor, Tensor]:
        """The hidden point (M, h) of each row, its time (M, 1), and the factors ρ of the ways over (E,).

        W ρ[t; s] + b = ρ (W [t; s] + b/ρ).
        """
        curvature, bias = curvatures().to(wide(s).dtype), self.up.bias.squeeze(1)
        over = torch.sqrt(self.space.c / curvature)
        if kernels.serve_rows(s) and self.up.time_weight is not None:
            p, w = self.up.product(s, rows), self.up.time_weight.squeeze(1)
            return *kernels.expert_swiglu(p, t, w, bias, over, curvature, rows.expert, rows.ends), over
        factor, c = (x[rows.expert].unsqueeze(-1) for x in (over, curvature))
        u = self.up(s, t, rows, bias / over.unsqueeze(-1))
        gate, value = (factor * u).to(u.dtype).chunk(2, dim=-1)  # not wider: autograd keeps them
        hidden = F.silu(gate) * value
        return hidden, time_of_norm(norm(wide(hidden)), c), over


class ExpertLinear(nn.Module):
    """`Linear` for each of E experts."""

    def __init__(self, experts: int, in_features: int, out_features: int, space: Space) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, in_features, out_features))
        self.time_weight = nn.Parameter(torch.empty(experts, 1, out_features)) if space.curved else None
        self.bias = nn.Parameter(torch.empty(experts, 1, out_features))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.weight.shape[1] ** -0.5)
        nn.init.zeros_(self.bias)
        if self.time_weight is not None:
            nn.init.zeros_(self.time_weight)

    def forward(self, s: Tensor, t: Tensor | None, rows: Sorted, bias: Tensor | None = None) -> Tensor:
        """s (M, in), t (M, 1) -> (M, out); `bias` (E, out) in place of its own."""
        bias = self.bias.squeeze(1) if bias is None else bias
        w = None if self.time_weight is None else self.time_weight.squeeze(1)
        return affine(self.product(s, rows), t, w, bias, rows.expert, rows.ends)

    def product(self, s: Tensor, rows: Sorted) -> Tensor:
        """W_s s alone."""
        dtype = working_dtype(s)
        return rows.matmul(s.to(dtype), self.weight.to(dtype))

    def by_all(self, s: Tensor) -> Tensor:
        """W_s s alone, of rows s (E, N, in) for every expert: -> (E·N, out)."""
        dtype = working_dtype(s)
        return torch.matmul(s.to(dtype), self.weight.to(dtype)).flatten(0, 1)


class MiCE(nn.Module):
    """Mixture of curvature experts (B,T,n) -> (B,T,n) and the balance losses (B) (see `Gate`); docs/helm.md, eq. 16.

    Every token goes to its k routed experts, none is dropped, and to all shared ones. The output is one Lorentzian
    centroid of all of them, routed experts weighted by the gate and shared ones by one: it does not depend on
    their order. In the Euclidean twin it is the plain weighted sum.

    Curvatures are spread evenly in log space within `curvatures`, fixed, or learned within these bounds.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        experts: int,
        active: int,
        shared: int = 0,
        curvatures: tuple[float, float] = (0.2, 5.0),
        learn_curvatures: bool = False,
        space: Space = LORENTZ,
    ) -> None:
        super().__init__()
        self.space = space
        self.gate = Gate(width, experts, active)
        self.routed = ExpertBank(experts, width, hidden, curvatures, learn_curvatures, space)
        self.shared = ExpertBank(shared, width, hidden, curvatures, learn_curvatures, space) if shared else None

    def forward(self, s: Tensor, t: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """s (B,T,n), t (B,T,1): its time, where the caller has it."""
        if 0 in s.shape:  # no tokens: nothing to choose, nothing out of balance
            return s.clone(), wide(s).new_zeros(s.shape[0])
        chosen, weights, balance = self.gate(s)
        if self.space.curved:
            t = (self.space.time(s) if t is None else t).flatten(0, 1)
        rows, share = s.flatten(0, 1), weights.flatten(0, 1)
        order, slot, own = self._sorted(chosen.flatten(0, 1))
        if t is not None and not self.training and kernels.serve_inference(s):
            out = self._blended(rows, t, order, slot, own, share)
        else:
            routed = spread(rows, order, slot), None if t is None else spread(t, order, slot), own
            shared = None if self.shared is None else _copied(self.shared, rows, t)
            out = self._combined(routed, shared, order, slot, share)
        return out.to(s.dtype).view_as(s), balance

    def _combined(self, routed: Given, shared: Given | None, order: Tensor, slot: Tensor, share: Tensor) -> Tensor:
        """Rows (M,·) sorted by `order` (M,) into places `slot` (N,k), with weights `share` (N,k) -> (N,n)."""
        points = self.routed(*routed)
        everywhere = points[:0] if shared is None or self.shared is None else self.shared(*shared)
        if self.space.curved and kernels.serve(points):
            return kernels.expert_combine(points, everywhere, slot, share, self.space.c)
        everywhere = everywhere.view(-1, share.shape[0], points.shape[-1]).transpose(0, 1)
        points = collect(points, order, slot)
        if not self.space.curved:
            return (share.unsqueeze(-1) * points).sum(dim=1) + everywhere.sum(dim=1)
        share = torch.cat([share, share.new_ones(everywhere.shape[:2])], dim=1)
        return lorentz.centroid(torch.cat([points, everywhere], dim=1), share, self.space.c)

    def _blended(self, s: Tensor, t: Tensor, order: Tensor, slot: Tensor, own: Sorted, share: Tensor) -> Tensor:
        """`_combined` without gradients, by one kernel behind the first products and one behind the last."""
        routed, shared, c = self.routed, self.shared, self.space.c
        bank, bounds = shared or routed, routed.bounds
        p = routed.up.product(spread(s, order, slot), own)
        q = p[:0] if shared is None else shared.up.by_all(s.expand(len(shared.up.weight), -1, -1))
        first = (p, routed.parameters_of(routed.up)), (q, bank.parameters_of(bank.up))
        p, t, q, u = kernels.expert_hidden(t, order, own.expert, *first, bounds, c)
        p = routed.down.product(p, own)
        q = p[:0] if shared is None else shared.down.by_all(q.unflatten(0, (-1, len(s))))
        last = (p, t, routed.parameters_of(routed.down)), (q, u, bank.parameters_of(bank.down))
        return kernels.expert_blend(own.expert, slot, share, *last, bounds, c)

    def _sorted(self, chosen: Tensor) -> tuple[Tensor, Tensor, Sorted]:
        """chosen (N,k) -> what sorts its M elements by expert (M,), where each ends up (N,k), and the sorted rows."""
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        places = torch.arange(order.shape[0], device=order.device)
        slot = torch.empty_like(order).scatter(0, order, places).view_as(chosen)
        expert = flat[order]
        every = torch.arange(self.gate.experts, device=order.device)
        ends = torch.searchsorted(expert, every, right=True, out_int32=True)
        return order, slot, Sorted(expert, ends, lambda x, w: grouped_matmul(x, w, ends))


def _copied(bank: ExpertBank, s: Tensor, t: Tensor | None) -> Given:
    """s (N,n), t (N,1) for each of S experts: rows (S·N,n), expert by expert."""
    count, tokens = bank.up.weight.shape[0], s.shape[0]
    each = torch.arange(count, device=s.device)
    rows = Sorted(
        each.repeat_interleave(tokens),
        ((each + 1) * tokens).int(),
        lambda x, w: torch.matmul(x.view(count, tokens, -1), w).flatten(0, 1),
    )
    times = None if t is None else t.expand(count, -1, -1).flatten(0, 1)
    return s.expand(count, -1, -1).flatten(0, 1), times, rows
