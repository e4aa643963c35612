"""Steps of AdamW for the evidence; on a GPU a step is recorded as a CUDA graph and replayed.

A small model is thousands of small kernels a step: to launch them one by one takes longer than to run them, all the
more when several models are trained on one device. A recorded step is a single launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

WARM_UP = 3
"""Steps taken as usual before one is recorded: they choose algorithms and make the optimizer's state."""
CLIP = 1.0
"""Largest norm of the gradients."""


class Steps:
    """Descends `loss`, a function of tensors: forward, backward, gradients clipped, AdamW.

    `groups` are AdamW's, each with its highest "lr". With `record`, all is on a GPU, `loss` must not look at the values
    of a tensor, and batches should have few different shapes: each has a graph of its own.
    """

    def __init__(
        self,
        loss: Callable[..., Tensor],
        groups: list[dict[str, Any]],
        *,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        record: bool = False,
    ) -> None:
        self.loss, self.record = loss, record
        self.optimizer = torch.optim.AdamW(
            groups, weight_decay=weight_decay, betas=betas, fused=True, capturable=record
        )
        self.peaks = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        if record:  # a graph reads the rate from memory
            for group in self.optimizer.param_groups:
                group["lr"] = torch.tensor(group["lr"], device=self.parameters[0].device)
        self.recorded: dict[tuple[torch.Size, ...], _Recorded] = {}

    def __call__(self, factor: float, *batch: Tensor) -> None:
        """One step with `factor` times the highest rates."""
        for group, peak in zip(self.optimizer.param_groups, self.peaks, strict=True):
            if self.record:
                group["lr"].fill_(peak * factor)
            else:
                group["lr"] = peak * factor
        if not self.record:
            self._step(*batch)
            return
        shapes = tuple(tensor.shape for tensor in batch)
        if shapes not in self.recorded:
            self.recorded[shapes] = _Recorded(self._step, batch)
        self.recorded[shapes](batch)

    def _step(self, *batch: Tensor) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.loss(*batch).backward()
        nn.utils.clip_grad_norm_(self.parameters, CLIP)
        self.optimizer.step()


class _Recorded:
    """A step for batches of one shape: as it is at first, on a stream beside the main one as recording asks for."""

    def __init__(self, step: Callable[..., None], batch: tuple[Tensor, ...]) -> None:
        self.step, self.held = step, [tensor.clone() for tensor in batch]
        self.stream, self.taken = torch.cuda.Stream(), 0
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, batch: tuple[Tensor, ...]) -> None:
        for held, tensor in zip(self.held, batch, strict=True):
            held.copy_(tensor)
        if self.taken < WARM_UP:
            self.taken += 1
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                self.step(*self.held)
            torch.cuda.current_stream().wait_stream(self.stream)
            return
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):  # records, and runs nothing
                self.step(*self.held)
        self.graph.replay()
