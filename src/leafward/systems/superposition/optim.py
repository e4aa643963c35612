"""Packed optimisers: one update of P = [W_1|b_1|…] (n, C) for all models, each with its own η and γ.

Every update runs in this order: the gradient is taken (by the caller), W is decayed with the scheduled η, the
gradient step is made, and the rows are put back on the sphere where that is asked for. Biases are never decayed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from leafward.systems.superposition.step import Layout

OPTIMISERS = ("adamw", "adam", "sgd", "muon")
BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-8  # Adam
NORM_EPSILON = 1e-8  # in the signed decay, as in the original experiment
MUON_MOMENTUM = 0.95
# Quintic Newton–Schulz iteration of Muon: singular values of any size in (0, 1] go to about 1 in five rounds.
NEWTON_SCHULZ, ROUNDS = (3.4445, -4.7750, 2.0315), 5


def schedule(step: int, steps: int, warmup: int) -> float:
    """Factor on the learning rate at step 0…steps−1: linear warm-up, then a cosine from 1 to 5 %."""
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress))


def rates(steps: int, warmup: int) -> torch.Tensor:
    """For each step: the schedule's factor and Adam's two bias corrections 1 − β₁^t and √(1 − β₂^t), (steps, 3).

    A table on the device, so that a step needs no number from the host.
    """
    time = torch.arange(1, steps + 1, dtype=torch.float64)
    factors = torch.tensor([schedule(step, steps, warmup) for step in range(steps)], dtype=torch.float64)
    return torch.stack([factors, 1 - BETA_1**time, (1 - BETA_2**time).sqrt()], dim=1)


class Optimiser:
    """State and update rule of one pack; `state` holds tensors shaped like P."""

    def __init__(
        self,
        packed: torch.Tensor,
        layout: Layout,
        *,
        kind: str,
        lr: Sequence[float],
        bias_lr: Sequence[float],
        decay: Sequence[float],
        sphere: bool,
    ):
        self.layout, self.kind, self.sphere = layout, kind, sphere
        self.lr = torch.zeros(layout.columns, dtype=packed.dtype)
        for columns, rate, bias_rate in zip(layout.model_columns(), lr, bias_lr, strict=True):
            self.lr[columns] = rate
            self.lr[columns.stop - 1] = bias_rate
        self.lr = self.lr.to(packed.device)
        strength = torch.tensor([rate * gamma for rate, gamma in zip(lr, decay, strict=True)], dtype=packed.dtype)
        self.shrink = strength.clamp(min=0).to(packed.device)  # η_k γ_k of the models with γ > 0, else 0
        self.pull = strength.clamp(max=0).to(packed.device)  # η_k γ_k of the models with γ < 0, else 0
        self.decays, self.pulls = any(decay), min(decay) < 0
        slots = {"adamw": 2, "adam": 2, "sgd": 0, "muon": 2}[kind]
        self.state = {name: torch.zeros_like(packed) for name in ("first", "second")[:slots]}
        if sphere:
            self._retract(packed)

    def update(self, packed: torch.Tensor, grad: torch.Tensor, rates: torch.Tensor) -> None:
        """Update `packed` in place with the gradient `grad` (overwritten) and the step's row (3,) of `rates`."""
        factor, correct_1, correct_2 = rates.unbind()
        if self.decays:
            self._decay(packed, factor)
        if self.kind == "sgd":
            direction = grad
        elif self.kind == "muon":
            direction = self._muon(grad, correct_1, correct_2)
        else:
            direction = _adam(self.state["first"], self.state["second"], grad, correct_1, correct_2)
        packed.addcmul_(direction, self.lr * factor, value=-1)
        if self.sphere:
            self._retract(packed)

    def _decay(self, packed: torch.Tensor, factor: torch.Tensor) -> None:
        """γ ≥ 0: W ← W(1 − ηγ); γ < 0: W_i ← W_i[1 + ηγ(1 − 1/‖W_i‖)], which pulls rows to unit norm."""
        if not self.pulls:
            keep = (1 - factor * self.shrink).expand(len(packed), -1)
        else:
            away = 1 - 1 / (self.layout.norms(packed) + NORM_EPSILON)
            keep = 1 - factor * self.shrink + factor * self.pull * away
        self.layout.scale_rows(packed, keep)

    def _retract(self, packed: torch.Tensor) -> None:
        tiny = torch.finfo(packed.dtype).tiny
        self.layout.scale_rows(packed, 1 / self.layout.norms(packed).clamp(min=tiny))

    def _muon(self, grad: torch.Tensor, correct_1: torch.Tensor, correct_2: torch.Tensor) -> torch.Tensor:
        """Orthogonalised Nesterov momentum for W, scaled by √max(1, n/m); Adam for b."""
        first, second, bias = self.state["first"], self.state["second"], self.layout.bias
        bias_first, bias_second = first.index_select(1, bias), second.index_select(1, bias)
        bias_direction = _adam(bias_first, bias_second, grad.index_select(1, bias), correct_1, correct_2)
        first.mul_(MUON_MOMENTUM).add_(grad)
        direction = grad.add_(first, alpha=MUON_MOMENTUM)
        for block in self.layout.blocks:
            weights = block.weights(direction)
            scale = math.sqrt(max(1.0, weights.shape[1] / weights.shape[2]))
            weights.copy_(orthogonalise(weights) * scale)
        direction.index_copy_(1, bias, bias_direction)
        first.index_copy_(1, bias, bias_first)
        second.index_copy_(1, bias, bias_second)
        return direction


def _adam(
    first: torch.Tensor, second: torch.Tensor, grad: torch.Tensor, correct_1: torch.Tensor, correct_2: torch.Tensor
) -> torch.Tensor:
    """Adam's direction with bias correction; the moments are updated in place."""
    first.lerp_(grad, 1 - BETA_1)
    second.mul_(BETA_2).addcmul_(grad, grad, value=1 - BETA_2)
    denominator = second.sqrt().div_(correct_2).add_(EPSILON).mul_(correct_1)
    return torch.div(first, denominator, out=denominator)


def orthogonalise(matrices: torch.Tensor) -> torch.Tensor:
    """About U Vᵀ of each matrix (K, n, m) with SVD U S Vᵀ, by Newton–Schulz; works on the smaller Gram matrix."""
    if matrices.shape[1] < matrices.shape[2]:
        return orthogonalise(matrices.transpose(1, 2)).transpose(1, 2)
    norm = torch.linalg.vector_norm(matrices, dim=(1, 2), keepdim=True)
    x = matrices / norm.clamp(min=torch.finfo(matrices.dtype).tiny)
    a, b, c = NEWTON_SCHULZ
    for _ in range(ROUNDS):
        gram = x.transpose(1, 2) @ x
        x = a * x + x @ (b * gram + c * gram @ gram)
    return x
