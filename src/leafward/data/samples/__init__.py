"""What users hand in: `image_files` reads pictures. And small real data shipped with the package (`photos`); README.md
beside this file says where each piece comes from."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path


def embedded(name: str) -> Path:
    """Path of an embedded file."""
    return Path(str(files(__name__) / name))


@dataclass(frozen=True)
class Photo:
    """An embedded product photo."""

    name: str
    """Its class and its number in the class and split, such as skirt-test-003."""
    label: str
    split: str
    """train, validation or test."""
    jpeg: bytes


def photos() -> list[Photo]:
    """The embedded photos of clothes in their order: training, validation, test.

    Those of validation and test are in the order of the rows of clothing_features.npz.
    """
    import numpy as np

    with np.load(embedded("clothing.npz"), allow_pickle=False) as arrays:
        data, ends = arrays["jpeg"].tobytes(), arrays["ends"].tolist()
        labels, splits = arrays["labels"].tolist(), arrays["splits"].tolist()
    found: list[Photo] = []
    numbers: dict[str, int] = {}
    for begin, end, label, split in zip([0, *ends], ends, labels, splits, strict=False):
        kind = f"{label}-{split}"
        numbers[kind] = numbers.get(kind, 0) + 1
        found.append(Photo(f"{kind}-{numbers[kind]:03d}", label, split, data[begin:end]))
    return found


def write_photos(folder: Path) -> None:
    """The embedded photos as class folders: `folder`/train (with those of validation) and `folder`/test."""
    from leafward.files import replacing

    for photo in photos():
        part = "test" if photo.split == "test" else "train"
        path = folder / part / photo.label / f"{photo.name}.jpg"
        if path.is_file() and path.read_bytes() == photo.jpeg:
            continue
        with replacing(path) as temporary:
            temporary.write_bytes(photo.jpeg)
