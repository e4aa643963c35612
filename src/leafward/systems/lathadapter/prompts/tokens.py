"""Prompts as the papers have them: learned tokens inside the two encoders of a Hugging Face CLIP model.

On the text side they take the places 1…n of the sequence, where the words of the template stand ("a photo of a" has
four); on the image side they follow the patches, and go through the layer norm in front of the first layer as these do.
In each of the first `depth` layers they are put in afresh (deep prompts); after that what the last of them became goes
on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from leafward.encoders.encoder import pooled_features
from leafward.errors import UsageError, need
from leafward.systems.lathadapter.prompts.features import Sides

SPREAD = 0.02  # of the first values of deep and image tokens


def check_tokens(tokens: int, before: int) -> None:
    """Refuse more tokens than the `before` places between a text's begin and the name of its class: they would take the
    places of the names, and all classes would be one."""
    allowed = f"from 1 to {before}, the places before the class names (a longer template has more)"
    need(1 <= tokens <= before, "tokens", allowed, tokens)


def places_before_names(classes: Tensor) -> int:
    """Places behind the first that all texts (C, L) have in common; with one text, all but its last."""
    differ = (classes != classes[:1]).any(dim=0).nonzero()
    return (int(differ[0]) if len(differ) else classes.shape[1] - 1) - 1


class TokenPrompts(nn.Module):
    """A frozen CLIP model with learned tokens. Images are pixels (B, 3, H, W), classes are token numbers (C, L).

    The model is not part of the state, so that a file of prompts holds prompts alone, and several sets of prompts may
    share one: their hooks are on it for the time of a call only. The text tokens of the first layer begin as the words
    of `classes`, those of the template, so that text prompts of depth 1 begin at zero-shot CLIP.
    """

    def __init__(self, model: Any, classes: Tensor, tokens: int = 4, depth: int = 1, sides: Sides = "text") -> None:
        super().__init__()
        kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
        if kind != "clip":
            raise UsageError(f"prompts inside the encoders need a Hugging Face CLIP model, not {kind!r}")
        layers = [side.encoder.layers for side in (model.text_model, model.vision_model)]
        if not 1 <= depth <= min(map(len, layers)):
            raise UsageError(f"depth must be in 1…{min(map(len, layers))}, the layers of the model, got {depth}")
        check_tokens(tokens, places_before_names(classes))
        self._held = (model.requires_grad_(False),)  # in a tuple it is not registered as a part
        self.tokens, self.depth = tokens, depth
        embeddings = model.text_model.embeddings
        width = embeddings.token_embedding.embedding_dim
        start = SPREAD * torch.randn(depth, tokens, width)
        start[0] = embeddings.token_embedding.weight[classes[0, 1 : tokens + 1]].detach()
        self.text_tokens = nn.Parameter(start)
        inner = model.vision_model.config.hidden_size
        self.image_tokens = nn.Parameter(SPREAD * torch.randn(depth, tokens, inner)) if sides == "both" else None
        self.coupling = nn.ModuleList(nn.Linear(width, inner) for _ in range(depth)) if sides == "coupled" else None
        self.has_image_tokens = sides != "text"
        self.to(embeddings.token_embedding.weight.device)

    @property
    def model(self) -> Any:
        return self._held[0]

    def _apply(self, fn: Any, recurse: bool = True) -> TokenPrompts:
        self.model._apply(fn, recurse)  # the model goes along to another device
        return super()._apply(fn, recurse)

    def image(self, images: Tensor) -> Tensor:
        with self._acting():
            return self.frozen_image(images)

    def text(self, classes: Tensor) -> Tensor:
        with self._acting():
            return self.frozen_text(classes)

    def frozen_image(self, images: Tensor) -> Tensor:
        return pooled_features(self.model.get_image_features(pixel_values=images))  # pyright: ignore[reportCallIssue]

    def frozen_text(self, classes: Tensor) -> Tensor:
        return pooled_features(self.model.get_text_features(input_ids=classes))  # pyright: ignore[reportCallIssue]

    def layer_tokens(self, side: str, index: int) -> Tensor:
        """The tokens of one layer and side, (n, width)."""
        if side == "text":
            return self.text_tokens[index]
        if self.coupling is not None:
            return self.coupling[index](self.text_tokens[index])
        assert self.image_tokens is not None
        return self.image_tokens[index]

    @contextmanager
    def _acting(self) -> Iterator[None]:
        sides = [(self.model.text_model, _Insertion.text)]
        sides += [(self.model.vision_model, _Insertion.image)] if self.has_image_tokens else []
        handles = [
            _entrance(side, index).register_forward_pre_hook(partial(insert, _Insertion(self, index)), prepend=True)
            for side, insert in sides
            for index in range(self.depth)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _entrance(side: Any, index: int) -> nn.Module:
    """Where the tokens of a layer come in: the layer, for the first of the images the layer norm in front of it."""
    return side.pre_layrnorm if index == 0 and hasattr(side, "pre_layrnorm") else side.encoder.layers[index]


class _Insertion:
    """The hooks of one layer."""

    def __init__(self, prompts: TokenPrompts, index: int) -> None:
        self.prompts, self.index = prompts, index

    def text(self, layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        prompts = self.prompts
        states, n = args[0], prompts.tokens
        new = prompts.layer_tokens("text", self.index)
        if self.index == 0:
            new = new + prompts.model.text_model.embeddings.position_embedding.weight[1 : n + 1]
        return (torch.cat([states[:, :1], _for_each(new, states), states[:, n + 1 :]], dim=1), *args[1:])

    def image(self, layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        prompts = self.prompts
        states = args[0] if self.index == 0 else args[0][:, : -prompts.tokens]
        new = _for_each(prompts.layer_tokens("image", self.index), states)
        return (torch.cat([states, new], dim=1), *args[1:])


def _for_each(tokens: Tensor, states: Tensor) -> Tensor:
    """(n, d) -> (B, n, d) in the type of the states."""
    return tokens.to(states.dtype).expand(len(states), -1, -1)
