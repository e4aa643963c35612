"""The kernels of the cluster mixer as operators of PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from leafward.nn.kernels.launch import operator
from leafward.systems.hcformer.kernels.patches import patches_backward, patches_forward
from leafward.systems.hcformer.kernels.windows import windows_backward, windows_forward


@operator
def cluster_patches(
    e: Tensor, alpha: Tensor, bias: Tensor, rows: int, columns: int, centres: int
) -> tuple[Tensor, Tensor]:
    return patches_forward(e.contiguous(), alpha, bias.contiguous(), (rows, columns), centres)


@cluster_patches.register_fake
def _(e, alpha, bias, rows, columns, centres):
    out = e.new_empty(*e.shape[:-1], e.shape[-1] // 2)
    return out, e.new_empty(2, *e.shape[:-1], dtype=torch.float32)


@operator
def cluster_patches_backward(
    e: Tensor, alpha: Tensor, bias: Tensor, dout: Tensor, dsums: Tensor, rows: int, columns: int, centres: int
) -> tuple[Tensor, Tensor, Tensor]:
    e, bias, dout, dsums = (tensor.contiguous() for tensor in (e, bias, dout, dsums))
    return patches_backward(e, alpha, bias, dout, dsums, (rows, columns), centres)


@cluster_patches_backward.register_fake
def _(e, alpha, bias, dout, dsums, rows, columns, centres):
    return _rooms(e, alpha, bias)


def _rooms(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Gradients are contiguous, whatever the tensors are."""
    return tuple(tensor.new_empty(tensor.shape) for tensor in tensors)


def _keep_patches(ctx, inputs, output) -> None:
    e, alpha, bias, *ctx.sizes = inputs
    ctx.save_for_backward(e, alpha, bias)


def _patches_back(ctx, dout, dsums):
    grads = torch.ops.leafward.cluster_patches_backward(*ctx.saved_tensors, dout, dsums, *ctx.sizes)
    return *grads, None, None, None


cluster_patches.register_autograd(_patches_back, setup_context=_keep_patches)


@operator
def cluster_windows(e: Tensor, sharpness: Tensor, reach: Tensor | None, bias: Tensor) -> Tensor:
    return windows_forward(e.contiguous(), sharpness, reach, bias.contiguous())


@cluster_windows.register_fake
def _(e, sharpness, reach, bias):
    return e.new_empty(e.shape[0], bias.shape[2] * bias.shape[4], e.shape[-1] // 2)


@operator
def cluster_windows_backward(
    e: Tensor, sharpness: Tensor, reach: Tensor | None, bias: Tensor, dout: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    e, bias, dout = (tensor.contiguous() for tensor in (e, bias, dout))
    return windows_backward(e, sharpness, reach, bias, dout)


@cluster_windows_backward.register_fake
def _(e, sharpness, reach, bias, dout):
    return _rooms(e, sharpness, sharpness if reach is None else reach, bias)


def _keep_windows(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _windows_back(ctx, dout):
    saved = ctx.saved_tensors  # once: gradient checkpointing works it out again for every look
    de, dsharpness, dreach, dbias = torch.ops.leafward.cluster_windows_backward(*saved, dout)
    return de, dsharpness, None if saved[2] is None else dreach, dbias


cluster_windows.register_autograd(_windows_back, setup_context=_keep_windows)
