"""Feature pyramids of timm for dense tasks: images of any size in, maps with the channels first out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import timm
import torch
import torch.nn.functional as F
from timm.models import FeatureInfo
from torch import Tensor, nn

from leafward import register
from leafward.errors import UsageError, nearest

LEVELS = 4
STRIDES = (4, 8, 16, 32)


class Neck(nn.Module):
    """Strides 4, 8, 16 and 32 from a backbone whose maps all have one stride, as those of ViT and DeiT: the maps of
    blocks spread over the depth, the earlier ones enlarged by transposed convolutions of two by two, the last one
    halved by a maximum, as in the ViTDet family ("Exploring Plain Vision Transformer Backbones", 2203.16527).

    Without it all the strides that a detector reads its regions from would be one.
    """

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body
        info = body.feature_info
        channels, strides = info.channels(), info.reduction()  # pyright: ignore
        self.resize = nn.ModuleList(
            _resize(width, 2 ** round(math.log2(stride)), wanted)  # patches of 14 pixels pass as 16
            for width, stride, wanted in zip(channels, strides, STRIDES, strict=True)
        )
        levels = [
            {"num_chs": width, "reduction": stride, "module": f"resize.{level}"}
            for level, (width, stride) in enumerate(zip(channels, STRIDES, strict=True))
        ]
        self.feature_info = FeatureInfo(levels, tuple(range(LEVELS)))

    def forward(self, x: Tensor) -> list[Tensor]:
        maps = self.body(x)
        if getattr(self.body, "output_fmt", None) == "NHWC":
            maps = [map_.permute(0, 3, 1, 2) for map_ in maps]
        return [resize(map_) for resize, map_ in zip(self.resize, maps, strict=True)]


class Shrink(nn.Module):
    """The largest of every k × k places, of an odd map too: (B, C, H, W) -> (B, C, ⌈H/k⌉, ⌈W/k⌉)."""

    def __init__(self, factor: int) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(x, self.factor, ceil_mode=True)


def _resize(channels: int, stride: int, wanted: int) -> nn.Module:
    """From a map of one stride to that of another, by steps of two."""
    if stride <= wanted:
        return Shrink(wanted // stride) if stride < wanted else nn.Identity()
    steps: list[nn.Module] = []
    while stride > wanted:
        steps += [nn.GroupNorm(1, channels), nn.GELU()] if steps else []
        steps.append(nn.ConvTranspose2d(channels, channels, 2, stride=2))
        stride //= 2
    return nn.Sequential(*steps)


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
    """The timm model as a feature pyramid of at least four maps for images of any size, with a `Neck` where it has none
    of its own."""
    settings = any_size(model) | dict(arguments)
    made: Any = timm.create_model(model, features_only=True, **settings)
    if len(made.feature_info.channels()) < LEVELS:  # a ViT gives the maps of its last three blocks unless told
        made = timm.create_model(model, features_only=True, out_indices=LEVELS, **settings)
    strides = made.feature_info.reduction()
    if len(set(strides)) > 1:
        return made
    depth = len(made.feature_info.info)
    spread = tuple(depth * (level + 1) // LEVELS - 1 for level in range(LEVELS))
    return Neck(timm.create_model(model, features_only=True, out_indices=spread, **settings))


def coarsest(backbone: nn.Module, x: Tensor) -> list[Tensor]:
    """The four coarsest maps of a pyramid as (B, C, H, W), also where it gives them as (B, H, W, C), as Swin does."""
    maps = backbone(x)[-LEVELS:]
    channels_last = getattr(backbone, "output_fmt", None) == "NHWC"
    return [map_.permute(0, 3, 1, 2) for map_ in maps] if channels_last else list(maps)
