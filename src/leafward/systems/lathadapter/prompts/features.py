"""Prompts for cached features, where no encoder is at hand.

Learned context tokens act on a class inside a transformer by being attended to. On a cached feature x the same is one
step of attention to n learned tokens, x + ‖x‖ Σᵢ softmaxᵢ(κ x̂·kᵢ) vᵢ, repeated `depth` times with tokens of their
own. The values vᵢ begin at zero, so that training begins at zero-shot CLIP. This is a stand-in for prompts inside the
encoder, not the same thing: it cannot change what the encoder looks at.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SHARPNESS = 10.0  # κ; cosines of CLIP features differ by tenths
Sides = Literal["text", "coupled", "both"]


class FeaturePrompts(nn.Module):
    """Context for cached features: for the text side, for both, or for the image side coupled to the text side's.

    text: (depth, tokens, width) keys and values; coupled: the image side has linear images of them (MaPLe).
    """

    def __init__(self, width: int, tokens: int = 4, depth: int = 1, sides: Sides = "text") -> None:
        super().__init__()
        self.text_context = Context(width, tokens, depth)
        self.image_context = Context(width, tokens, depth) if sides == "both" else None
        self.coupling = nn.Linear(width, width, bias=False) if sides == "coupled" else None
        if self.coupling is not None:
            nn.init.eye_(self.coupling.weight)

    def image(self, images: Tensor) -> Tensor:
        if self.coupling is not None:
            context = self.text_context
            return attend(images, self.coupling(context.keys), self.coupling(context.values))
        return images if self.image_context is None else self.image_context(images)

    def text(self, classes: Tensor) -> Tensor:
        return self.text_context(classes)

    def frozen_image(self, images: Tensor) -> Tensor:
        return images

    def frozen_text(self, classes: Tensor) -> Tensor:
        return classes


class Context(nn.Module):
    """Learned tokens that features attend to: (B, d) -> (B, d)."""

    def __init__(self, width: int, tokens: int, depth: int) -> None:
        super().__init__()
        self.keys = nn.Parameter(F.normalize(torch.randn(depth, tokens, width), dim=-1))
        self.values = nn.Parameter(torch.zeros(depth, tokens, width))

    def forward(self, x: Tensor) -> Tensor:
        return attend(x, self.keys, self.values)


def attend(x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """One step of attention to the tokens of each depth: (B, d), (J, n, d), (J, n, d) -> (B, d)."""
    for key, value in zip(keys, values, strict=True):
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        weights = torch.softmax(SHARPNESS * F.normalize(x, dim=-1) @ key.mT, dim=-1)
        x = x + length * (weights @ value)
    return x


class Plain(nn.Module):
    """Cached features as they are."""

    def image(self, images: Tensor) -> Tensor:
        return images

    def text(self, classes: Tensor) -> Tensor:
        return classes

    frozen_image = image
    frozen_text = text


class Bottleneck(Plain):
    """CLIP-Adapter (Gao et al. 2021): image features mixed with a two-layer change of themselves, ratio α."""

    def __init__(self, width: int, reduction: int = 4, ratio: float = 0.2) -> None:
        super().__init__()
        self.ratio = ratio
        inner = max(width // reduction, 1)
        self.change = nn.Sequential(
            nn.Linear(width, inner, bias=False), nn.ReLU(), nn.Linear(inner, width, bias=False), nn.ReLU()
        )

    def image(self, images: Tensor) -> Tensor:
        unit = F.normalize(images, dim=-1)
        return self.ratio * self.change(unit) + (1.0 - self.ratio) * unit
