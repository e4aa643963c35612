"""Rows sorted into groups, matrix products with one matrix per group, and back; sizes are known to the device only."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from leafward.geometry.scalars import wide


def spread(s: Tensor, order: Tensor, slot: Tensor) -> Tensor:
    """k copies of each row of s (N, n), sorted: row i of the result (M, n) is s[order[i] // k], M = N·k.

    `order` (M,) sorts the copies and `slot` (N, k) says where each ended up. Known to be a permutation, its gradient is
    a sum over k rows; autograd would scatter with atomic adds.
    """
    return _Spread.apply(s, order, slot)  # pyright: ignore[reportReturnType]


def collect(rows: Tensor, order: Tensor, slot: Tensor) -> Tensor:
    """The backward pass of `spread`: (M, n) -> (N, k, n)."""
    return _Collect.apply(rows, order, slot)  # pyright: ignore[reportReturnType]


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx, s: Tensor, order: Tensor, slot: Tensor) -> Tensor:
        ctx.save_for_backward(slot)
        return s[order // slot.shape[1]]

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        (slot,) = ctx.saved_tensors
        return wide(grad[slot]).sum(dim=1).to(grad.dtype), None, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, order: Tensor, slot: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return rows[slot]

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        (order,) = ctx.saved_tensors
        return grad.flatten(0, 1)[order], None, None


def grouped_matmul(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Row i of x (M, K) times weight[e] of (E, K, N), where e is the group of i: -> (M, N).

    Rows are sorted by group; `ends` (E,) int32 is where each group stops, empty groups included. No loop over
    groups and no wait for the device: PyTorch's grouped GEMM where it runs, else a batched product. On the CPU, which
    waits for nothing, the groups are multiplied one by one, each row once.
    """
    if x.dtype == torch.bfloat16 and x.is_cuda and x.shape[-1] % 8 == 0 and weight.shape[-1] % 8 == 0 and _has_kernel():
        return F.grouped_mm(x, weight, offs=ends)
    if x.device.type == "cpu":
        return torch.ops.leafward.grouped_product(x, weight, ends)
    return segment_bmm(x, weight, ends)


@torch.library.custom_op("leafward::grouped_product", mutates_args=(), device_types="cpu")
def _grouped_product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """`grouped_matmul` group by group. As an operator of its own it is one node of a compiled graph, whatever the
    sizes; on the CPU nothing waits for them."""
    out = x.new_empty(x.shape[0], weight.shape[2])
    for matrix, (first, last) in zip(weight, _spans(ends), strict=True):
        torch.mm(x[first:last], matrix, out=out[first:last])
    return out


@torch.library.custom_op("leafward::grouped_outer", mutates_args=(), device_types="cpu")
def _grouped_outer(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    """Σ x_i ⊗ y_i over the rows i of each group: (M, K), (M, N), (E,) -> (E, K, N)."""
    out = x.new_empty(ends.shape[0], x.shape[1], y.shape[1])
    for total, (first, last) in zip(out, _spans(ends), strict=True):
        torch.mm(x[first:last].mT, y[first:last], out=total)
    return out


def _spans(ends: Tensor) -> Iterator[tuple[int, int]]:
    return pairwise([0, *ends.tolist()])


@_grouped_product.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


@_grouped_outer.register_fake
def _(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(ends.shape[0], x.shape[1], y.shape[1])


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _product_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    x, weight, ends = ctx.saved_tensors
    return _grouped_product(grad, weight.mT, ends), _grouped_outer(x, grad, ends), None


def _outer_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    x, y, ends = ctx.saved_tensors
    return _grouped_product(y, grad.mT, ends), _grouped_product(x, grad, ends), None


_grouped_product.register_autograd(_product_gradients, setup_context=_keep)
_grouped_outer.register_autograd(_outer_gradients, setup_context=_keep)


def affine(p: Tensor, t: Tensor | None, w: Tensor | None, b: Tensor, expert: Tensor, ends: Tensor) -> Tensor:
    """p + t w_e + b_e for rows sorted by their expert e: (M, n), (M, 1), (E, n), (E, n), (M,), (E,) -> (M, n).

    The gradients of w and b are products over the rows of each group; autograd would scatter with atomic adds.
    """
    return _Affine.apply(p, t, w, b, expert, ends)  # pyright: ignore[reportReturnType]


class _Affine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, p: Tensor, t: Tensor | None, w: Tensor | None, b: Tensor, expert: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(t, w, expert, ends)
        total = wide(p) + b[expert]
        if t is not None and w is not None:
            total = total + t * w[expert]
        # Not if it has that type: a graph that PyTorch 2.11 compiles would lose all gradients over such a cast.
        return total if total.dtype == p.dtype else total.to(p.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        t, w, expert, ends = ctx.saved_tensors
        ones = torch.ones_like(grad[:, :1])
        if t is None or w is None:
            return grad, None, None, segment_sums(ones, grad, ends)[:, 0], None, None
        dw, db = segment_sums(torch.cat([t.to(grad.dtype), ones], dim=-1), grad, ends).unbind(dim=1)
        return grad, (wide(grad) * w[expert]).sum(dim=-1, keepdim=True), dw.to(w.dtype), db.to(w.dtype), None, None


def segment_sums(factors: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    """Σ factors_i ⊗ rows_i over the rows i of each group: (M, f), (M, n), (E,) -> (E, f, n), in float32 or better."""
    fits = rows.shape[0] > 0 and rows.shape[-1] % 8 == 0 and factors.shape[-1] <= 8
    if rows.dtype == torch.bfloat16 and rows.is_cuda and fits and _has_kernel():
        return torch.ops.leafward.segment_sums(factors, rows, ends)
    group = torch.searchsorted(ends.long(), torch.arange(rows.shape[0], device=rows.device), right=True)
    own = group[:, None] == torch.arange(ends.shape[0], device=rows.device)
    spread = (own[:, :, None] * factors[:, None, :]).flatten(1)
    return wide(spread.mT @ rows).unflatten(0, (ends.shape[0], -1))


@torch.library.custom_op("leafward::segment_sums", mutates_args=())
def _segment_sums(factors: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    # An operator of its own: the grouped GEMM takes groups of any size only where both factors lie row by row in
    # memory, and a compiler that fuses the padding is free to lay it out the other way.
    lanes = F.pad(factors, (0, 8 - factors.shape[-1]))
    return F.grouped_mm(lanes.mT, rows.contiguous(), offs=ends)[:, : factors.shape[-1]].float()


@_segment_sums.register_fake
def _(factors: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(len(ends), factors.shape[-1], rows.shape[-1], dtype=torch.float32)


@torch.compiler.assume_constant_result
def _has_kernel() -> bool:
    return hasattr(F, "grouped_mm") and torch.cuda.get_device_capability() >= (9, 0)


def segment_bmm(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """`grouped_matmul` as one batched product over blocks of rows that lie in one group each.

    A group of m rows fills ⌈m/b⌉ blocks, so ⌈M/b⌉ + E blocks always suffice, whatever the sizes: shapes are static.
    With b near M/E the work is at most about twice the least possible and the weights are copied about twice.
    """
    rows, groups = x.shape[0], weight.shape[0]
    block = max(1, -(-rows // groups))
    blocks = -(-rows // block) + groups
    ends = ends.long()
    starts = F.pad(ends[:-1], (1, 0))
    last_block = ((ends - starts + block - 1) // block).cumsum(0)
    first_block = F.pad(last_block[:-1], (1, 0))
    group = torch.searchsorted(ends, torch.arange(rows, device=x.device), right=True)
    slot = first_block[group] * block + torch.arange(rows, device=x.device) - starts[group]
    spread = x.new_zeros(blocks * block, x.shape[1]).index_copy(0, slot, x)
    owner = torch.searchsorted(last_block, torch.arange(blocks, device=x.device), right=True).clamp_max(groups - 1)
    return torch.bmm(spread.view(blocks, block, -1), weight[owner]).flatten(0, 1)[slot]
