"""HCFormer: a hierarchical vision backbone whose token mixer is clustering, as timm models.

    import leafward, timm
    leafward.register()
    model = timm.create_model("hcformer_tiny", num_classes=10)            # Lorentz window level, Euclidean patch level
    twin = timm.create_model("hcformer_tiny", geometry="euclidean")
    pyramid = timm.create_model("hcformer_tiny", features_only=True)      # strides 4, 8, 16, 32

Parameters, beside the published counts: nano 5.01M (5.1M), tiny 6.81M (7.0M), small 16.44M (16.1M), medium 34.60M
(33.7M). The third stage of nano and tiny is 200 channels wide instead of the published 196: a GPU multiplies matrices
whose widths are multiples of eight several times as fast. Maps are (B, C, H, W) outside and (B, H, W, C) inside, which
is the same memory in the channels-last format.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from timm.layers import (
    ClassifierHead,
    DropPath,
    Mlp,
    register_notrace_function,
    register_notrace_module,
    trunc_normal_,
)
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models._features import feature_take_indices
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from leafward.errors import UsageError, nearest
from leafward.nn import kernels as nn_kernels
from leafward.nn.space import working_dtype
from leafward.systems.hcformer import kernels
from leafward.systems.hcformer.bias import OffsetBias, TableBias
from leafward.systems.hcformer.layout import Layout, Windows
from leafward.systems.hcformer.mixer import WEIGHT_STD, ClusterMixer


@dataclass(frozen=True)
class Shape:
    """How the maps of the four stages are clustered."""

    windows: tuple[str, ...] = ("8", "4", "/2", "/1")
    """7×7, 7×7, 2×2 and 1×1 windows at 224 pixels; at others those of the first two stages keep their size."""
    centres: tuple[int, ...] = (4, 2, 4, 4)
    """Centres along each axis of a window."""
    global_centres: tuple[int, ...] = (4, 4, 4, 0)
    """Centres along each axis of the map, for the window level; the last stage is one window, so has none."""
    shared: bool = False
    """Both levels have the same features and values."""


SHAPE = Shape()
PUBLISHED_SHAPE = Shape(("8", "4", "/1", "/1"), (4, 2, 7, 4), (4, 4, 0, 0), shared=True)
"""As in the authors' code, without the window level of stage 3, whose softmax there is over one centre."""
PUBLISHED_WIDTH = 196
TABLE_SIDES = (56, 28, 14, 7)
"""Tokens along each axis at 224 pixels: what a table of positions has entries for."""
STAGES = 4
MLP_RATIOS = (8.0, 8.0, 4.0, 4.0)
SMALLEST = 4  # pixels of one token of the first stage


@dataclass(frozen=True)
class Assignment:
    """Which centres the tokens of one block went to, as the forward pass used it.

    `level` "patch": `weights` (B, G, h, N, M) of the N tokens of each of G windows over its M centres; padded places
    have weight 0. `level` "window": `weights` (B, h, G, K) of the windows over the K global centres. Windows, tokens
    and centres are in raster order; `layout` says where they lie.
    """

    stage: int
    block: int
    level: str
    weights: Tensor
    layout: Layout


class ImageNorm(nn.GroupNorm):
    """Group norm with one group, over all tokens and channels of an image: (B, H, W, C) -> (B, H, W, C).

    Statistics are those of the residual stream as it is, in float32 under autocast; the result, which goes into matrix
    products, has their type.
    """

    def __init__(self, channels: int) -> None:
        super().__init__(1, channels)

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not nn_kernels.serve(x):
            return super().forward(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1).to(working_dtype(x))
        return self.beside(x)[0]

    def beside(self, x: Tensor, moments: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """By kernels: the result, and what stands for x in the sum around a residual branch."""
        moments = kernels.image_moments(x, self.eps) if moments is None else moments
        return kernels.image_norm(x, moments, self.weight, self.bias, working_dtype(x))


class FeedForward(Mlp):
    """fc2(GELU(fc1(x))); of the two hidden layers only the one before GELU is kept for the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # a compiler decides that by itself
            return checkpoint(self._second, x, use_reentrant=False, preserve_rng_state=False)
        return self._second(x)

    def _second(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(x))


class Block(nn.Module):
    """x += γ₁ mixer(norm(x)); x += γ₂ MLP(norm(x)) (docs/hcformer.md, eq. 10)."""

    def __init__(self, mixer: ClusterMixer, dim: int, mlp_ratio: float, drop_path: float, layer_scale: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = ImageNorm(dim), ImageNorm(dim)
        self.mixer = mixer
        self.mlp = FeedForward(dim, int(dim * mlp_ratio))
        self.gamma1, self.gamma2 = (nn.Parameter(torch.full((dim,), layer_scale)) for _ in range(2))
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        if nn_kernels.serve(x):
            return self._by_kernels(x, layout)
        x = torch.addcmul(x, self.drop_path(self.mixer(self.norm1(x), layout)), self.gamma1)
        return torch.addcmul(x, self.drop_path(self.mlp(self.norm2(x))), self.gamma2)

    def _by_kernels(self, x: Tensor, layout: Layout) -> Tensor:
        """The same with sums and norms fused, and with the MLP of a narrow map in one kernel."""
        norm, dtype = self.norm2, working_dtype(x)
        h, stead = self.norm1.beside(x)
        x, moments = kernels.scaled_add(x, self.mixer(h, layout), self.gamma1, self._keep(x), norm.eps, stead)
        width, hidden = self.mlp.fc2.weight.shape
        if not kernels.mlp_fits(width, hidden, dtype, x.device):
            h, stead = norm.beside(x, moments)
            return kernels.scaled_add(x, self.mlp(h), self.gamma2, self._keep(x), norm.eps, stead)[0]
        scale, first, second = (_pair(layer) for layer in (norm, self.mlp.fc1, self.mlp.fc2))
        return kernels.normed_mlp(x, moments, scale, first, second, self.gamma2, self._keep(x), dtype)

    def _keep(self, x: Tensor) -> Tensor | None:
        """What each image's branch is multiplied with when whole paths are dropped: (B)."""
        if not self.training or isinstance(self.drop_path, nn.Identity):
            return None
        return self.drop_path(torch.ones(len(x), device=x.device))


def _pair(layer: nn.Module) -> tuple[Tensor, Tensor]:
    return layer.weight, layer.bias  # pyright: ignore[reportReturnType]


class Stage(nn.Module):
    """A convolution of `stride` (none in the first), then blocks of one layout, or of two in turns:
    (B, C, H, W) -> (B, C', H', W')."""

    def __init__(self, dim_in: int | None, dim: int, stride: int, blocks: Sequence[Block]) -> None:
        super().__init__()
        self.downsample = nn.Identity() if dim_in is None else nn.Conv2d(dim_in, dim, 3, stride=stride, padding=1)
        self.blocks = nn.ModuleList(blocks)
        self.grad_checkpointing = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.downsample(x).permute(0, 2, 3, 1)
        first: list[Any] = list(self.blocks[:2])  # every second block may have shifted windows
        moved = len(first) > 1 and first[0].mixer.windows != first[1].mixer.windows
        layouts = [block.mixer.layout(x.shape[1], x.shape[2], x.device) for block in first[: 1 + moved]]
        for number, block in enumerate(self.blocks):
            layout = layouts[number % len(layouts)]
            if self.grad_checkpointing and self.training:
                x = checkpoint(block, x, layout, use_reentrant=False)
            else:
                x = block(x, layout)
        return x.permute(0, 3, 1, 2)


for part in (ImageNorm, Stage):  # nodes of torch.fx as they are: what they do depends on sizes and devices
    register_notrace_module(part)


class HCFormer(nn.Module):
    """Stem, four stages of cluster mixers, norm and head; any input from 4×4 pixels, square or not.

    `geometry` ("lorentz" or "euclidean") is that of the window level, `patch_geometry` that of the patch level; the
    paper's three combinations are the default, both "euclidean" (the twin) and both "lorentz". With an `output_stride`
    of 16 or 8 the last maps stay that fine, as some segmentation heads want it.

    How maps are clustered, per stage: `windows` ("8": sides of eight tokens, "/2": two windows along each axis),
    `centres` along each axis of a window and `global_centres` along each axis of the map (0: no window level there;
    `hierarchy=False`: nowhere). `shifted` moves the windows of every second block by half a side. What is left at None
    is as in `SHAPE`, or with `published` as in the authors' code. `bias`, `assignment`, `shared` and the curvatures are
    those of `ClusterMixer`.
    """

    _version = 1  # of the state dict

    def __init__(
        self,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        depths: Sequence[int] = (2, 2, 6, 2),
        dims: Sequence[int] = (32, 64, 200, 224),
        heads: Sequence[int] = (4, 4, 8, 8),
        head_dim: int = 16,
        geometry: str = "lorentz",
        patch_geometry: str = "euclidean",
        curvature: float = 1.0,
        learn_curvature: bool = False,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        init_values: float = 1e-5,
        output_stride: int = 32,
        windows: Sequence[str | int] | None = None,
        centres: Sequence[int] | None = None,
        global_centres: Sequence[int] | None = None,
        hierarchy: bool = True,
        shifted: bool = False,
        bias: str = "function",
        assignment: str = "soft",
        patch_curvature: float | None = None,
        shared: bool | None = None,
        published: bool = False,
    ) -> None:
        super().__init__()
        shape = _shape(windows, centres, global_centres, shared, PUBLISHED_SHAPE if published else SHAPE)
        _check_sizes(output_stride, depths=depths, dims=dims, heads=heads)
        self.num_classes, self.in_chans = num_classes, in_chans
        self.num_features = self.head_hidden_size = dims[-1]
        self.stem = nn.Conv2d(in_chans, dims[0], 4, stride=4)
        rates = torch.linspace(0.0, drop_path_rate, sum(depths), device="cpu").split(list(depths))

        same: dict[str, Any] = {"head_dim": head_dim, "geometry": geometry, "patch_geometry": patch_geometry}
        same |= {"curvature": curvature, "learn_curvature": learn_curvature, "patch_curvature": patch_curvature}
        same |= {"bias": bias, "assignment": assignment, "shared": shape.shared}

        def block(stage: int, number: int, drop_path: float) -> Block:
            own: dict[str, Any] = {"centres": shape.centres[stage], "table_side": TABLE_SIDES[stage]}
            own["windows"] = replace(Windows.of(shape.windows[stage]), shifted=shifted and bool(number % 2))
            own["global_centres"] = shape.global_centres[stage] if hierarchy else 0
            mixer = ClusterMixer(dims[stage], heads[stage], **own, **same)
            return Block(mixer, dims[stage], MLP_RATIOS[stage], drop_path, init_values)

        reductions = [min(4 * 2**i, output_stride) for i in range(STAGES)]
        stages = []
        for i, dim in enumerate(dims):
            blocks = [block(i, number, rate) for number, rate in enumerate(rates[i].tolist())]
            stages.append(Stage(dims[i - 1] if i else None, dim, reductions[i] // reductions[max(0, i - 1)], blocks))
        self.stages = nn.Sequential(*stages)
        self.feature_info = [
            {"num_chs": dim, "reduction": reductions[i], "module": f"stages.{i}"} for i, dim in enumerate(dims)
        ]
        self.norm = ImageNorm(dims[-1])
        self.head = ClassifierHead(dims[-1], num_classes, pool_type=global_pool, drop_rate=drop_rate)
        self.apply(_init_weights)

    def no_weight_decay(self) -> set[str]:
        """Parameters that are not decayed: position biases, sharpness, scale and curvature, layer scale."""
        spared = {
            f"{prefix}.{name}"
            for prefix, module in self.named_modules()
            if isinstance(module, OffsetBias | TableBias)
            for name, _ in module.named_parameters()
        }
        return spared | {name for name, parameter in self.named_parameters() if parameter.ndim < 2}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Patterns that group parameters by depth, for layer-wise rates."""
        fine = [(r"^stages\.(\d+)\.downsample", (0,)), (r"^stages\.(\d+)\.blocks\.(\d+)", None), (r"^norm", (99999,))]
        return {"stem": r"^stem", "blocks": r"^stages\.(\d+)" if coarse else fine}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        for stage in self.stages:
            stage.grad_checkpointing = enable  # pyright: ignore[reportArgumentType]

    def set_input_size(self, img_size: int | tuple[int, int]) -> None:
        """Nothing has to be set: any size works at any time. Refuses sizes smaller than one token."""
        height, width = (img_size, img_size) if isinstance(img_size, int) else img_size
        check_size(height, width)

    def get_classifier(self) -> nn.Module:
        return self.head.fc

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        self.num_classes = num_classes
        self.head.reset(num_classes, global_pool)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """The maps of the chosen stages, with the final one (normed) before them unless `intermediates_only`.

        `norm` applies the final norm to the last stage's map, the only one it fits.
        """
        if output_fmt not in ("NCHW", "NHWC"):
            raise UsageError(f"output_fmt must be NCHW or NHWC, got {output_fmt!r}")
        wanted, last = feature_take_indices(len(self.stages), indices)
        stages = self.stages[: last + 1] if stop_early else self.stages
        final = len(self.stages) - 1
        x = self._stem(x)
        taken = []
        for index, stage in enumerate(stages):
            x = stage(x)
            if index in wanted:
                taken.append(self._norm(x) if norm and index == final else x)
        if output_fmt == "NHWC":
            taken = [map_.permute(0, 2, 3, 1) for map_ in taken]
        return taken if intermediates_only else (self._norm(x) if len(stages) == final + 1 else x, taken)

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop what the maps of the chosen stages do not need."""
        wanted, last = feature_take_indices(len(self.stages), indices)
        self.stages = self.stages[: last + 1]
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0, "")
        return wanted

    def forward_features(self, x: Tensor) -> Tensor:
        """The normed map of the last stage: (B, in_chans, H, W) -> (B, num_features, H/32, W/32)."""
        return self._norm(self.stages(self._stem(x)))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        return self.head(x, pre_logits=pre_logits)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))

    @torch.no_grad()
    def assignments(self, x: Tensor) -> list[Assignment]:
        """What a forward pass of `x` (B, in_chans, H, W) assigns to what: every block of every stage, both levels."""
        found: list[Assignment] = []
        handles = []
        for s, stage in enumerate(self.stages):
            for b, block in enumerate(stage.blocks):  # pyright: ignore[reportArgumentType]

                def keep(mixer: nn.Module, inputs: tuple[Any, ...], s: int = s, b: int = b) -> None:
                    assert isinstance(mixer, ClusterMixer)
                    for level, weights in mixer.mix(*inputs)[1].items():
                        found.append(Assignment(s, b, level, weights, inputs[1]))

                handles.append(block.mixer.register_forward_pre_hook(keep))
        try:
            self.forward_features(x)
        finally:
            for handle in handles:
                handle.remove()
        return found

    def _stem(self, x: Tensor) -> Tensor:
        check_size(x.shape[-2], x.shape[-1])
        return self.stem(x.contiguous(memory_format=torch.channels_last))

    def _norm(self, x: Tensor) -> Tensor:
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def _check_sizes(output_stride: int, **stages: Sequence[int]) -> None:
    if output_stride not in (8, 16, 32):
        raise UsageError(f"output_stride must be 8, 16 or 32, got {output_stride!r}")
    for name, values in stages.items():
        if len(values) != STAGES or min(values) < 1:
            raise UsageError(f"{name} must be four positive whole numbers, got {values!r}")


def _shape(
    windows: Sequence[str | int] | None,
    centres: Sequence[int] | None,
    global_centres: Sequence[int] | None,
    shared: bool | None,
    base: Shape,
) -> Shape:
    """`base` with what was given, one value for each stage."""
    given = {"windows": windows, "centres": centres, "global_centres": global_centres}
    chosen = {name: tuple(values) for name, values in given.items() if values is not None}
    for name, values in chosen.items():
        if isinstance(given[name], str) or len(values) != STAGES:
            raise UsageError(f"{name} must have one value for each of the four stages, got {given[name]!r}")
    return replace(base, **chosen, **({} if shared is None else {"shared": shared}))  # pyright: ignore[reportArgumentType]


@register_notrace_function  # which works for public names alone
def check_size(height: int, width: int) -> None:
    if height < SMALLEST or width < SMALLEST:
        raise UsageError(f"the image must have at least {SMALLEST}×{SMALLEST} pixels, got {height}×{width}")


def _init_weights(module: nn.Module) -> None:
    """Linear maps start small, as published; convolutions and the position bias' first layer as PyTorch has them."""
    if isinstance(module, nn.Linear) and module.in_features != 2:
        trunc_normal_(module.weight, std=WEIGHT_STD)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


VARIANTS: dict[str, dict[str, Any]] = {
    "hcformer_nano": {"depths": (2, 2, 6, 2), "dims": (32, 64, 200, 224), "heads": (4, 4, 8, 8), "head_dim": 16},
    "hcformer_tiny": {"depths": (2, 2, 6, 2), "dims": (32, 64, 200, 320), "heads": (4, 4, 8, 8), "head_dim": 24},
    "hcformer_small": {"depths": (2, 2, 6, 2), "dims": (64, 128, 320, 512), "heads": (4, 4, 8, 8), "head_dim": 32},
    "hcformer_medium": {
        "depths": (4, 4, 12, 4),
        "dims": (64, 128, 320, 512),
        "heads": (6, 6, 12, 12),
        "head_dim": 32,
    },
}
PUBLISHED_PARAMETERS = {
    "hcformer_nano": 5.1e6,
    "hcformer_tiny": 7.0e6,
    "hcformer_small": 16.1e6,
    "hcformer_medium": 33.7e6,
}

default_cfgs = generate_default_cfgs(
    {
        name: {
            "url": "",
            "num_classes": 1000,
            "input_size": (3, 224, 224),
            "pool_size": (7, 7),
            "crop_pct": 0.9,
            "interpolation": "bicubic",
            "mean": (0.485, 0.456, 0.406),
            "std": (0.229, 0.224, 0.225),
            "first_conv": "stem",
            "classifier": "head.fc",
        }
        for name in VARIANTS
    }
)

_ARGUMENTS = frozenset(inspect.signature(HCFormer).parameters)
_BUILDER_ARGUMENTS = frozenset(
    {"features_only", "out_indices", "feature_cls", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"}
)


def _create(variant: str, pretrained: bool, kwargs: dict[str, Any]) -> HCFormer:
    for name in kwargs:
        if name not in _ARGUMENTS | _BUILDER_ARGUMENTS:
            raise UsageError(f"{variant} has no argument {name!r}; {nearest(name, _ARGUMENTS)}")
    base: dict[str, Any] = VARIANTS[variant]
    if kwargs.get("published"):
        base = base | {"dims": tuple(PUBLISHED_WIDTH if dim == 200 else dim for dim in base["dims"])}
    feature_cfg = {"out_indices": (0, 1, 2, 3), "feature_cls": "getter"}
    chosen: dict[str, Any] = base | kwargs
    return build_model_with_cfg(HCFormer, variant, pretrained, feature_cfg=feature_cfg, **chosen)


@register_model
def hcformer_nano(pretrained: bool = False, **kwargs: Any) -> HCFormer:
    return _create("hcformer_nano", pretrained, kwargs)


@register_model
def hcformer_tiny(pretrained: bool = False, **kwargs: Any) -> HCFormer:
    return _create("hcformer_tiny", pretrained, kwargs)


@register_model
def hcformer_small(pretrained: bool = False, **kwargs: Any) -> HCFormer:
    return _create("hcformer_small", pretrained, kwargs)


@register_model
def hcformer_medium(pretrained: bool = False, **kwargs: Any) -> HCFormer:
    return _create("hcformer_medium", pretrained, kwargs)
