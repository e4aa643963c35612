"""Semantic segmentation: scenes with masks, the Semantic FPN head or any decoder of segmentation_models_pytorch, mIoU.

scenes = load_scenes("street", ignore=255)            # images/ and masks/, ADE20K or VOC layout
model = SegmentationModel("hcformer_tiny", len(scenes.classes))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision import tv_tensors
from torchvision.transforms import v2

from leafward.engine import Loss
from leafward.errors import DataError, UsageError, require
from leafward.files import inside, read_text
from leafward.tasks.images import HELD_OUT, IMAGENET, TRAIN, Pixels, divided, image_files, read_image
from leafward.tasks.pyramids import LEVELS, any_size, coarsest, pyramid

IGNORED = -1
"""Label of pixels that do not count, in every mask that this module hands out."""
MASK_MODES = ("1", "L", "P", "I", "I;16", "I;16L", "I;16B")
"""Pillow's modes of masks: one number of 1, 8, 16 or 32 bits for each pixel."""
IMAGE_FOLDERS = ("images", "image", "images_detectron2")
MASK_FOLDERS = ("masks", "annotations", "labels", "mask", "annotations_detectron2", "stuffthingmaps")
ALIGN = 32  # the coarsest stride of a backbone
FPN_WIDTH, HEAD_WIDTH = 256, 128


@dataclass(frozen=True)
class Scenes:
    """Pairs of image and mask files, and the names of the classes."""

    pairs: list[tuple[Path, Path]]
    classes: list[str]
    ignore: int | None

    def __len__(self) -> int:
        return len(self.pairs)

    def image(self, index: int) -> Any:
        return read_image(self.pairs[index][0])

    def mask(self, index: int) -> np.ndarray:
        """(H, W) int32 of class numbers and `IGNORED`."""
        file = self.pairs[index][1]
        labels = _labels(file, self.ignore)
        if (highest := labels.max(initial=IGNORED)) >= len(self.classes):
            raise DataError(
                f"the mask {file} has label {highest}, of {len(self.classes)} classes; "
                "ignore gives the number of the pixels that do not count"
            )
        return labels


@dataclass(frozen=True)
class SceneSets:
    train: Scenes
    held_out: Scenes

    @property
    def classes(self) -> list[str]:
        return self.train.classes


def load_scenes(data: str | Path, ignore: int | None = 255, held_out: float = 0.1, seed: int = 0) -> SceneSets:
    """Scenes from a folder: `images` and `masks` (or `annotations`), with or without `training` and `validation` below,
    as ADE20K has it, or `train2017` and `val2017`, as COCO-Stuff; or VOC's JPEGImages, SegmentationClass and
    ImageSets/Segmentation, or PASCAL Context's SegmentationClassContext and ImageSets/SegmentationContext.

    Masks hold class numbers of 8 or 16 bits. `ignore` is the number of pixels that do not count; where it is 0, as in
    ADE20K, classes begin at 1. Names come from `classes.txt`, one in a line; else the masks say how many there are.
    """
    path = Path(data)
    if (path / "JPEGImages").is_dir():
        context = "Context" * (path / "SegmentationClassContext").is_dir()
        train, test = (_voc_pairs(path, names, context) for names in (("train",), ("val", "test")))
    else:
        images, masks = _one_of(path, IMAGE_FOLDERS), _one_of(path, MASK_FOLDERS)
        train, test = (_pairs(images, masks, names) for names in (TRAIN, HELD_OUT))
        if train is None:
            train, test = divided(_pairs(images, masks, None) or [], held_out, seed)
    if not train or not test:
        raise DataError(
            f"{path} has {len(train or [])} scenes to train on and {len(test or [])} held out; both need some"
        )
    classes = _class_names(path, [mask for _, mask in train], ignore)
    return SceneSets(Scenes(train, classes, ignore), Scenes(test, classes, ignore))


def _one_of(path: Path, names: Sequence[str]) -> Path:
    found = next((path / name for name in names if (path / name).is_dir()), None)
    if found is None:
        raise DataError(f"{path} has no folder {' or '.join(names)}")
    return found


def _pairs(images: Path, masks: Path, splits: Sequence[str] | None) -> list[tuple[Path, Path]] | None:
    """Images and masks with equal names; None where there is no folder of such a split."""
    if splits is not None:
        names = (*splits, *(f"{name}2017" for name in splits))
        name = next((name for name in names if (images / name).is_dir()), None)
        if name is None:
            return None
        images, masks = images / name, masks / name
    by_name = {file.relative_to(masks).with_suffix(""): file for file in image_files(masks)}
    pairs = []
    for file in image_files(images):
        mask = by_name.get(file.relative_to(images).with_suffix(""))
        if mask is None:
            raise DataError(f"{file} has no mask in {masks}")
        pairs.append((file, mask))
    return pairs


def _voc_pairs(path: Path, names: Sequence[str], context: str) -> list[tuple[Path, Path]]:
    lists = path / "ImageSets" / f"Segmentation{context}"
    found = next((lists / f"{name}.txt" for name in names if (lists / f"{name}.txt").is_file()), None)
    if found is None:
        raise DataError(f"{lists} has no {' or '.join(f'{name}.txt' for name in names)}")
    stems = read_text(found).split()
    return [
        (inside(path, f"JPEGImages/{stem}.jpg"), inside(path, f"SegmentationClass{context}/{stem}.png"))
        for stem in stems
    ]


def _class_names(path: Path, masks: Sequence[Path], ignore: int | None) -> list[str]:
    file = path / "classes.txt"
    if file.is_file():
        return [line.strip() for line in read_text(file).splitlines() if line.strip()]
    highest = -1
    for mask in masks:
        labels = _labels(mask, ignore)
        highest = max(highest, int(labels.max(initial=-1)))
    return [str(k) for k in range(highest + 1)]


def _labels(path: Path, ignore: int | None) -> np.ndarray:
    pillow = require("PIL.Image", "vision")
    try:
        with pillow.open(path) as image:
            if image.mode not in MASK_MODES:
                raise DataError(f"the mask {path} must hold one class number for each pixel, not {image.mode} colours")
            raw = np.asarray(image).astype(np.int32)
    except (OSError, SyntaxError, ValueError, pillow.DecompressionBombError) as error:
        raise DataError(f"the mask {path} cannot be read: {error}") from None
    if ignore == 0:
        return raw - 1  # 0 becomes IGNORED
    return raw if ignore is None else np.where(raw == ignore, np.int32(IGNORED), raw)


def check(scenes: Scenes, what: str, complete: bool) -> None:
    """Refuse masks of another size than the image, labels out of range and, if `complete`, classes without a pixel."""
    seen = np.zeros(len(scenes.classes), dtype=bool)
    for index, (file, mask) in enumerate(scenes.pairs):
        width, height = scenes.image(index).size
        labels = scenes.mask(index)
        if labels.shape != (height, width):
            raise DataError(f"{what}: the mask {mask} is {labels.shape[::-1]}, its image {file} is {(width, height)}")
        seen[np.unique(labels[labels != IGNORED])] = True
    if complete and not seen.all():
        name = scenes.classes[int(np.flatnonzero(~seen)[0])]
        raise DataError(f"{what}: no mask has a pixel of class {name!r}")


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
    return nn.Sequential(nn.Conv2d(inside, outside, 3, padding=1, bias=False), nn.BatchNorm2d(outside), nn.ReLU())


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


class Crops:
    """Training scenes: scaled by 0.5 to 2, cropped to size × size, mirrored: (image (3, s, s), mask (s, s))."""

    def __init__(self, scenes: Scenes, size: int, hflip: float, pixels: Pixels = IMAGENET) -> None:
        self.scenes, self.pixels = scenes, pixels
        fill = {tv_tensors.Image: 0, tv_tensors.Mask: IGNORED}
        self.transform = v2.Compose(
            [
                v2.ScaleJitter((size, size), scale_range=(0.5, 2.0)),
                v2.RandomCrop(size, pad_if_needed=True, fill=fill),  # pyright: ignore[reportArgumentType]
                v2.RandomHorizontalFlip(hflip),
            ]
        )

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
    """Learns to label pixels. Give it to `engine.fit` with a model that maps (B, 3, H, W) to scores of that size."""

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
    ) -> None:
        if size % ALIGN:
            raise UsageError(f"the size of crops must be a multiple of {ALIGN}, got {size}")
        self.scenes, self.size, self.decoder, self.sliding, self.pixels = scenes, size, decoder, sliding, pixels
        self.classes = scenes.classes
        self.dataset = Crops(scenes.train, size, hflip, pixels)

    def check(self) -> None:
        """Look at all the data before training starts; whatever is wrong is reported by the name of its file."""
        check(self.scenes.train, "training scenes", complete=True)
        check(self.scenes.held_out, "held-out scenes", complete=False)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        images, masks = batch
        scores = model(images).float()
        total = F.cross_entropy(scores, masks, ignore_index=IGNORED, reduction="sum")
        valid = masks != IGNORED
        right = ((scores.argmax(dim=1) == masks) & valid).sum()
        return Loss(total, valid.sum(), {"pixel_accuracy": right})

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
    scores = _slide(model, x, size) if sliding else model(x).float()
    return F.interpolate(scores, size=(height, width), mode="bilinear", align_corners=False)[0].argmax(dim=0)


def _slide(model: nn.Module, x: Tensor, size: int) -> Tensor:
    """Mean scores of overlapping windows."""
    step = max(1, size * 2 // 3)
    tops, lefts = (dict.fromkeys([*range(0, max(1, side - size), step), max(0, side - size)]) for side in x.shape[2:])
    total, count = x.new_zeros(()), x.new_zeros(1, 1, *x.shape[2:])
    for top in tops:
        for left in lefts:
            place = (..., slice(top, top + size), slice(left, left + size))
            part = model(x[place]).float()
            if not total.ndim:
                total = part.new_zeros(1, part.shape[1], *x.shape[2:])
            total[place] += part
            count[place] += 1
    return total / count


def confusion(guess: Tensor, truth: Tensor, classes: int) -> Tensor:
    """(classes, classes) pixel counts, truth in rows; ignored pixels do not count."""
    valid = truth != IGNORED
    pairs = truth[valid].long() * classes + guess[valid].long()
    return torch.bincount(pairs, minlength=classes * classes).view(classes, classes)


def score(table: Tensor) -> dict[str, float]:
    """Mean IoU over the classes that occur in truth or guess, and pixel accuracy, from a confusion table."""
    hits = table.diagonal().double()
    union = table.sum(0) + table.sum(1) - table.diagonal()
    seen = union > 0
    return {
        "miou": (hits[seen] / union[seen]).mean().item(),
        "pixel_accuracy": (hits.sum() / table.sum().clamp_min(1)).item(),
    }
