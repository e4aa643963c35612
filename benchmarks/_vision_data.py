"""The images that the evidence on vision is measured on, as arrays, and a small packed copy of them.

    python benchmarks/_vision_data.py SOURCE TARGET

writes TARGET/vision.npz (24 MB) for machines that lack pyarrow. SOURCE holds, as Parquet, 100 classes of Tiny
ImageNet (64 × 64 pixels, with WordNet's is-a edges), CamVid (240 × 180, eleven classes) and BCCD (blood cells with
boxes, halved to 320 × 240 here). Packing encodes the images once more, as WebP, and keeps 125 of the 160 training
images of each class of Tiny ImageNet.
"""

from __future__ import annotations

import dataclasses
import io
import sys
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from leafward.data.image_files import read_image, read_mask

PACKED = "vision.npz"
QUALITY = {"objects_train": 65, "objects_test": 65, "scenes_train": 60, "scenes_test": 60, "cells": 60}
"""Of the WebP images of each array that is packed so."""
PER_CLASS = 125
SHEET = 125  # small images that share a file, one below the other: a header for each would be a good part of it
VOID = 11  # CamVid's label of pixels that do not count
CELLS = ("Platelets", "RBC", "WBC")
CELL_SIZE = (320, 240)


@dataclass(frozen=True)
class Data:
    """Images are (N, H, W, 3) uint8."""

    objects_train: np.ndarray
    labels_train: np.ndarray
    objects_test: np.ndarray
    labels_test: np.ndarray
    classes: np.ndarray
    """WordNet ids in the order of the labels."""
    edges: np.ndarray
    """(E, 2): child and parent, of the classes and all that is above them."""
    scenes_train: np.ndarray
    masks_train: np.ndarray
    """(N, H, W) uint8, `VOID` where pixels do not count."""
    scenes_test: np.ndarray
    masks_test: np.ndarray
    cells: np.ndarray
    boxes: np.ndarray
    """(n, 6): image, class of `CELLS`, left, top, right, bottom."""
    cells_test: np.ndarray
    """(N): whether a photo is of the test part."""

    def first(self, count: int) -> Data:
        """A part of every set for trials: `count` of each, spread over it."""

        def some(values: np.ndarray) -> np.ndarray:
            return values[np.linspace(0, len(values) - 1, min(count, len(values))).astype(int)]

        cut = {name: some(value) for name, value in vars(self).items() if name.startswith(("obj", "lab", "sce", "mas"))}
        kept = np.linspace(0, len(self.cells) - 1, count).astype(int)
        place = {int(old): new for new, old in enumerate(kept)}
        boxes = self.boxes[np.isin(self.boxes[:, 0], kept)].copy()
        boxes[:, 0] = [place[int(old)] for old in boxes[:, 0]]
        cut |= {"cells": self.cells[kept], "boxes": boxes, "cells_test": np.arange(count) >= count // 2}
        return dataclasses.replace(self, **cut)


def load(folder: Path) -> Data:
    """From the packed copy in `folder` where there is one, else from the Parquet files."""
    if not (folder / PACKED).is_file():
        return read_parquet(folder)
    with np.load(folder / PACKED, allow_pickle=False) as held:
        arrays = {name: held[name] for name in held.files}
    for name in QUALITY:
        arrays[name] = _decoded(arrays[name], arrays.pop(f"{name}_ends"), arrays.pop(f"{name}_height"))
    return Data(**arrays)


def pack(data: Data, path: Path) -> None:
    order = np.argsort(data.labels_train, kind="stable")
    kept = np.concatenate(
        [own[:PER_CLASS] for own in np.split(order, np.flatnonzero(np.diff(data.labels_train[order])) + 1)]
    )
    data = dataclasses.replace(data, objects_train=data.objects_train[kept], labels_train=data.labels_train[kept])
    arrays: dict[str, Any] = dict(vars(data))
    for name, quality in QUALITY.items():
        images = arrays[name]
        sheet = SHEET if name.startswith("objects") else 1
        blobs = [
            _webp(images[i : i + sheet].reshape(-1, *images.shape[2:]), quality) for i in range(0, len(images), sheet)
        ]
        arrays[name] = np.frombuffer(b"".join(blobs), np.uint8)
        arrays[f"{name}_ends"] = np.cumsum([len(blob) for blob in blobs])
        arrays[f"{name}_height"] = np.array(images.shape[1])
    np.savez_compressed(path, **arrays)


def read_parquet(folder: Path) -> Data:
    from pyarrow.parquet import read_table

    objects = read_table(next((folder / "tiny_imagenet_100").glob("*.parquet"))).to_pydict()
    scenes = read_table(folder / "camvid_240x180" / "camvid.parquet").to_pydict()
    cells = read_table(folder / "bccd" / "bccd.parquet").to_pydict()
    classes = sorted(set(objects["wnid"]))
    label = {name: k for k, name in enumerate(classes)}
    arrays: dict[str, np.ndarray] = {
        "classes": np.array(classes),
        "edges": _edges_above(classes, folder / "imagenet_isa" / "imagenet_isa.txt"),
        "cells": np.stack([_array(blob, CELL_SIZE) for blob in cells["jpeg"]]),
        "boxes": np.array([box for i, text in enumerate(cells["voc_xml"]) for box in _boxes(i, text)], np.float32),
        "cells_test": np.isin(cells["name"], (folder / "bccd" / "test.txt").read_text(encoding="utf-8").split()),
    }
    for split, theirs in (("train", ("train", "train")), ("test", ("val", "test"))):
        chosen = [i for i, name in enumerate(objects["split"]) if name == theirs[0]]
        arrays[f"objects_{split}"] = np.stack([_array(objects["jpeg"][i]) for i in chosen])
        arrays[f"labels_{split}"] = np.array([label[objects["wnid"][i]] for i in chosen])
        chosen = [i for i, name in enumerate(scenes["split"]) if name == theirs[1]]
        arrays[f"scenes_{split}"] = np.stack([_array(scenes["jpeg"][i]) for i in chosen])
        arrays[f"masks_{split}"] = np.stack([read_mask(scenes["mask_png"][i]).astype(np.uint8) for i in chosen])
    return Data(**arrays)


def _edges_above(classes: list[str], path: Path) -> np.ndarray:
    parents: dict[str, list[str]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        parent, child = line.split()
        parents.setdefault(child, []).append(parent)
    edges: dict[tuple[str, str], None] = {}
    todo = list(classes)
    while todo:
        child = todo.pop()
        new = [(child, parent) for parent in parents.get(child, []) if (child, parent) not in edges]
        edges |= dict.fromkeys(new)
        todo += [parent for _, parent in new]
    return np.array(sorted(edges))


def _boxes(image: int, text: str) -> list[list[float]]:
    """VOC's boxes, counted from 1, at the halved size; a few of BCCD are empty."""
    root = ElementTree.fromstring(text)
    factor = CELL_SIZE[0] / float(root.findtext("size/width", ""))
    found = []
    for each in root.iter("object"):
        left, top, right, bottom = (float(each.findtext(f"bndbox/{s}", "")) for s in ("xmin", "ymin", "xmax", "ymax"))
        corners = [(left - 1) * factor, (top - 1) * factor, right * factor, bottom * factor]
        if right > left and bottom > top:
            found.append([image, CELLS.index(each.findtext("name", "")), *corners])
    return found


def _array(blob: bytes, size: tuple[int, int] | None = None) -> np.ndarray:
    from PIL import Image

    image = read_image(blob)
    return np.asarray(image if size is None else image.resize(size, Image.Resampling.BICUBIC))


def _webp(image: np.ndarray, quality: int) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image).save(file, "WEBP", quality=quality, method=6)
    return file.getvalue()


def _decoded(blobs: np.ndarray, ends: np.ndarray, height: np.ndarray) -> np.ndarray:
    with ThreadPoolExecutor() as threads:
        sheets = list(threads.map(lambda part: _array(part.tobytes()), np.split(blobs, ends[:-1])))
    return np.concatenate([sheet.reshape(-1, int(height), *sheet.shape[1:]) for sheet in sheets])


def main() -> None:
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    target = Path(sys.argv[2])
    target.mkdir(parents=True, exist_ok=True)
    pack(read_parquet(Path(sys.argv[1])), target / PACKED)


if __name__ == "__main__":
    main()
