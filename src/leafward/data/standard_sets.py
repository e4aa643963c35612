"""Labelled images: folders of class folders, and the usual few-shot data sets as CoOp's authors lay them out.

- nine of the eleven: `split_zhou_NAME.json`, {"train": [[file, label, class name], …], "val": …, "test": …};
- ImageNet: `classnames.txt` ("n01440764 tench" in a line), `images/train/n01440764/…`, `images/val/n01440764/…`;
- its four other domains: `classnames.txt` beside one folder of class folders, named by WordNet id (Sketch, A, R) or by
  the number of the class (V2); all images are test images, and classes without image are left out;
- FGVC Aircraft: `variants.txt`, `images_variant_train.txt`, `…_val.txt`, `…_test.txt` and `images/`;
- any folder with `train/`, `val/` (or valid, validation) and `test/` of class folders; val or test may be missing;
- any folder of class folders, which brings no split.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from leafward.data.images import image_files
from leafward.errors import DataError
from leafward.files import check_name, inside, read_json, read_text

Labelled = tuple[list[Path], list[int], tuple[str, ...], list[int]]
"""Files, labels, class names, and the part of each file: 0 train, 1 validation, 2 test."""
PARTS = ("train", "val", "test")
NAMED = (("train",), ("validation", "valid", "val"), ("test",))
"""What the folders of the parts are called; of several the last is taken."""
CLASS_NAMES, VARIANTS = "classnames.txt", "variants.txt"


def read_images(folder: Path) -> tuple[list[Path], list[int], tuple[str, ...], list[int] | None]:
    """Files, labels, class names, and the split where the folder brings one, in any of the layouts above."""
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder of images")
    splits = sorted(folder.glob("split_zhou_*.json"))
    if len(splits) > 1:
        raise DataError(f"{folder} holds {len(splits)} split files; one is needed: {', '.join(p.name for p in splits)}")
    if splits:
        return _with_split(folder, splits[0])
    if (folder / CLASS_NAMES).is_file():
        return _imagenet(folder)
    if (folder / VARIANTS).is_file():
        return _aircraft(folder)
    found = _part_folders(folder)
    if 0 in found and len(found) > 1:
        return _parts(found)
    inner = [path for path in folder.iterdir() if path.is_dir()]
    alone = inner == [folder / "train"] and any(path.is_dir() for path in inner[0].iterdir())
    return _class_folders(inner[0] if alone else folder)


def _class_folders(folder: Path) -> tuple[list[Path], list[int], tuple[str, ...], None]:
    classes = sorted(path for path in folder.iterdir() if path.is_dir())
    files: list[Path] = []
    labels: list[int] = []
    for label, path in enumerate(classes):
        check_name(path)
        found = image_files(inside(folder, path.name))
        if not found:
            raise DataError(f"the class folder {path} holds no image")
        files += found
        labels += [label] * len(found)
    if not files:
        raise DataError(f"{folder} holds no class folders")
    return files, labels, tuple(path.name for path in classes), None


def _with_split(folder: Path, split: Path) -> Labelled:
    try:
        parts = read_json(split)
        rows = [
            (str(file), int(label), str(name), PARTS.index(part)) for part in PARTS for file, label, name in parts[part]
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"cannot read the split {split}: {error!r}") from error
    names = {label: name for _, label, name, _ in rows}
    if not rows or sorted(names) != list(range(len(names))):
        raise DataError(f"{split}: the labels must be 0…{max(len(names) - 1, 0)} without a gap")
    # The files are named from the folder of the images, which some of the data sets keep one level down.
    first = rows[0][0]
    base = next(
        (each for each in [folder, *sorted(p for p in folder.iterdir() if p.is_dir())] if (each / first).is_file()),
        None,
    )
    if base is None:
        raise DataError(f"{split} names {first!r}, which is neither in {folder} nor in a folder of it")
    files = [inside(base, file) for file, _, _, _ in rows]
    ordered = tuple(names[label] for label in range(len(names)))
    return files, [label for _, label, _, _ in rows], ordered, [part for _, _, _, part in rows]


def _imagenet(folder: Path) -> Labelled:
    names: dict[str, str] = {}
    for line in _lines(folder / CLASS_NAMES):
        key, _, name = line.partition(" ")
        if not name:
            raise DataError(f"{folder / CLASS_NAMES}: a line must hold an id and a name, got {line!r}")
        names[key] = name.strip()
    images = folder / "images"
    if (images / "train").is_dir():
        # Few-shot work scores on ImageNet's validation images, and has no others.
        return _collected({0: images / "train", 2: images / "val"}, names)
    places = [path for path in sorted(folder.iterdir()) if path.is_dir()]
    if len(places) != 1:
        raise DataError(f"{folder} must hold images/train and images/val, or one folder of class folders")
    # ImageNet-V2 names its folders by the place of the class in the list.
    numbered = {str(place): name for place, name in enumerate(names.values())}
    inner = {path.name for path in places[0].iterdir() if path.is_dir()}
    return _collected({2: places[0]}, numbered if inner <= set(numbered) else names)


def _part_folders(folder: Path) -> dict[int, Path]:
    places = [(number, folder / name) for number, names in enumerate(NAMED) for name in names]
    return {number: place for number, place in places if place.is_dir()}


def _parts(found: dict[int, Path]) -> Labelled:
    if 2 not in found:
        found[2] = found.pop(1)  # what is held out is what is scored
    classes = sorted({path.name for place in found.values() for path in place.iterdir() if path.is_dir()})
    return _collected(found, {name: name for name in classes})


def _collected(places: Mapping[int, Path], names: Mapping[str, str]) -> Labelled:
    """The class folders of each part; classes without a single image are left out."""
    rows: list[tuple[Path, str, int]] = []
    for part, place in places.items():
        if not place.is_dir():
            raise DataError(f"{place} is not a folder of class folders")
        for path in sorted(place.iterdir()):
            if path.is_dir():
                if path.name not in names:
                    raise DataError(f"the class folder {path} is not among the classes of {CLASS_NAMES}")
                rows += [(file, path.name, part) for file in image_files(inside(place, path.name))]
    if not rows:
        raise DataError(f"{', '.join(map(str, places.values()))} hold no image")
    used = {key for _, key, _ in rows}
    order = [key for key in names if key in used]
    number = {key: label for label, key in enumerate(order)}
    return (
        [file for file, _, _ in rows],
        [number[key] for _, key, _ in rows],
        tuple(names[key] for key in order),
        [part for _, _, part in rows],
    )


def _aircraft(folder: Path) -> Labelled:
    names = _lines(folder / VARIANTS)
    files, labels, parts = [], [], []
    for part, word in enumerate(PARTS):
        listed = folder / f"images_variant_{word}.txt"
        for line in _lines(listed):
            stem, _, name = line.partition(" ")
            if name not in names:
                raise DataError(f"{listed} has the variant {name!r}, which {VARIANTS} lacks")
            files.append(inside(folder / "images", f"{stem}.jpg"))
            labels.append(names.index(name))
            parts.append(part)
    return files, labels, tuple(names), parts


def _lines(path: Path) -> list[str]:
    return [line.strip() for line in read_text(path).splitlines() if line.strip()]
