"""Photos with the boxes of the objects in them, and perhaps outlines: COCO JSON with its run-length codes, and VOC XML.

objects = load_objects("coco")        # annotations/instances_train2017.json, train2017/ …; or VOC's Annotations/
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from leafward.data.image_files import read_image, turned_hint
from leafward.data.images import HELD_OUT, TRAIN, divided
from leafward.errors import DataError, require
from leafward.files import read_json, read_text


@dataclass(frozen=True)
class Thing:
    """One object: its box (left, top, right, bottom) in pixels, class number, and outline where there is one."""

    box: tuple[float, float, float, float]
    label: int
    outline: Any = None
    """COCO's `segmentation`: polygons, or a run-length code, compressed or not."""
    crowd: bool = False
    number: int | None = None
    """COCO's id of the annotation."""


@dataclass(frozen=True)
class Photo:
    file: Path
    things: list[Thing] = field(default_factory=list)
    size: tuple[int, int] | None = None
    """Width and height, where the annotations say them."""
    annotations: Path | None = None
    """File that lists the things of several photos, such as COCO's."""


@dataclass(frozen=True)
class ObjectSets:
    train: list[Photo]
    held_out: list[Photo]
    classes: list[str]

    @property
    def masks(self) -> bool:
        """Whether the objects have outlines; all of them must, or none."""
        photos = self.train + self.held_out
        outlined = [thing.outline is not None for photo in photos for thing in photo.things]
        if any(outlined) and not all(outlined):
            bare = next(photo for photo in photos if any(thing.outline is None for thing in photo.things))
            box = next(thing.box for thing in bare.things if thing.outline is None)
            raise DataError(
                f"{outlined.count(False)} of {len(outlined)} objects have no outline (segmentation), the first in "
                f"{bare.file} with the box {box}; give every object one for masks, or none for boxes alone"
            )
        return all(outlined)


def load_objects(data: str | Path, held_out: float = 0.1, seed: int = 0) -> ObjectSets:
    """Photos from a folder in COCO's layout (JSON in `annotations` or beside the images) or in VOC's (XML)."""
    path = Path(data)
    if (path / "Annotations").is_dir():
        return _voc(path, held_out, seed)
    files = sorted([*path.glob("annotations/*.json"), *path.glob("*.json")])
    if not files:
        raise DataError(f"{path} has neither COCO's annotations/*.json nor VOC's Annotations/*.xml")
    # Beside them COCO has captions_….json and person_keypoints_….json.
    files = [file for file in files if file.stem.startswith("instances")] or files
    train, test = (
        next((file for file in files if any(name in file.stem.lower() for name in names)), None)
        for names in (TRAIN, HELD_OUT)
    )
    if train is None and (test is not None or len(files) > 1):
        raise DataError(f"{path}: none of {', '.join(f.name for f in files)} has 'train' in its name")
    photos, classes = _coco(train or files[0], path)
    if test is None:
        return _divided(photos, classes, held_out, seed)
    others, again = _coco(test, path)
    if again != classes:
        raise DataError(f"{test} and {train} do not have the same categories")
    return ObjectSets(photos, others, classes)


def _divided(photos: list[Photo], classes: list[str], held_out: float, seed: int) -> ObjectSets:
    if len(photos) < 2:
        raise DataError(f"there are {len(photos)} photos; at least two are needed, one of them held out")
    return ObjectSets(*divided(photos, held_out, seed), classes)


def _coco(file: Path, path: Path) -> tuple[list[Photo], list[str]]:
    try:
        record = read_json(file)
        categories = sorted(record["categories"], key=lambda category: category["id"])
        number = {category["id"]: k for k, category in enumerate(categories)}
        things: dict[int, list[Thing]] = {image["id"]: [] for image in record["images"]}
        for each in record["annotations"]:
            if each["category_id"] not in number:
                raise DataError(
                    f"{file}: annotation {each['id']} has category {each['category_id']}, which is not listed"
                )
            if each["image_id"] not in things:
                raise DataError(f"{file}: annotation {each['id']} is of image {each['image_id']}, which is not listed")
            x, y, w, h = each["bbox"]
            box, outline = (x, y, x + w, y + h), each.get("segmentation") or None
            crowd = bool(each.get("iscrowd", 0))
            thing = Thing(box, number[each["category_id"]], outline, crowd, each.get("id"))
            things[each["image_id"]].append(thing)
        photos = [
            Photo(
                _image_file(path, file, image["file_name"]),
                things[image["id"]],
                (image["width"], image["height"]),
                annotations=file,
            )
            for image in record["images"]
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{file} is not a COCO annotation file: {type(error).__name__} {error}") from None
    return photos, [category["name"] for category in categories]


def _image_file(path: Path, annotations: Path, name: str) -> Path:
    """Where an image of an annotation file lies: in a folder named as the split, in images/, or beside the file."""
    split = annotations.stem.rpartition("_")[2]
    places = [path / split, path / "images" / split, path / "images", path, annotations.parent]
    return next((place / name for place in places if (place / name).is_file()), path / name)


def _voc(path: Path, held_out: float, seed: int) -> ObjectSets:
    lists = path / "ImageSets" / "Main"
    stems = {
        side: next((lists / f"{n}.txt" for n in names if (lists / f"{n}.txt").is_file()), None)
        for side, names in (("train", ("train", "trainval")), ("test", ("val", "test")))
    }
    files = sorted((path / "Annotations").glob("*.xml"))
    raw = {file.stem: _voc_photo(file, path / "JPEGImages") for file in files}
    classes = sorted({name for _, things, _ in raw.values() for name, _ in things})
    photos = {
        stem: Photo(image, [Thing(box, classes.index(name)) for name, box in things], size)
        for stem, (image, things, size) in raw.items()
    }
    if stems["train"] is None or stems["test"] is None:
        return _divided(list(photos.values()), classes, held_out, seed)

    def listed(file: Path) -> list[Photo]:
        names = read_text(file).split()
        missing = [name for name in names if name not in photos]
        if missing:
            raise DataError(f"{file} lists {missing[0]}, which has no annotation")
        return [photos[name] for name in names]

    return ObjectSets(listed(stems["train"]), listed(stems["test"]), classes)


def _voc_photo(file: Path, images: Path) -> tuple[Path, list[tuple[str, Any]], tuple[int, int] | None]:
    try:
        root = ElementTree.parse(file).getroot()
        things = []
        for each in root.iter("object"):
            ends = [float(each.findtext(f"bndbox/{side}", "")) for side in ("xmin", "ymin", "xmax", "ymax")]
            if not (name := each.findtext("name")):
                raise ValueError("an object has no name")
            things.append((name, (ends[0] - 1, ends[1] - 1, ends[2], ends[3])))  # counted from 1
        size = root.find("size")
        sides = None if size is None else (int(size.findtext("width", "")), int(size.findtext("height", "")))
        return images / (root.findtext("filename") or f"{file.stem}.jpg"), things, sides
    except (OSError, ValueError, ElementTree.ParseError) as error:
        raise DataError(f"{file} is not a VOC annotation: {error}") from None


def check(photos: Sequence[Photo], classes: Sequence[str], what: str, complete: bool) -> None:
    """Refuse images that cannot be read or differ in size, empty boxes, outlines that cannot be drawn and, if
    `complete`, classes without object."""
    seen = set()
    for photo in photos:
        width, height = read_image(photo.file).size
        if photo.size is not None and photo.size != (width, height):
            hint = turned_hint((width, height), photo.size)
            raise DataError(f"{what}: {photo.file} is {(width, height)}, but its annotation says {photo.size}{hint}")
        for thing in photo.things:
            left, top, right, bottom = thing.box
            if not (
                right - left > 0 and bottom - top > 0 and left < width and top < height and right > 0 and bottom > 0
            ):
                raise DataError(f"{what}: {photo.file} has the box {thing.box}, which is empty or outside the image")
            if thing.outline is not None:
                try:
                    outline_mask(photo, thing, height, width)
                except DataError as error:
                    raise DataError(f"{what}: {error}") from None
            seen.add(thing.label)
    missing = [name for k, name in enumerate(classes) if k not in seen]
    if complete and missing:
        raise DataError(f"{what}: the class {missing[0]!r} has no object")


def outline_mask(photo: Photo, thing: Thing, height: int, width: int) -> np.ndarray:
    """The outline of a thing as a mask (H, W) of zeros and ones."""
    try:
        if isinstance(thing.outline, Mapping):
            return _runs_drawn(thing.outline, height, width)
        return _polygons_drawn(thing.outline, height, width)
    except DataError as error:
        place = "" if photo.annotations is None else f" (annotation {thing.number} of {photo.annotations})"
        raise DataError(f"{photo.file}: an outline cannot be drawn{place}: {error}") from None


def _polygons_drawn(polygons: Any, height: int, width: int) -> np.ndarray:
    masks = require("pycocotools.mask", "vision")
    try:
        mask = masks.decode(masks.merge(masks.frPyObjects(polygons, height, width)))
    except Exception as error:  # pycocotools has no errors of its own
        raise DataError(f"it is no list of polygons: {error}") from error
    if mask.shape != (height, width):
        raise DataError(f"its size is {mask.shape} (height, width), that of the image {(height, width)}")
    return mask.astype(np.uint8)


def _runs_drawn(code: Mapping[str, Any], height: int, width: int) -> np.ndarray:
    """COCO's run-length code: the lengths of runs of zeros and ones by turns, column by column, as a list or packed.

    Checked before anything is drawn: pycocotools reads beyond the end of a broken text.
    """
    size, counts = code.get("size"), code.get("counts")
    if not isinstance(size, Sequence) or list(size) != [height, width]:
        raise DataError(
            f"the size of its run-length code is {size} (height, width), that of the image {[height, width]}"
        )
    if not isinstance(counts, str | bytes | list):
        raise DataError(f"the counts of its run-length code must be a text or a list, not {type(counts).__name__}")
    runs = counts if isinstance(counts, list) else _unpacked(counts)
    if not all(isinstance(run, int) and run >= 0 for run in runs):
        raise DataError("the counts of its run-length code must be whole numbers ≥ 0")
    if sum(runs) != height * width:
        raise DataError(f"the counts of its run-length code are of {sum(runs)} pixels, the image has {height * width}")
    return np.repeat((np.arange(len(runs)) % 2).astype(np.uint8), runs).reshape(width, height).T


def _unpacked(text: str | bytes) -> list[int]:
    """The lengths of runs from COCO's compressed text.

    Each character is 48 more than a number of six bits: five of a length, lowest first, and whether more of it follow;
    the last of a length also holds its sign. From the fourth on, a length is the difference to the one two before.
    """
    runs: list[int] = []
    length = shift = 0
    for place, character in enumerate(text.encode() if isinstance(text, str) else text):
        bits = character - 48
        if not 0 <= bits < 64 or shift > 30:  # pycocotools itself writes 32 bits, that is seven characters
            raise DataError(f"the counts of its run-length code are broken at character {place}")
        length |= (bits & 31) << shift
        shift += 5
        if bits & 32:
            continue
        if bits & 16:
            length -= 1 << shift
        runs.append(length + (runs[-2] if len(runs) > 2 else 0))
        length = shift = 0
    if shift:
        raise DataError("the counts of its run-length code are cut off")
    return runs
