"""The mapper around a backbone of timm: any layout of its features, its own classifier, its own surface."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from leafward.engine.blocks import blocks
from leafward.errors import UsageError
from leafward.systems.himapper.mapper import HierarchyMapper
from leafward.systems.himapper.tree import TreeShape


@dataclass(frozen=True)
class Hierarchy:
    """What was found in B images: M nodes numbered as `shape` says, leaves first.

    `nodes` (B, M, d); `attention` (B, M, H, W) over the places of the feature map, each node's a share of one;
    `points` (B, M, d + 1) on the hyperboloid with the curvature −`curvature` (flat twin: (B, M, d), zero).
    """

    shape: TreeShape
    nodes: Tensor
    attention: Tensor
    points: Tensor
    curvature: float


class HiMapper(nn.Module):
    """`backbone` with a tree of `leaves` and `levels` that sharpens its global feature: v̂ = v + v^L.

    The backbone is a classification model of timm, or one made with ``features_only=True``: then v is the mean of the
    last map, and v^L is added to every place of it. Its parameters begin as they are, and so do its outputs.

    `mixture`: "sample" or "moments" (see `GaussianTree`); `probabilistic=False` is the deterministic tree.
    `geometry`: "lorentz" or "euclidean", the twin. `temperature` and `sibling_weight`: see `losses.contrast`.
    `freeze_backbone` trains the mapper and the classifier alone; the backbone then stays in evaluation mode.
    """

    def __init__(
        self,
        backbone: nn.Module,
        leaves: int = 32,
        levels: int = 4,
        *,
        dim: int = 128,
        heads: int = 4,
        geometry: str = "lorentz",
        mixture: str = "sample",
        probabilistic: bool = True,
        temperature: float = 0.2,
        sibling_weight: float = 1.0,
        freeze_backbone: bool = False,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.pyramid = callable(getattr(getattr(backbone, "feature_info", None), "channels", None))
        self.channels, self.head_hidden_size = _widths(backbone, self.pyramid)
        self.prefix_tokens = _prefix_tokens(backbone)
        shape = TreeShape(leaves, levels)
        self.mapper = HierarchyMapper(
            self.channels,
            self.head_hidden_size,
            shape,
            dim,
            heads,
            geometry,
            mixture,
            probabilistic,
            temperature,
            sibling_weight,
        )
        self.frozen, self.grad_checkpointing = freeze_backbone, False
        if freeze_backbone:
            backbone.requires_grad_(False)
            if not self.pyramid:
                self.get_classifier().requires_grad_(True)
            backbone.eval()

    def forward(self, x: Tensor, losses: bool = False) -> Any:
        """Images (B, in_chans, H, W) -> logits (B, classes), or the maps of a pyramid with the last one sharpened.

        With `losses`, a pair of that and `leafward.systems.himapper.HierarchyLosses`.
        """
        if self.pyramid:
            maps = list(self.backbone(x))
            tokens = self._tokens(maps[-1])
            shift, nodes = self._map(tokens, tokens.mean(dim=1))
            maps[-1] = maps[-1] + (shift[:, None, None] if self._channels_last(maps[-1]) else shift[:, :, None, None])
            out: Any = maps
        else:
            v, nodes = self._sharpened(self.forward_features(x))
            out = self._logits(v)
        return (out, self.mapper.losses(nodes)) if losses else out

    def forward_features(self, x: Tensor) -> Tensor:
        """The backbone's feature map or tokens, as they are."""
        self._need_classifier("forward_features")
        return self.backbone.forward_features(x)  # pyright: ignore[reportCallIssue]

    def forward_head(self, features: Tensor, pre_logits: bool = False) -> Tensor:
        """Logits (B, classes) of what `forward_features` gave, or the sharpened global feature (B, V)."""
        self._need_classifier("forward_head")
        v, _ = self._sharpened(features)
        return v if pre_logits else self._logits(v)

    @torch.no_grad()
    def hierarchy(self, x: Tensor) -> Hierarchy:
        """The nodes of images (B, in_chans, H, W), where each looks and where it lies."""
        features = self.backbone(x)[-1] if self.pyramid else self.forward_features(x)
        tokens = self._tokens(features)
        if features.ndim == 4:
            height, width = features.shape[1:3] if self._channels_last(features) else features.shape[2:]
        else:
            height, width = _grid(tokens.shape[1], x.shape[-2], x.shape[-1])
        samples = self.mapper.tree(len(x))
        nodes = self.mapper.decomposition(samples, tokens)
        attention = self.mapper.decomposition.attention(samples, tokens)
        return Hierarchy(
            self.mapper.shape,
            nodes,
            attention.unflatten(-1, (height, width)),
            self.mapper.points(nodes),
            self.mapper.curvature,
        )

    # The surface of timm.

    @property
    def num_classes(self) -> int:
        return self.backbone.num_classes  # pyright: ignore[reportReturnType]

    @property
    def num_features(self) -> int:
        return self.backbone.num_features  # pyright: ignore[reportReturnType]

    @property
    def feature_info(self) -> Any:
        return self.backbone.feature_info

    @property
    def output_fmt(self) -> Any:
        """Layout of the maps: the backbone's, where it says one."""
        return getattr(self.backbone, "output_fmt", None)

    @property
    def pretrained_cfg(self) -> Any:
        return self.backbone.pretrained_cfg

    @property
    def default_cfg(self) -> Any:
        return self.backbone.default_cfg

    def get_classifier(self) -> nn.Module:
        self._need_classifier("get_classifier")
        return _classifier(self.backbone)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A new classifier for `num_classes` classes (0: none, the sharpened feature itself)."""
        self._need_classifier("reset_classifier")
        if global_pool == "":
            raise UsageError(
                "global_pool must not be empty: the hierarchy sharpens a pooled feature; for maps, wrap a "
                "backbone made with features_only=True"
            )
        arguments = (num_classes,) if global_pool is None else (num_classes, global_pool)
        self.backbone.reset_classifier(*arguments)  # pyright: ignore[reportCallIssue]

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute activations in the backward pass, the backbone's (where it can) and the mapper's."""
        self.grad_checkpointing = enable
        if hasattr(self.backbone, "set_grad_checkpointing"):
            self.backbone.set_grad_checkpointing(enable)  # pyright: ignore[reportCallIssue]

    def shard_blocks(self) -> list[nn.Module]:
        """What FSDP2 shards one by one: the backbone's blocks. The mapper reads the weights of its levels together."""
        return blocks(self.backbone)

    def no_weight_decay(self) -> set[str]:
        """Parameters that are not decayed: the backbone's own, and the places of the tree."""
        own = self.backbone.no_weight_decay() if hasattr(self.backbone, "no_weight_decay") else ()  # pyright: ignore
        return {f"backbone.{name}" for name in own} | {
            f"mapper.tree.{name}" for name in self.mapper.tree.no_weight_decay()
        }

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        if self.frozen:
            self.backbone.eval()
        return self

    def _need_classifier(self, method: str) -> None:
        if self.pyramid:
            raise UsageError(f"{method} needs a classification backbone; this one was made with features_only=True")

    def _sharpened(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """v̂ (B, V) and nodes (B, M, d)."""
        v = self.backbone.forward_head(features, pre_logits=True)  # pyright: ignore[reportCallIssue]
        if v.ndim != 2:
            raise UsageError(f"the backbone must pool its features; its head gave the shape {tuple(v.shape)}")
        shift, nodes = self._map(self._tokens(features), v)
        return v + shift, nodes

    def _logits(self, v: Tensor) -> Tensor:
        """What follows the global feature (B, V): the classifier. It is a convolution in ResNetV2, DLA and DPN, has a
        norm before it in EfficientViT-MSRA and SHViT, and is named together with the pooling in Sequencer2D."""
        head, classifier = getattr(self.backbone, "head", None), self.get_classifier()
        if isinstance(head, nn.Sequential) and len(head) and isinstance(head[0], nn.BatchNorm1d):
            return head(v)
        if hasattr(classifier, "global_pool") and hasattr(classifier, "fc"):
            classifier: nn.Module = classifier.fc  # pyright: ignore[reportAssignmentType]
        if isinstance(classifier, nn.Conv2d):
            return classifier(v[:, :, None, None]).flatten(1)
        return classifier(v)

    def _map(self, tokens: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if self.grad_checkpointing and self.training:
            return checkpoint(self.mapper, tokens, v, use_reentrant=False)  # pyright: ignore[reportReturnType]
        kind = tokens.device.type
        if torch.compiler.is_compiling() and torch.is_autocast_enabled(kind) and not self.training:
            return functional_call(self.mapper, self.mapper.cast(torch.get_autocast_dtype(kind)), (tokens, v))
        return self.mapper(tokens, v)

    def _channels_last(self, features: Tensor) -> bool:
        """Whether a four-dimensional map is (B, H, W, C): what the backbone says, else where its width stands."""
        if self.output_fmt is not None:
            return self.output_fmt == "NHWC"
        return features.shape[1] != self.channels

    def _tokens(self, features: Tensor) -> Tensor:
        """The places of a map (B, C, H, W), (B, H, W, C) or of tokens (B, P + T, C) without their prefix: (B, T, C)."""
        if not isinstance(features, Tensor):
            raise UsageError(f"the backbone must have one feature map; {self._kind} gives a {type(features).__name__}")
        if features.ndim not in (3, 4):
            raise UsageError(f"a feature map must have three or four dimensions, got the shape {tuple(features.shape)}")
        if features.ndim == 3:
            tokens = features[:, self.prefix_tokens :]
        else:
            # Not flatten(2).mT, for which compiled code would write a map in channels_last once more, channels first.
            maps = features if self._channels_last(features) else features.permute(0, 2, 3, 1)
            tokens = maps.flatten(1, 2)
        if not tokens.shape[1] or tokens.shape[2] != self.channels:
            raise UsageError(
                f"the features of {self._kind} must be places with its {self.channels} channels; got the shape "
                f"{tuple(features.shape)}, the first {self.prefix_tokens} tokens of which are no places"
            )
        return tokens

    @property
    def _kind(self) -> str:
        return type(self.backbone).__name__


def _widths(backbone: nn.Module, pyramid: bool) -> tuple[int, int]:
    """Channels of the (last) feature map and width of the global feature."""
    if pyramid:
        channels = backbone.feature_info.channels()[-1]  # pyright: ignore
        return channels, channels
    for name in ("num_features", "forward_features", "forward_head", "get_classifier"):
        if not hasattr(backbone, name):
            raise UsageError(f"backbone must be a model of timm; {type(backbone).__name__} has no {name}")
    single = isinstance(_classifier(backbone), nn.Module)
    if not single or getattr(backbone, "aux_head", None) is not None:  # VOLO's second one is called so
        raise UsageError(
            f"backbone must have one classifier; {type(backbone).__name__} has several, as distilled models do: "
            "take a variant with one"
        )
    channels: int = backbone.num_features  # pyright: ignore[reportAssignmentType]
    return channels, getattr(backbone, "head_hidden_size", channels)


def _classifier(backbone: nn.Module) -> Any:
    """The classifier that the backbone names; without classes, EfficientViT-MSRA and SHViT fail to name their head."""
    head = getattr(backbone, "head", None)
    several = hasattr(backbone, "head_dist")
    bare = isinstance(head, nn.Identity) and getattr(backbone, "num_classes", None) == 0 and not several
    return head if bare else backbone.get_classifier()  # pyright: ignore[reportCallIssue]


def _prefix_tokens(backbone: nn.Module) -> int:
    """Tokens before those of the map; the class token, if any, where timm does not count them (CaiT, XCiT, ConViT)."""
    counted: int | None = getattr(backbone, "num_prefix_tokens", None)
    if counted is not None:
        return counted
    return int(any(name.startswith("cls_token") for name, _ in backbone.named_parameters(recurse=False)))


def _grid(places: int, height: int, width: int) -> tuple[int, int]:
    """Rows and columns of so many tokens, in the proportions of the image."""
    rows = max(1, round((places * height / width) ** 0.5))
    if places % rows:
        raise UsageError(
            f"{places} places of the feature map do not form a grid for an image of {height}×{width} pixels"
        )
    return rows, places // rows
