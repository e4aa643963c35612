"""The loss of weak superposition in closed form ("Superposition Yields Robust Neural Scaling", 2505.10465)."""

from __future__ import annotations

import torch

from leafward.errors import UsageError

MEAN_VALUE, MEAN_SQUARED_VALUE = 1.0, 4 / 3  # ⟨v⟩ and ⟨v²⟩ of v ~ U(0, 2)


def weak_loss(p: torch.Tensor, represented: float) -> float:
    """Loss when exactly the `represented` most frequent features are perfect and the rest are ignored.

    L = Σ_{i > represented} (⟨v²⟩ p_i − ⟨v⟩² p_i²), with p (n,) in any order, ⟨v²⟩ = 4/3 and ⟨v⟩ = 1: of an ignored
    feature the output is its bias alone, whose best value is the feature's mean ⟨v⟩ p_i, and the variance is left.
    `represented` is a count, φ_½·n; a fractional count is rounded down.
    """
    ignored = _ignored(p, represented)
    return float((MEAN_SQUARED_VALUE * ignored - (MEAN_VALUE * ignored).square()).sum())


def weak_loss_leading(p: torch.Tensor, represented: float) -> float:
    """The leading order ⟨v²⟩ Σ_{i > represented} p_i of `weak_loss`, which the paper's figures show.

    It is what a model without biases loses. `weak_loss` is lower by at most the fraction ¾ p, where p is the
    probability of the most frequent ignored feature.
    """
    return MEAN_SQUARED_VALUE * float(_ignored(p, represented).sum())


def _ignored(p: torch.Tensor, represented: float) -> torch.Tensor:
    """The probabilities of all but the `represented` most frequent features, in float64."""
    if not 0 <= represented <= p.numel():
        raise UsageError(f"represented must lie in [0, {p.numel()}], got {represented}")
    return p.double().sort(descending=True).values[int(represented) :]
