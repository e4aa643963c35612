"""Feature pyramids of timm for dense tasks: images of any size in, maps with the channels first out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import timm
import torch
from torch import Tensor, nn

from leafward import register
from leafward.errors import UsageError, nearest

LEVELS = 4


def any_size(model: str) -> dict[str, Any]:
    """The arguments with which a timm model takes images of any size; none where it does so anyway."""
    register("timm")
    if not timm.is_model(model):
        raise UsageError(f"timm has no model {model!r}; {nearest(model, timm.list_models())}")
    known = timm.get_pretrained_cfg(model)
    if known is None or not known.fixed_input_size:
        return {}
    words: list[dict[str, Any]] = [{"strict_img_size": False}, {"dynamic_img_size": True}]  # Swin's and ViT's
    for arguments in words:
        try:
            with torch.device("meta"):
                timm.create_model(model, **arguments)
        except TypeError:
            continue
        return arguments
    raise UsageError(f"timm's {model} takes images of one size alone, so it cannot segment or detect")


def pyramid(model: str, arguments: Mapping[str, Any]) -> Any:
    """The timm model as a feature pyramid of at least four maps for images of any size."""
    settings = any_size(model) | dict(arguments)
    made: Any = timm.create_model(model, features_only=True, **settings)
    if len(made.feature_info.channels()) < LEVELS:  # a ViT gives the maps of its last three blocks unless told
        made = timm.create_model(model, features_only=True, out_indices=LEVELS, **settings)
    return made


def coarsest(backbone: nn.Module, x: Tensor) -> list[Tensor]:
    """The four coarsest maps of a pyramid as (B, C, H, W), also where it gives them as (B, H, W, C), as Swin does."""
    maps = backbone(x)[-LEVELS:]
    channels_last = getattr(backbone, "output_fmt", None) == "NHWC"
    return [map_.permute(0, 3, 1, 2) for map_ in maps] if channels_last else list(maps)
