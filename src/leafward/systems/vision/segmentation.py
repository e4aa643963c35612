"""Semantic segmentation: the Semantic FPN head or any decoder of segmentation_models_pytorch, and its training.

scenes = load_scenes("street", ignore=255)            # of leafward.data.scenes
model = SegmentationModel("hcformer_tiny", len(scenes.classes))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision import tv_tensors
from torchvision.transforms import v2

from leafward.data.images import IMAGENET, Pixels
from leafward.data.scenes import IGNORED, Scenes, SceneSets, check, confusion, score
from leafward.engine import Loss
from leafward.errors import UsageError, require
from leafward.geometry.scalars import wide
from leafward.systems.vision.norms import SyncNorm
from leafward.systems.vision.pyramids import LEVELS, any_size, coarsest, pyramid

ALIGN = 32  # the coarsest stride of a backbone
FPN_WIDTH, HEAD_WIDTH = 256, 128
RATIOS = (0.5, 2.0)
"""Smallest and largest scale of a training scene, relative to one whose shorter side is as long as a crop."""
LONGEST = 4
"""Longest side of a training scene over that of a crop, at ratio 1: 2048 and 512 pixels in the paper's recipe."""

TRIES = 10
"""How often a crop of few classes is drawn again."""


class SemanticFPN(nn.Module):
    """Feature pyramid and head of "Panoptic Feature Pyramid Networks" (1901.02446), as the paper uses them.

    Laterals and top-down sums of 256 channels; every level goes to stride 4 by 3×3 convolutions of 128 channels, each
    with a doubling; their sum gives the scores. Maps of strides 4 … 32 -> (B, classes, H/4, W/4).
    """

    def __init__(self, channels: Sequence[int], classes: int) -> None:
        super().__init__()
        self.lateral = nn.ModuleList(nn.Conv2d(c, FPN_WIDTH, 1) for c in channels)
        self.smooth = nn.ModuleList(nn.Conv2d(FPN_WIDTH, FPN_WIDTH, 3, padding=1) for _ in channels)
        self.heads = nn.ModuleList(
            nn.ModuleList(_conv(FPN_WIDTH if k == 0 else HEAD_WIDTH, HEAD_WIDTH) for k in range(max(1, level)))
            for level in range(len(channels))
        )
        self.dropout = nn.Dropout2d(0.1)
        self.scores = nn.Conv2d(HEAD_WIDTH, classes, 1)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        levels = [lateral(map_) for lateral, map_ in zip(self.lateral, maps, strict=True)]
        for i in range(len(levels) - 1, 0, -1):
            levels[i - 1] = levels[i - 1] + F.interpolate(levels[i], size=levels[i - 1].shape[2:], mode="nearest")
        total = None
        for i, (level, smooth) in enumerate(zip(levels, self.smooth, strict=True)):
            x = smooth(level)
            for k, conv in enumerate(self.heads[i]):  # pyright: ignore[reportArgumentType]
                x = conv(x)
                if i:  # the sizes of the finer levels, so that odd maps meet as well
                    x = F.interpolate(x, size=levels[i - 1 - k].shape[2:], mode="bilinear", align_corners=False)
            total = x if total is None else total + x
        return self.scores(self.dropout(total))


def _conv(inside: int, outside: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inside, outside, 3, padding=1, bias=False), SyncNorm(outside), nn.ReLU())


class SegmentationModel(nn.Module):
    """Any timm backbone with the Semantic FPN head, or a decoder of segmentation_models_pytorch ("smp:Unet"):
    (B, 3, H, W) -> scores (B, classes, H, W)."""

    def __init__(
        self, model: str, classes: int, decoder: str = "semantic-fpn", arguments: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__()
        if classes < 2:
            hint = "of masks with 0 and 255, where 255 does not count, save those as 0 and 1"
            raise UsageError(f"segmentation needs at least two classes, got {classes}; {hint}")
        if decoder.startswith("smp:"):
            self.whole = _smp(decoder.removeprefix("smp:"), model, classes, dict(arguments or {}))
            return
        if decoder != "semantic-fpn":
            raise UsageError(f"decoder must be semantic-fpn or smp:NAME, got {decoder!r}")
        self.whole = None
        backbone = pyramid(model, arguments or {})
        self.backbone: nn.Module = backbone
        channels = backbone.feature_info.channels()[-LEVELS:]
        self.norms = nn.ModuleList(nn.GroupNorm(1, c) for c in channels)  # every stage's map gets its own norm
        self.decoder = SemanticFPN(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        if self.whole is not None:
            return self.whole(x)
        maps = [norm(map_) for norm, map_ in zip(self.norms, coarsest(self.backbone, x), strict=True)]
        return F.interpolate(self.decoder(maps), size=x.shape[2:], mode="bilinear", align_corners=False)


def _smp(name: str, model: str, classes: int, arguments: dict[str, Any]) -> Any:
    smp = require("segmentation_models_pytorch", "vision")
    kind = getattr(smp, name, None)
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise UsageError(f"segmentation_models_pytorch has no decoder {name!r}, such as Unet, FPN or UPerNet")
    return kind(encoder_name=f"tu-{model}", encoder_weights=None, classes=classes, **(any_size(model) | arguments))


class RandomScale(v2.Transform):
    """Scale images and masks so that the shorter side has r · size pixels, r uniform in `RATIOS`, or fewer where the
    longer one would have more than r · `LONGEST` · size.

    torchvision's ScaleJitter fits the longer side to r · size instead: scenes would be smaller than when they are
    scored, and more of each crop would be padding.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        height, width = v2.functional.get_size(flat_inputs[0])
        ratio = float(torch.empty(()).uniform_(*RATIOS))
        scale = ratio * self.size * min(1 / min(height, width), LONGEST / max(height, width))
        return {"size": [max(1, round(side * scale)) for side in (height, width)]}

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        return v2.functional.resize(inpt, params["size"])


class Photometric(v2.Transform):
    """Brightness, contrast, saturation and hue as mmsegmentation distorts them, each with a chance of one half: ±32 of
    255, ×[0.5, 1.5] (before or after the colours), ×[0.5, 1.5], ±18 of 180 degrees. Masks stay."""

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        def drawn(low: float, high: float) -> float | None:
            value, chance = torch.rand(2).tolist()
            return low + (high - low) * value if chance < 0.5 else None

        params: dict[str, Any] = {"brightness": drawn(-32.0, 32.0), "contrast": drawn(0.5, 1.5)}
        params |= {"saturation": drawn(0.5, 1.5), "hue": drawn(-0.1, 0.1)}
        return params | {"late": bool(torch.rand(()) < 0.5)}

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        if not isinstance(inpt, tv_tensors.Image):
            return inpt
        image = inpt.as_subclass(Tensor)
        if params["brightness"] is not None:
            image = (image.float() + params["brightness"]).clamp(0, 255).to(inpt.dtype)
        contrast = [("contrast", v2.functional.adjust_brightness)]  # mmsegmentation's multiplies, as this does
        colours = [("saturation", v2.functional.adjust_saturation), ("hue", v2.functional.adjust_hue)]
        steps = colours + contrast if params["late"] else contrast + colours
        for name, change in steps:
            image = image if params[name] is None else change(image, params[name])
        return tv_tensors.wrap(image, like=inpt)  # pyright: ignore[reportCallIssue]


class SparseCrop(v2.RandomCrop):
    """A crop that is drawn again, `TRIES` times at most, while one class has more than `most` of its labels."""

    def __init__(self, size: int, most: float, fill: Any) -> None:
        super().__init__(size, pad_if_needed=True, fill=fill)
        self.most = most

    def forward(self, *inputs: Any) -> Any:
        cropped = super().forward(*inputs)
        for _ in range(TRIES if self.most < 1.0 else 0):
            mask = cropped[1]
            counts = mask[mask != IGNORED].unique(return_counts=True)[1]
            if len(counts) > 1 and int(counts.max()) <= self.most * int(counts.sum()):
                break
            cropped = super().forward(*inputs)
        return cropped


class Crops:
    """Training scenes: scaled (`RandomScale`), cropped to size × size, mirrored, perhaps distorted in their colours:
    (image (3, s, s), mask (s, s))."""

    def __init__(
        self,
        scenes: Scenes,
        size: int,
        hflip: float,
        pixels: Pixels = IMAGENET,
        photometric: bool = False,
        cat_max_ratio: float = 1.0,
    ) -> None:
        self.scenes, self.pixels = scenes, pixels
        fill = {tv_tensors.Image: 0, tv_tensors.Mask: IGNORED}
        steps = [RandomScale(size), SparseCrop(size, cat_max_ratio, fill), v2.RandomHorizontalFlip(hflip)]
        self.transform = v2.Compose(steps + [Photometric()] * photometric)

    def __len__(self) -> int:
        return len(self.scenes)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = tv_tensors.Image(torch.from_numpy(np.asarray(self.scenes.image(index)).copy()).permute(2, 0, 1))
        mask = tv_tensors.Mask(torch.from_numpy(self.scenes.mask(index)))
        image, mask = self.transform(image, mask)
        return normalised(image.as_subclass(Tensor), self.pixels), mask.as_subclass(Tensor).long()


def normalised(image: Tensor, pixels: Pixels = IMAGENET) -> Tensor:
    """(3, H, W) uint8 -> float with the mean and spread that the backbone expects."""
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in pixels)
    return (image.float() / 255 - mean) / std


class Segmentation:
    """Learns to label pixels. Give it to `engine.train_loop` with a model from (B, 3, H, W) to scores of that size."""

    monitor = "miou"
    mode: Literal["max"] = "max"

    def __init__(
        self,
        scenes: SceneSets,
        size: int,
        decoder: str = "semantic-fpn",
        *,
        hflip: float = 0.5,
        sliding: bool = False,
        pixels: Pixels = IMAGENET,
        photometric: bool = False,
        cat_max_ratio: float = 1.0,
    ) -> None:
        if size % ALIGN:
            raise UsageError(f"the size of crops must be a multiple of {ALIGN}, got {size}")
        self.scenes, self.size, self.decoder, self.sliding, self.pixels = scenes, size, decoder, sliding, pixels
        self.classes = scenes.classes
        self.dataset = Crops(scenes.train, size, hflip, pixels, photometric, cat_max_ratio)

    def check(self) -> None:
        """Look at all the data before training starts; whatever is wrong is reported by the name of its file."""
        check(self.scenes.train, "training scenes", complete=True)
        check(self.scenes.held_out, "held-out scenes", complete=False)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        images, masks = batch
        scores = wide(model(images))
        total = F.cross_entropy(scores, masks, ignore_index=IGNORED, reduction="sum")
        valid = masks != IGNORED
        right = ((scores.argmax(dim=1) == masks) & valid).sum()
        return Loss(total, valid.flatten(1).sum(dim=1), {"pixel_accuracy": right})

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return self.measure(model)[0]

    @torch.no_grad()
    def measure(self, model: nn.Module) -> tuple[dict[str, float], None]:
        """The scores over all held-out scenes; single scenes have no score that would add up to the mean IoU."""
        device = next(model.parameters()).device
        table = torch.zeros(len(self.classes), len(self.classes), dtype=torch.int64)
        for index in range(len(self.scenes.held_out)):
            image = torch.from_numpy(np.asarray(self.scenes.held_out.image(index)).copy()).permute(2, 0, 1)
            guess = predict(model, normalised(image, self.pixels).to(device), self.size, self.sliding)
            table += confusion(guess.cpu(), torch.from_numpy(self.scenes.held_out.mask(index)), len(self.classes))
        return score(table), None


def predict(model: nn.Module, image: Tensor, size: int, sliding: bool) -> Tensor:
    """Class of every pixel of a normalised image (3, H, W) -> (H, W): whole, with the shorter side at `size`, or by
    windows of `size` that overlap by a third."""
    height, width = image.shape[1:]
    scale = size / min(height, width)
    shape = [max(ALIGN, round(side * scale / ALIGN) * ALIGN) for side in (height, width)]
    x = F.interpolate(image.unsqueeze(0), size=shape, mode="bilinear", align_corners=False)
    scores = _slide(model, x, size) if sliding else wide(model(x))
    return F.interpolate(scores, size=(height, width), mode="bilinear", align_corners=False)[0].argmax(dim=0)


def _slide(model: nn.Module, x: Tensor, size: int) -> Tensor:
    """Mean scores of overlapping windows."""
    step = max(1, size * 2 // 3)
    tops, lefts = (dict.fromkeys([*range(0, max(1, side - size), step), max(0, side - size)]) for side in x.shape[2:])
    total, count = x.new_zeros(()), x.new_zeros(1, 1, *x.shape[2:])
    for top in tops:
        for left in lefts:
            place = (..., slice(top, top + size), slice(left, left + size))
            part = wide(model(x[place]))
            if not total.ndim:
                total = part.new_zeros(1, part.shape[1], *x.shape[2:])
            total[place] += part
            count[place] += 1
    return total / count
