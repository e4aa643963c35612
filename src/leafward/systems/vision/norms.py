"""Batch norm whose statistics are those of the whole batch, over all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce

from leafward.geometry.scalars import wide


class SyncNorm(nn.BatchNorm2d):
    """`nn.BatchNorm2d` on one rank; in training on several, with the mean and variance over the images of all of them,
    so that a model does not depend on how its batch is split. PyTorch's own SyncBatchNorm has no form for the CPU.
    """

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not (self.training and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            return super().forward(x)
        values = wide(x)
        axes = (0, 2, 3)
        count = values.new_full((1,), values.numel() / values.shape[1])
        total = all_reduce(torch.cat([values.sum(dim=axes), count]))
        mean = total[:-1] / total[-1]
        centred = values - mean.view(1, -1, 1, 1)  # in two passes: nothing cancels
        variance = all_reduce(centred.square().sum(dim=axes)) / total[-1]
        self._remember(mean.detach(), variance.detach(), total[-1].detach())
        scale = self.weight * torch.rsqrt(variance + self.eps)
        return (centred * scale.view(1, -1, 1, 1) + self.bias.view(1, -1, 1, 1)).to(x.dtype)

    @torch.no_grad()
    def _remember(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        """The running statistics, with the unbiased variance, as batch norm keeps them."""
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        assert self.momentum is not None
        self.num_batches_tracked.add_(1)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum)
        unbiased = variance * count / (count - 1.0)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), self.momentum)
