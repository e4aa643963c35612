"""What every host has in common: features of images and classes, their logits, and losses.

B images, C classes, d the width of the features. Features need not have unit norm; logits are scaled cosines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from leafward.geometry.scalars import wide


@dataclass(frozen=True)
class Output:
    """What a host returns."""

    image: Tensor
    """Features of the images (B, d)."""
    text: Tensor
    """Features of the classes (C, d)."""
    logits: Tensor
    """(B, C)."""
    labels: Tensor | None = None
    """The labels that came with the images (B); −1: none."""
    losses: Mapping[str, Tensor] = field(default_factory=dict)
    """Terms of the loss; none without labels or a teacher."""

    @property
    def loss(self) -> Tensor:
        return torch.stack(list(self.losses.values())).sum()


class Prompted(Protocol):
    """A dual encoder with prompts: what a host trains. `images` and `classes` are whatever it reads: pixels and tokens,
    or cached features."""

    def image(self, images: Tensor) -> Tensor: ...

    def text(self, classes: Tensor) -> Tensor: ...

    def frozen_image(self, images: Tensor) -> Tensor: ...

    def frozen_text(self, classes: Tensor) -> Tensor: ...


def cosine(image: Tensor, text: Tensor) -> Tensor:
    """Cosines in float32 or better: (B, d), (C, d) -> (B, C)."""
    return F.normalize(wide(image), dim=-1) @ F.normalize(wide(text), dim=-1).mT


class Host(nn.Module):
    """A prompted encoder, the classes it is trained on, and the scale 1/τ of its logits."""

    classes: Tensor

    def __init__(self, encoder: nn.Module, classes: Tensor, scale: float = 100.0) -> None:
        super().__init__()
        self.encoder = encoder
        self.scale = scale
        # Not part of the state: a host trained on some classes serves any others.
        self.register_buffer("classes", classes, persistent=False)

    @property
    def prompted(self) -> Prompted:
        return self.encoder  # pyright: ignore[reportReturnType]

    def forward(
        self,
        images: Tensor,
        labels: Tensor | None = None,
        classes: Tensor | None = None,
        teacher: Tensor | None = None,
    ) -> Output:
        """`classes` takes the place of those of the training; `teacher` holds a teacher's image features (B, d′)."""
        shown = self.classes if classes is None else classes
        image, text = self.image(images), self.text(shown)
        output = Output(image, text, self.scale * cosine(image, text), labels)
        return replace(output, losses=self.losses(output, images, shown, teacher))

    def image(self, images: Tensor) -> Tensor:
        """Features of images with their prompts: -> (B, d)."""
        return self.prompted.image(images)

    def text(self, classes: Tensor) -> Tensor:
        """Features of classes with their prompts: -> (C, d)."""
        return self.prompted.text(classes)

    def losses(self, output: Output, images: Tensor, classes: Tensor, teacher: Tensor | None) -> dict[str, Tensor]:
        """The terms of the host's own loss."""
        if output.labels is None:
            return {}
        return {"cross_entropy": F.cross_entropy(output.logits, output.labels)}

    @torch.no_grad()
    def class_features(self) -> Tensor:
        """The classes of the training in the space of the logits, without prompts: (C, d)."""
        return self.prompted.frozen_text(self.classes)

    def prepare(self, steps: int) -> None:
        """Called once, with everything attached, before a training of so many steps."""

    def finish(self) -> None:
        """Called once after the training."""
