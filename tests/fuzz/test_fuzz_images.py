"""Folders of images that cannot be trained on: damaged, missing, hostile, of other sizes, with other labels."""

from __future__ import annotations

import io
import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from fuzz_files import TRAP
from PIL import Image

TRAIN = ["--loop.device", "cpu", "--loop.steps", "1", "--out", "run"]


def png(size: tuple[int, int] = (32, 32), mode: str = "RGB", colour: object = 0, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.new(mode, size, colour).save(file, kind)  # type: ignore[arg-type]
    return file.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


BOMB = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0))
BOMB += chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")
BAD = {
    "empty": b"",
    "text": b"not an image",
    "pickle": TRAP,
    "header-only": png()[:40],
    "cut": png((64, 64), colour=(3, 7, 9))[:-40],
    "damaged": png()[:60] + b"\xff" * 20 + png()[80:],
    "bomb": BOMB,
    "svg": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    "eps": png(kind="EPS"),
    "pcx": png(kind="PCX"),
}


def classes(place: Path, count: int = 3) -> Path:
    """Two classes of good images."""
    for name in ("cat", "dog"):
        (place / "photos" / name).mkdir(parents=True)
        for i in range(count):
            (place / "photos" / name / f"{i}.png").write_bytes(png())
    return place / "photos"


@pytest.mark.parametrize("recipe", ["hcformer", "himapper"])
@pytest.mark.parametrize("case", BAD)
def test_an_image_that_is_none(case, recipe, place, refuses):
    (classes(place) / "dog" / "bad.png").write_bytes(BAD[case])
    backbone = ["--backbone", "timm:resnet10t"] if recipe == "himapper" else []
    refuses(["train", recipe, "--data", "photos", *backbone, *TRAIN], "bad.png")


@pytest.mark.parametrize("case", BAD)
def test_an_image_to_explain_that_is_none(case, place, refuses):
    (place / "bad.png").write_bytes(BAD[case])
    refuses(["explain", "hcformer_nano", "bad.png", "--out", "drawn"], "bad.png")


def link_file(photos: Path) -> None:
    (photos.parent / "secret.png").write_bytes(png())
    (photos / "dog" / "link.png").symlink_to(photos.parent / "secret.png")


def link_folder(photos: Path) -> None:
    (photos.parent / "elsewhere").mkdir()
    (photos.parent / "elsewhere" / "0.png").write_bytes(png())
    (photos / "link").symlink_to(photos.parent / "elsewhere")


def empty_class(photos: Path) -> None:
    (photos / "link").mkdir()


def other_classes(photos: Path) -> None:
    for part, name in (("train", "cat"), ("val", "link")):
        (photos / part / name).mkdir(parents=True)
        (photos / part / name / "0.png").write_bytes(png())


@pytest.mark.parametrize("made", [link_file, link_folder, empty_class, other_classes])
def test_folders(made, place, refuses):
    made(classes(place))
    refuses(["train", "hcformer", "--data", "photos", *TRAIN], "link")


@pytest.mark.parametrize("kind", ["empty", "file", "files-only"])
def test_folders_without_classes(kind, place, refuses):
    if kind == "file":
        (place / "photos").write_bytes(png())
    else:
        (place / "photos").mkdir()
    if kind == "files-only":
        (place / "photos" / "0.png").write_bytes(png())
    refuses(["train", "hcformer", "--data", "photos", *TRAIN], "photos")


IMAGES = np.zeros((4, 32, 32, 3), np.uint8)
ARCHIVES = {
    "no-labels": {"images": IMAGES},
    "no-images": {"labels": np.arange(4)},
    "floats": {"images": IMAGES.astype(np.float32), "labels": np.arange(4)},
    "flat": {"images": IMAGES[0], "labels": np.arange(4)},
    "four-channels": {"images": np.zeros((4, 32, 32, 4), np.uint8), "labels": np.arange(4)},
    "few-labels": {"images": IMAGES, "labels": np.arange(2)},
    "labels-of-floats": {"images": IMAGES, "labels": np.zeros(4)},
    "labels-negative": {"images": IMAGES, "labels": np.array([0, 1, -1, 0])},
    "labels-out-of-range": {"images": IMAGES, "labels": np.array([0, 1, 5, 0]), "classes": np.array(["a", "b"])},
    "nothing": {"images": IMAGES[:0], "labels": np.zeros(0, int)},
}


@pytest.mark.parametrize("case", ARCHIVES)
def test_arrays_of_images(case, place, refuses):
    with open(place / "photos.npz", "wb") as file:
        np.savez(file, **ARCHIVES[case])
    refuses(["train", "hcformer", "--data", "photos.npz", *TRAIN], "no image" if case == "nothing" else "photos.npz")


def masks(place: Path, change: Callable[[Path], None]) -> None:
    for name in ("images", "masks"):
        (place / "scenes" / name).mkdir(parents=True)
    for i in range(4):
        (place / "scenes/images" / f"{i}.png").write_bytes(png())
        (place / "scenes/masks" / f"{i}.png").write_bytes(png(mode="L", colour=i % 2))
    (place / "scenes/classes.txt").write_text("sky\nsea\n")
    change(place / "scenes")


def wide(scenes: Path) -> None:
    (scenes / "masks/0.png").write_bytes(png((40, 32), "L"))


def coloured(scenes: Path) -> None:
    (scenes / "masks/0.png").write_bytes(png(mode="RGB"))


def sixteen(scenes: Path) -> None:
    Image.fromarray(np.full((32, 32), 700, np.uint16)).save(scenes / "masks/0.png")


def floats(scenes: Path) -> None:
    Image.fromarray(np.full((32, 32), 0.5, np.float32)).save(scenes / "masks/0.tif")
    (scenes / "masks/0.png").unlink()


def beyond(scenes: Path) -> None:
    (scenes / "masks/0.png").write_bytes(png(mode="L", colour=9))


def no_mask(scenes: Path) -> None:
    (scenes / "masks/0.png").unlink()


def bomb_mask(scenes: Path) -> None:
    (scenes / "masks/0.png").write_bytes(BOMB)


def text_mask(scenes: Path) -> None:
    (scenes / "masks/0.png").write_bytes(b"text")


def linked_mask(scenes: Path) -> None:
    (scenes.parent / "secret.png").write_bytes(png(mode="L"))
    (scenes / "masks/0.png").unlink()
    (scenes / "masks/0.png").symlink_to(scenes.parent / "secret.png")


def latin_names(scenes: Path) -> None:
    (scenes / "classes.txt").write_bytes(b"sk\xe9\nsea\n")


@pytest.mark.parametrize(
    "change", [wide, coloured, sixteen, floats, beyond, no_mask, bomb_mask, text_mask, linked_mask, latin_names]
)
def test_masks(change, place, refuses):
    masks(place, change)
    refuses(["train", "hcformer", "--preset", "segment", "--data", "scenes", *TRAIN], "scenes")


def test_lists_that_lead_out_of_the_folder(place, refuses):
    for name in ("JPEGImages", "SegmentationClass", "ImageSets/Segmentation"):
        (place / "voc" / name).mkdir(parents=True)
    for name in ("train", "val"):
        (place / "voc/ImageSets/Segmentation" / f"{name}.txt").write_text("../../secret\n")
    refuses(["train", "hcformer", "--preset", "segment", "--data", "voc", *TRAIN], "leads out")


SPLITS = {
    "cut": '{"train": [',
    "list": "[]",
    "no-test": '{"train": [], "val": []}',
    "numbers": '{"train": [1], "val": [], "test": []}',
    "label-text": '{"train": [["cat/0.png", "x", "cat"]], "val": [], "test": []}',
    "gap": '{"train": [["cat/0.png", 0, "cat"], ["dog/0.png", 2, "dog"]], "val": [], "test": []}',
    "gone": '{"train": [["cat/9.png", 0, "cat"]], "val": [], "test": []}',
    "leads-out": json.dumps({"train": [["cat/0.png", 0, "cat"], ["../secret.png", 0, "cat"]], "val": [], "test": []}),
    "absolute": json.dumps({"train": [["cat/0.png", 0, "cat"], ["/etc/hostname", 0, "cat"]], "val": [], "test": []}),
}


@pytest.mark.parametrize("case", SPLITS)
def test_splits(case, place, refuses):
    photos = classes(place)
    (place / "secret.png").write_bytes(png())
    (photos / "split_zhou_Photos.json").write_text(SPLITS[case])
    refuses(["data", "features", "photos", "--model", "no/such", "--out", "f.npz"], "photos")


@pytest.mark.parametrize("made", [link_file, link_folder, empty_class])
def test_folders_for_features(made, place, refuses):
    made(classes(place))
    refuses(["data", "features", "photos", "--model", "no/such", "--out", "f.npz"], "link")
