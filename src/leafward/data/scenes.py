"""Scenes with a mask each, of which every pixel has a class: readers of the usual layouts, and scores of masks.

scenes = load_scenes("street", ignore=255)            # images/ and masks/, ADE20K or VOC layout
score(confusion(guess, scenes.held_out.mask(0), len(scenes.classes)))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leafward.data.image_files import read_image, read_mask, turned_hint
from leafward.data.images import HELD_OUT, TRAIN, divided, image_files
from leafward.errors import DataError
from leafward.files import inside, read_text

IGNORED = -1
"""Label of pixels that do not count, in every mask that this module hands out."""
IMAGE_FOLDERS = ("images", "image", "images_detectron2")
MASK_FOLDERS = ("masks", "annotations", "labels", "mask", "annotations_detectron2", "stuffthingmaps")


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
    raw = read_mask(path)
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
            hint = turned_hint((width, height), labels.shape[::-1])
            raise DataError(
                f"{what}: the mask {mask} is {labels.shape[::-1]}, its image {file} is {(width, height)}{hint}"
            )
        seen[np.unique(labels[labels != IGNORED])] = True
    if complete and not seen.all():
        name = scenes.classes[int(np.flatnonzero(~seen)[0])]
        raise DataError(f"{what}: no mask has a pixel of class {name!r}")


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
