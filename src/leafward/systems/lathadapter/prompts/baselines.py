"""Baselines without prompts that learn from the shots: probes from the texts, caches, Gaussians, and LoRA.

All but LoRA work on the frozen features. What they learn belongs to the classes of the training; other classes keep
their zero-shot logits, and classes that are met again in another data set take along what was learned
(`ClassWeights.known`).
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from leafward.adapters import attach
from leafward.adapters.low_rank import LowRankConfig
from leafward.adapters.surface import adapters
from leafward.encoders.encoder import pooled_features
from leafward.errors import DataError
from leafward.geometry.scalars import wide
from leafward.systems.lathadapter.prompts.features import Plain
from leafward.systems.lathadapter.prompts.host import Host, Output, cosine
from leafward.systems.lathadapter.prompts.hosts import TipAdapter


class ClassWeights(Host):
    """A vector of its own for each class of the training in place of its text."""

    def weights(self) -> Tensor:
        """(C, d)."""
        raise NotImplementedError

    def text(self, classes: Tensor) -> Tensor:
        return self.weights() if classes is self.classes else classes

    def known(self, classes: Tensor, columns: list[int], own: list[int]) -> Tensor:
        """Text features (M, d) with those of the `columns` replaced by the weights of the `own` classes."""
        found = wide(classes).clone()
        found[columns] = wide(self.weights()[own])
        return found


class LinearProbe(ClassWeights):
    """A linear probe that begins at the texts: cross-entropy of scale · cos(z, w_c) + λ/C Σ ‖w_c − t_c‖², unit t."""

    def __init__(self, classes: Tensor, scale: float = 100.0, *, pull: float = 0.1) -> None:
        super().__init__(Plain(), classes, scale)
        self.pull = pull
        self.weight = nn.Parameter(F.normalize(wide(classes), dim=-1))

    def weights(self) -> Tensor:
        return self.weight

    def strength(self) -> Tensor | float:
        """λ, or one for each class."""
        return self.pull

    def losses(self, output: Output, images: Tensor, classes: Tensor, teacher: Tensor | None) -> dict[str, Tensor]:
        losses = super().losses(output, images, classes, teacher)
        if losses:
            gaps = (self.weight - F.normalize(wide(self.classes), dim=-1)).square().sum(dim=1)
            losses["pull"] = (self.strength() * gaps).mean()
        return losses


class Clap(LinearProbe):
    """CLAP (Silva-Rodríguez et al. 2024): the probe with a λ_c for each class, the mean zero-shot probability of the
    class over its shots: where the text knows its class, the weights stay near it."""

    per_class: Tensor

    def __init__(self, classes: Tensor, scale: float = 100.0) -> None:
        super().__init__(classes, scale)
        self.register_buffer("per_class", torch.ones(len(classes), dtype=self.weight.dtype), persistent=False)

    def remember(self, images: Tensor, labels: Tensor) -> None:
        """λ_c of the shots: features (K, d) and labels (K)."""
        true = (self.scale * cosine(images, self.classes)).softmax(dim=1).gather(1, labels[:, None]).squeeze(1)
        total = torch.zeros_like(self.per_class).index_add(0, labels, true.to(self.per_class))
        self.per_class = total / torch.bincount(labels, minlength=len(total)).clamp_min(1)

    def strength(self) -> Tensor:
        return self.per_class


class TaskRes(ClassWeights):
    """TaskRes (Yu et al. 2023): t_c + α x_c with a learned x that begins at zero, cross-entropy; unit t."""

    def __init__(self, classes: Tensor, scale: float = 100.0, *, alpha: float = 0.5) -> None:
        super().__init__(Plain(), classes, scale)
        self.alpha = alpha
        self.residual = nn.Parameter(torch.zeros_like(wide(classes)))

    def weights(self) -> Tensor:
        return F.normalize(wide(self.classes), dim=-1) + self.alpha * self.residual


class TipAdapterF(TipAdapter):
    """Tip-Adapter-F (Zhang et al. 2022): the cache of Tip-Adapter, whose keys are trained by the cross-entropy."""

    def remember(self, images: Tensor, labels: Tensor) -> None:
        super().remember(images, labels)
        assert self.keys is not None
        self.keys = nn.Parameter(self.keys.clone())

    def forward(
        self,
        images: Tensor,
        labels: Tensor | None = None,
        classes: Tensor | None = None,
        teacher: Tensor | None = None,
    ) -> Output:
        output = super().forward(images, labels, classes, teacher)
        if labels is None:
            return output
        return replace(output, losses={"cross_entropy": F.cross_entropy(output.logits, labels)})


class Gda(TipAdapter):
    """GDA (Wang et al. 2024), without training: Gaussians of the classes with one covariance, added to zero-shot.

    logits + α (wᶜ·z + b_c) with wᶜ = P μ_c and b_c = −½ μ_c·P μ_c over unit features, P = d ((n − 1) Σ + tr(Σ) I)⁻¹ of
    the shots around their means. α is the one of 10^(−4 … 1) that is best on validation images, 10^(−2) without any.
    """

    WEIGHTS = tuple(10.0 ** (power / 2) for power in range(-8, 3))

    def __init__(self, classes: Tensor, scale: float = 100.0) -> None:
        super().__init__(classes, scale, alpha=0.01)
        self.line: Tensor | None = None

    def remember(self, images: Tensor, labels: Tensor) -> None:
        """Fit the Gaussians to features (K, d) and labels (K)."""
        super().remember(images, labels)
        assert self.keys is not None
        assert self.values is not None
        unit, onehot = self.keys.double(), self.values.double()
        counts = onehot.sum(dim=0)
        if not bool((counts > 0).all()):
            raise DataError("gda needs a training image of every class")
        means = onehot.mT @ unit / counts[:, None]
        rest = unit - onehot @ means
        spread = rest.mT @ rest / max(len(unit) - 1, 1)
        trace = spread.trace()
        # With one shot of each class nothing is left around the means: the spread of all shots stands in.
        if trace < 1e-12:
            rest = unit - unit.mean(dim=0)
            spread = rest.mT @ rest / max(len(unit) - 1, 1)
            trace = spread.trace().clamp_min(1e-12)
        width = unit.shape[1]
        eye = torch.eye(width, dtype=spread.dtype, device=spread.device)
        weight = torch.linalg.solve((len(unit) - 1) * spread + trace * eye, width * means.mT)  # (d, C)
        bias = -0.5 * (means.mT * weight).sum(dim=0)
        self.line = torch.cat([weight, bias[None]]).to(self.keys.dtype)

    def choose(self, images: Tensor, labels: Tensor) -> None:
        """Take the α with most right answers on other images."""
        zero, said = self.scale * cosine(images, self.classes), self.remembered(images) / self.alpha
        right = [float(((zero + a * said).argmax(dim=1) == labels).double().mean()) for a in self.WEIGHTS]
        self.alpha = self.WEIGHTS[right.index(max(right))]

    def remembered(self, images: Tensor) -> Tensor:
        assert self.line is not None
        unit = F.normalize(wide(images), dim=-1)
        return self.alpha * (unit @ self.line[:-1] + self.line[-1])


class ClipLora(Host):
    """CLIP-LoRA (Zanella & Ben Ayed 2024): rank-2 updates of all queries, keys and values of both encoders,
    cross-entropy, one setting for every data set. (Theirs drops a quarter of the adapters' inputs; here none.)"""

    def __init__(self, model: Any, classes: Tensor, scale: float = 100.0, *, rank: int = 2, seed: int = 0) -> None:
        super().__init__(LowRankEncoder(model, rank, seed), classes, scale)


class LowRankEncoder(nn.Module):
    """A copy of a CLIP model with LoRA; the factors alone are its state."""

    def __init__(self, model: Any, rank: int, seed: int) -> None:
        super().__init__()
        model = copy.deepcopy(model).requires_grad_(False)
        attach(model, LowRankConfig(rank=rank, alpha=1.0, targets=("q", "k", "v"), seed=seed))
        self._held = (model,)
        self.factors = adapters(model)["default"]

    def _apply(self, fn: Any, recurse: bool = True) -> LowRankEncoder:
        self._held[0]._apply(fn, recurse)
        return super()._apply(fn, recurse)

    def image(self, images: Tensor) -> Tensor:
        return pooled_features(self._held[0].get_image_features(pixel_values=images))

    def text(self, classes: Tensor) -> Tensor:
        return pooled_features(self._held[0].get_text_features(input_ids=classes))
