"""Pictures for the evidence on CLIP adapters, from the original files or from small packed ones.

A folder holds either the original parquet files (`SOURCES`) or what `pack` wrote: one NAME.npz for each set, with
the bytes of all pictures in a row, smaller and fewer, so that a set travels in a megabyte or two.
"""

from __future__ import annotations

import functools
import io
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from leafward.data.image_files import read_image, read_mask

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""CLIP's normalisation."""
CAMVID = ("sky", "building", "pole", "road", "sidewalk", "tree", "sign", "fence", "car", "pedestrian", "bicyclist")
SOURCES = {
    "tiny_imagenet": "tiny_imagenet_100/tiny_imagenet_100c_160tr_40val.parquet",
    "hierarcaps": "hierarcaps/hierarcaps_test.parquet",
    "clothing": "clothing128/clothing.parquet",
    "camvid": "camvid_240x180/camvid.parquet",
    "coco": "coco128/coco128_train_val.parquet",
}
COCO_NAMES = "coco128/semantic_segmentation_config.yaml"
SIDES = {"tiny_imagenet": 64, "hierarcaps": 96, "clothing": 64, "camvid": 160, "coco": 160}
"""Longest side of a packed picture."""
KEPT = {"tiny_imagenet": (36, 6), "camvid": (2, 2)}
"""tiny_imagenet: training and validation pictures of a class; camvid: every so many frames, and of the test part."""
QUALITY = 40
TRAIN, VALIDATION, TEST = 0, 1, 2
PARTS = {"train": TRAIN, "train2017": TRAIN, "val": VALIDATION, "validation": VALIDATION, "test": TEST}


@dataclass(frozen=True)
class Pictures:
    """N encoded pictures with the part they belong to; labels (N) into `names`, or captions (N, levels), or masks."""

    images: list[bytes]
    part: np.ndarray
    labels: np.ndarray
    names: tuple[str, ...] = ()
    captions: np.ndarray | None = None
    masks: list[bytes] | None = None

    def rows(self, part: int) -> np.ndarray:
        return np.flatnonzero(self.part == part)

    def few(self, most: int | None) -> Pictures:
        """At most so many of every part."""
        rows = np.sort(np.concatenate([self.rows(part)[:most] for part in (TRAIN, VALIDATION, TEST)]))
        return Pictures(
            [self.images[row] for row in rows],
            self.part[rows],
            self.labels[rows],
            self.names,
            None if self.captions is None else self.captions[rows],
            None if self.masks is None else [self.masks[row] for row in rows],
        )


def load(folder: Path, name: str) -> Pictures:
    """A set of pictures by its name in `SOURCES`."""
    packed = folder / f"{name}.npz"
    return _unpacked(packed) if packed.is_file() else _READERS[name](folder)


def _table(folder: Path, name: str) -> list[dict[str, Any]]:
    from pyarrow import parquet

    return parquet.read_table(folder / SOURCES[name]).to_pylist()


def _tiny_imagenet(folder: Path) -> Pictures:
    rows = _table(folder, "tiny_imagenet")
    names = sorted({row["words"] for row in rows})
    return Pictures(
        [row["jpeg"] for row in rows],
        np.array([PARTS[row["split"]] for row in rows]),
        np.array([names.index(row["words"]) for row in rows]),
        tuple(name.partition(",")[0] for name in names),
    )


def _hierarcaps(folder: Path) -> Pictures:
    """Without the photos that are also among those with masks."""
    masked = {int(row["image_id"]) for row in _table(folder, "coco")}
    rows = [
        row for row in _table(folder, "hierarcaps") if int(Path(row["image_url"]).stem.rpartition("_")[2]) not in masked
    ]
    none = np.zeros(len(rows), np.int64)
    return Pictures([row["jpeg"] for row in rows], none, none, captions=np.array([row["captions"][:4] for row in rows]))


def _clothing(folder: Path) -> Pictures:
    rows = _table(folder, "clothing")
    names = sorted({row["label"] for row in rows})
    labels = np.array([names.index(row["label"]) for row in rows])
    return Pictures(
        [row["jpeg"] for row in rows], np.array([PARTS[row["split"]] for row in rows]), labels, tuple(names)
    )


def _camvid(folder: Path) -> Pictures:
    """Classes 0 … 10; other numbers in a mask are void."""
    rows = _table(folder, "camvid")
    part = np.array([PARTS[row["split"]] for row in rows])
    masks = [row["mask_png"] for row in rows]
    return Pictures([row["jpeg"] for row in rows], part, np.zeros(len(rows), np.int64), CAMVID, masks=masks)


def _coco(folder: Path) -> Pictures:
    """Those with a mask; train2017 is trained on and val2017 tested. Masks hold category ids, 0 is unlabelled."""
    import yaml

    rows = [row for row in _table(folder, "coco") if row["semantic_png"]]
    listed: dict[int, str] = yaml.safe_load((folder / COCO_NAMES).read_text(encoding="utf-8"))["classes"]
    names = tuple(_plain(listed.get(number, "")) for number in range(max(listed) + 1))
    part = np.array([TRAIN if row["split"] == "train2017" else TEST for row in rows])
    masks = [row["semantic_png"] for row in rows]
    return Pictures([row["jpeg"] for row in rows], part, np.zeros(len(rows), np.int64), names, masks=masks)


def _plain(name: str) -> str:
    """floor-other-merged -> floor; an empty name for what is no class."""
    for ending in ("-merged", "-other", "-stuff"):
        name = name.removesuffix(ending)
    return "" if name == "unlabeled" else name.replace("-", " ")


_READERS: dict[str, Callable[[Path], Pictures]] = {
    "tiny_imagenet": _tiny_imagenet,
    "hierarcaps": _hierarcaps,
    "clothing": _clothing,
    "camvid": _camvid,
    "coco": _coco,
}


def pack(folder: Path, out: Path) -> None:
    """Write every set small to `out`."""
    out.mkdir(parents=True, exist_ok=True)
    for name in SOURCES:
        pictures = _READERS[name](folder)
        rows = np.array(list(_kept(name, pictures)))
        arrays: dict[str, Any] = {
            "part": pictures.part[rows].astype(np.uint8),
            "labels": pictures.labels[rows].astype(np.uint8),
            "names": np.array(pictures.names, dtype=np.str_),
        }
        arrays |= _joined("image", [_smaller(pictures.images[row], SIDES[name]) for row in rows])
        if pictures.captions is not None:
            arrays["captions"] = pictures.captions[rows].astype(np.str_)
        if pictures.masks is not None:
            arrays |= _joined("mask", [_smaller(pictures.masks[row], SIDES[name], mask=True) for row in rows])
        np.savez_compressed(out / f"{name}.npz", **arrays)


def _kept(name: str, pictures: Pictures) -> Iterator[int]:
    if name == "tiny_imagenet":
        for part, most in zip((TRAIN, VALIDATION), KEPT[name], strict=True):
            for label in range(len(pictures.names)):
                yield from np.flatnonzero((pictures.part == part) & (pictures.labels == label))[:most]
    elif name == "camvid":
        for part, every in ((TRAIN, KEPT[name][0]), (VALIDATION, KEPT[name][0]), (TEST, KEPT[name][1])):
            yield from pictures.rows(part)[::every]
    else:
        yield from range(len(pictures.images))


def _smaller(data: bytes, side: int, mask: bool = False) -> bytes:
    buffer = io.BytesIO()
    image = _picture(data, mask)
    share = min(1.0, side / max(image.size))
    to = (max(1, round(image.width * share)), max(1, round(image.height * share)))
    image = image.resize(to, Image.Resampling.NEAREST if mask else Image.Resampling.LANCZOS)
    image.save(buffer, **({"format": "PNG", "optimize": True} if mask else {"format": "WEBP", "quality": QUALITY}))
    return buffer.getvalue()


def _picture(data: bytes, mask: bool) -> Image.Image:
    return Image.fromarray(read_mask(data).astype(np.uint8)) if mask else read_image(data)


def _joined(name: str, parts: Sequence[bytes]) -> dict[str, np.ndarray]:
    return {
        f"{name}_bytes": np.frombuffer(b"".join(parts), np.uint8),
        f"{name}_ends": np.cumsum([len(part) for part in parts]).astype(np.int64),
    }


def _unpacked(file: Path) -> Pictures:
    with np.load(file) as arrays:
        found = {name: arrays[name] for name in arrays.files}

    def parts(name: str) -> list[bytes]:
        data, ends = found[f"{name}_bytes"].tobytes(), [0, *found[f"{name}_ends"].tolist()]
        return [data[start:end] for start, end in itertools.pairwise(ends)]

    return Pictures(
        parts("image"),
        found["part"].astype(np.int64),
        found["labels"].astype(np.int64),
        tuple(str(name) for name in found["names"]),
        found.get("captions"),
        parts("mask") if "mask_bytes" in found else None,
    )


def decoded(parts: Sequence[bytes], size: tuple[int, int], device: str, mask: bool = False) -> Tensor:
    """Bytes (N, 3, H, W) of pictures, or (N, 1, H, W) of masks, stretched to `size`, on the device."""

    def one(data: bytes) -> np.ndarray:
        method = Image.Resampling.NEAREST if mask else Image.Resampling.BILINEAR
        return np.array(_picture(data, mask).resize((size[1], size[0]), method))

    with ThreadPoolExecutor() as threads:
        stack = torch.from_numpy(np.stack(list(threads.map(one, parts)))).to(device)
    return stack.unsqueeze(1) if mask else stack.permute(0, 3, 1, 2).contiguous()


def normalised(images: Tensor) -> Tensor:
    """Bytes (N, 3, H, W) as CLIP's pixels."""
    mean, std = _moments(images.device)
    return (images.float() / 255.0 - mean) / std


@functools.cache  # to bring them to a GPU at every step would wait for it
def _moments(device: torch.device) -> tuple[Tensor, ...]:
    return tuple(torch.tensor(values, device=device).view(3, 1, 1) for values in (MEAN, STD))


def crops(images: Tensor, size: int, low: float, masks: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Random rectangles of `low` to the whole of each side, mirrored by chance, as CLIP's pixels (N, 3, size, size).

    Masks (N, 1, H, W) of numbers go along, (N, size, size). All on the device of the images.
    """
    count, device = len(images), images.device
    share = low + (1.0 - low) * torch.rand(count, 1, device=device)
    shift = (2.0 * torch.rand(count, 2, device=device) - 1.0) * (1.0 - share)
    mirror = torch.where(torch.rand(count, device=device) < 0.5, -1.0, 1.0)
    theta = torch.zeros(count, 2, 3, device=device)
    theta[:, 0, 0], theta[:, 1, 1], theta[:, :, 2] = share[:, 0] * mirror, share[:, 0], shift
    grid = F.affine_grid(theta, [count, 3, size, size], align_corners=False)
    pixels = F.grid_sample(normalised(images), grid, padding_mode="border", align_corners=False)
    bright = 1.0 + 0.2 * (2.0 * torch.rand(count, 1, 1, 1, device=device) - 1.0)
    if masks is None:
        return pixels * bright, None
    taken = F.grid_sample(masks.float(), grid, mode="nearest", padding_mode="border", align_corners=False)
    return pixels * bright, taken.squeeze(1).round().long()
