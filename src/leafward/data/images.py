"""Labelled images from wherever they lie: folders, Parquet, Hugging Face and torchvision data sets, arrays.

    sets = load_images("catalogue")      # catalogue/train/shoes/1.jpg … catalogue/val/…; or catalogue/shoes/1.jpg
    sets.train.read(0), sets.train.labels[0], sets.train.classes

Whatever is wrong with a file is reported by its name, before training starts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from leafward.data.arrays import array_of, read_arrays
from leafward.data.image_files import ENDINGS, encoded_image, guarding_pillow, read_image
from leafward.errors import DataError, UsageError, nearest, require
from leafward.files import check_name, inside

if TYPE_CHECKING:
    from PIL.Image import Image

T = TypeVar("T")
LISTED = ENDINGS | {".ppm", ".pgm"}
"""Portable pixmaps are listed too: they are refused by name, where passing over them would train on a part of a set."""
TRAIN, HELD_OUT = ("train", "training"), ("val", "valid", "validation", "test", "testing")
BYTES = ("jpeg", "png", "image", "img", "bytes")
"""Columns of a Parquet file that can hold encoded images."""
DECODED = 20_000
"""At most so many images are decoded by the check; of more, as many at even distances."""


class Pixels(NamedTuple):
    """Mean and spread of the channels, of values in [0, 1], that a backbone's weights expect."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


IMAGENET = Pixels((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@dataclass(frozen=True)
class ImageSet:
    """n labelled images: `read(i)` decodes image i as RGB, `names[i]` says where it is from, labels (n) are numbers
    of `classes`."""

    classes: list[str]
    labels: np.ndarray
    names: Sequence[str]
    read: Callable[[int], Image]

    def __len__(self) -> int:
        return len(self.labels)

    def subset(self, indices: np.ndarray) -> ImageSet:
        names, read = self.names, self.read
        places: list[int] = indices.tolist()
        return ImageSet(self.classes, self.labels[indices], [names[i] for i in places], lambda i: read(places[i]))


@dataclass(frozen=True)
class ImageSets:
    """What is trained on and what is held out, with the same classes."""

    train: ImageSet
    held_out: ImageSet


def load_images(data: str | Path, held_out: float = 0.1, seed: int = 0) -> ImageSets:
    """Read a data set by its kind: a folder of class folders, one with train/ and val/ of those, a Parquet file with
    encoded images or a folder of such files (also below `data`, as on the Hugging Face hub, with the split in their
    names), a Hugging Face data set on disk, arrays in an .npz file, or torchvision:NAME:FOLDER.

    Data without a split of their own give the part `held_out` of each class away, drawn by `seed`.
    """
    text = str(data)
    path = Path(text)
    if text.startswith("torchvision:"):
        return _torchvision(text, held_out, seed)
    if path.suffix == ".npz":
        return _divide(_arrays(path), held_out, seed)
    if files := _parquet_files(path):
        return _by_split(*_parquet(path, files), held_out, seed)
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return _hugging_face(path, held_out, seed)
    if path.is_dir():
        return _folders(path, held_out, seed)
    raise DataError(f"{path} is not there, or not a folder, a .parquet or an .npz file of images")


def check(images: ImageSet, what: str) -> None:
    """Refuse labels out of range and images that cannot be decoded, by name."""
    if not len(images):
        raise DataError(f"{what}: there is no image")
    wrong = np.flatnonzero((images.labels < 0) | (images.labels >= len(images.classes)))
    if len(wrong):
        i = int(wrong[0])
        raise DataError(
            f"{what}: the label of {images.names[i]} is {images.labels[i]}, but there are {len(images.classes)} classes"
        )
    for i in range(0, len(images), -(-len(images) // DECODED)):
        images.read(i)


def check_classes(images: ImageSet, what: str) -> None:
    """Refuse classes without a single image, where the labels are in range."""
    empty = np.flatnonzero(np.bincount(images.labels, minlength=len(images.classes)) == 0)
    if len(empty):
        raise DataError(f"{what}: the class {images.classes[int(empty[0])]!r} has no image")


def image_files(folder: Path) -> list[Path]:
    """The images in a folder and below, sorted."""
    found = sorted(p for p in folder.rglob("*") if p.suffix.lower() in LISTED and p.is_file())
    for file in found:
        check_name(file)
    return [inside(folder, p.relative_to(folder)) if p.is_symlink() else p for p in found]


def _folders(path: Path, held_out: float, seed: int) -> ImageSets:
    train, test = (next((path / name for name in names if (path / name).is_dir()), None) for names in (TRAIN, HELD_OUT))
    if train is None:
        return _divide(_class_folders(path), held_out, seed)
    whole = _class_folders(train)
    if test is None:
        return _divide(whole, held_out, seed)
    return ImageSets(whole, _class_folders(test, whole.classes))


def _class_folders(path: Path, classes: list[str] | None = None) -> ImageSet:
    found = sorted(p.name for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))
    if not found:
        raise DataError(f"{path} has no folders of classes")
    for name in found:
        check_name(name)
    classes = classes or found
    files: list[Path] = []
    labels: list[int] = []
    for name in found:
        if name not in classes:
            raise DataError(f"{path / name} is a class that the training images do not have; {nearest(name, classes)}")
        members = image_files(inside(path, name))
        if not members:
            raise DataError(f"the class folder {path / name} has no image")
        files += members
        labels += [classes.index(name)] * len(members)
    return ImageSet(classes, np.array(labels), [str(p) for p in files], lambda i: read_image(files[i]))


def _arrays(path: Path) -> ImageSet:
    held = read_arrays(path)
    images, labels = (array_of(held, name, path) for name in ("images", "labels"))
    return from_arrays(
        images, labels, [str(name) for name in held["classes"]] if "classes" in held else None, str(path)
    )


def from_arrays(
    images: np.ndarray, labels: np.ndarray, classes: Sequence[str] | None = None, name: str = ""
) -> ImageSet:
    """Images (N, H, W, 3) or grey (N, H, W) in uint8, with labels (N)."""
    where = f"{name}: " if name else ""
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or (images.ndim == 4 and images.shape[3] != 3):
        raise DataError(
            f"{where}images must be (N, H, W, 3) or (N, H, W) in uint8, got {images.shape} in {images.dtype}"
        )
    if len(images) == 0:
        raise DataError(f"{where}there is no image")
    if labels.shape != images.shape[:1] or labels.dtype.kind not in "iu":
        raise DataError(f"{where}labels must be {len(images)} whole numbers, got {labels.shape} in {labels.dtype}")
    pillow = require("PIL.Image", "vision")
    given = list(classes) if classes is not None else _numbers(labels)
    names = [f"{name}[{i}]" for i in range(len(images))]
    return ImageSet(given, labels.astype(np.int64), names, lambda i: pillow.fromarray(images[i]).convert("RGB"))


def _parquet_files(path: Path) -> list[Path]:
    if path.suffix == ".parquet":
        return [path]
    return sorted(path.glob("*.parquet")) or sorted(path.glob("data/*.parquet"))


def _parquet(path: Path, files: list[Path]) -> tuple[ImageSet, list[str] | None]:
    parquet, arrow = require("pyarrow.parquet", "vision"), require("pyarrow", "vision")
    try:
        tables = [parquet.read_table(file) for file in files]
        table = arrow.concat_tables(tables, promote_options="default")
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as Parquet: {error}") from None
    columns = set(table.column_names)
    image = next((name for name in BYTES if name in columns), None)
    label = next((name for name in ("label", "labels", "class", "wnid") if name in columns), None)
    if image is None or label is None:
        raise DataError(
            f"{path} needs a column of images ({', '.join(BYTES)}) and one called label; it has {sorted(columns)}"
        )
    values = table[label].to_pylist()
    classes, labels = _encoded(values, path)
    cells = table[image]
    rows = [(file, row) for file, part in zip(files, tables, strict=True) for row in range(len(part))]
    given = table["file"].to_pylist() if "file" in columns else [row for _, row in rows]
    names = [f"{file}: {name}" for (file, _), name in zip(rows, given, strict=True)]

    def read(i: int) -> Image:
        cell = encoded_image(cells[i].as_py(), f"{names[i]} has no encoded image in the column {image}")
        return read_image(cell, names[i])

    splits = table["split"].to_pylist() if "split" in columns else _splits_by_name([file for file, _ in rows])
    return ImageSet(classes, labels, names, read), splits


def _splits_by_name(files: list[Path]) -> list[str] | None:
    """The split of each row from its file's name, such as train-00000-of-00002.parquet; None where they do not say."""
    words = [file.stem.partition("-")[0] for file in files]
    said = set(words)
    if said - {*TRAIN, *HELD_OUT} or said.isdisjoint(TRAIN) or said.isdisjoint(HELD_OUT):
        return None
    return words


def _encoded(values: Sequence[Any], path: Path, classes: list[str] | None = None) -> tuple[list[str], np.ndarray]:
    """Class names and labels from a column of texts or whole numbers; `classes` are those of the training part."""
    if all(isinstance(value, str) for value in values):
        classes = classes or sorted(set(values))
        places = {name: k for k, name in enumerate(classes)}
        if unknown := set(values) - set(places):
            raise DataError(f"{path}: the training images do not have the class {min(unknown)!r}")
        return classes, np.array([places[value] for value in values], dtype=np.int64)
    if not all(isinstance(value, int) for value in values):
        raise DataError(f"{path}: labels must be texts or whole numbers, all of one kind")
    labels = np.array(values, dtype=np.int64)
    return classes or _numbers(labels), labels


def _by_split(images: ImageSet, splits: list[str] | None, held_out: float, seed: int) -> ImageSets:
    if splits is None:
        return _divide(images, held_out, seed)
    names = np.array(splits)
    train = np.flatnonzero(np.isin(names, TRAIN))
    test = next((np.flatnonzero(names == name) for name in HELD_OUT if (names == name).any()), None)
    if not len(train) or test is None:
        raise DataError(f"the splits are {sorted(set(splits))}; there must be one of {TRAIN} and one of {HELD_OUT}")
    return ImageSets(images.subset(train), images.subset(test))


def _hugging_face(path: Path, held_out: float, seed: int) -> ImageSets:
    found = require("datasets", "lm").load_from_disk(str(path))
    if hasattr(found, "keys"):
        train = next((found[name] for name in TRAIN if name in found), None)
        test = next((found[name] for name in HELD_OUT if name in found), None)
        if train is None:
            raise DataError(f"{path} has the splits {sorted(found)}, but none for training")
        whole = _hugging_face_set(train, path)
        if test is None:
            return _divide(whole, held_out, seed)
        return ImageSets(whole, _hugging_face_set(test, path, whole.classes))
    return _divide(_hugging_face_set(found, path), held_out, seed)


def _hugging_face_set(found: Any, path: Path, classes: list[str] | None = None) -> ImageSet:
    columns = found.column_names
    image = next((name for name in ("image", "img") if name in columns), None)
    label = next((name for name in ("label", "labels", "fine_label") if name in columns), None)
    if image is None or label is None:
        raise DataError(f"{path} needs the columns image and label; it has {columns}")
    # As Arrow, cells come as they are stored; the library's own format decodes every image of a row by itself.
    values, cells = (found.select_columns([name]).with_format("arrow") for name in (label, image))
    given, labels = _encoded(
        values[:][label].to_pylist(), path, classes or getattr(found.features[label], "names", None)
    )
    names = [f"{path}[{i}]" for i in range(len(labels))]
    mode = getattr(found.features[image], "mode", None)  # of a set whose images are all to be grey, for example

    def read(i: int) -> Image:
        cell = cells[i][image][0].as_py()
        picture = read_image(encoded_image(cell, f"{names[i]} has no encoded image in the column {image}"), names[i])
        return picture.convert(mode).convert("RGB") if mode else picture

    return ImageSet(given, labels, names, read)


TORCHVISION_SPLITS = (("train", "trainval", "train-standard"), ("test", "val"))
"""What torchvision's data sets call the part to train on, and the one to score on."""


def _torchvision(text: str, held_out: float, seed: int) -> ImageSets:
    """torchvision:NAME:FOLDER, for data sets whose images come with one label."""
    datasets = require("torchvision.datasets", "vision")
    parts = text.split(":", 2)
    if len(parts) != 3:
        raise UsageError(f"write torchvision data as torchvision:NAME:FOLDER, not {text!r}")
    _, name, folder = parts
    kind = getattr(datasets, name, None)
    if not (isinstance(kind, type) and issubclass(kind, datasets.VisionDataset)):
        raise UsageError(f"torchvision has no data set {name!r}; {nearest(name, datasets.__all__)}")
    choices = inspect.signature(kind).parameters
    try:
        with guarding_pillow():
            if "train" in choices:
                pair = [kind(folder, train=part) for part in (True, False)]  # pyright: ignore[reportCallIssue]
            elif "split" in choices:
                pair = [_torchvision_split(kind, folder, names) for names in TORCHVISION_SPLITS]
            else:
                return _divide(from_dataset(kind(folder), text), held_out, seed)
    except (RuntimeError, OSError, TypeError, ValueError) as error:
        raise DataError(f"torchvision's {name} cannot be read from {folder}: {error}") from None
    train = from_dataset(pair[0], text)
    return ImageSets(train, from_dataset(pair[1], text, train.classes))


def _torchvision_split(kind: Any, folder: str, names: Sequence[str]) -> Any:
    """The first of the splits `names` that the data set has; torchvision says by a ValueError that it has not."""
    for name in names[:-1]:
        try:
            return kind(folder, split=name)
        except ValueError:
            continue
    return kind(folder, split=names[-1])


def from_dataset(found: Any, name: str, classes: list[str] | None = None) -> ImageSet:
    """A torchvision classification data set: items are (PIL image, label). `classes` are those of its training part."""
    labels = getattr(found, "targets", getattr(found, "labels", getattr(found, "_labels", None)))
    if labels is None:
        with guarding_pillow():  # the items are the images as well
            labels = [found[i][1] for i in range(len(found))]
    try:
        values = np.asarray(labels, dtype=np.int64).reshape(len(found))
    except (TypeError, ValueError):
        raise DataError(f"{name}: every image must have one whole number as its label") from None
    given = classes or [str(c) for c in getattr(found, "classes", _numbers(values))]
    where = [f"{name}[{i}]" for i in range(len(values))]
    return ImageSet(given, values, where, _reader(where, lambda i: found[i][0]))


def _reader(names: Sequence[str], item: Callable[[int], Any]) -> Callable[[int], Image]:
    """Decoding by a library's own data set, whose errors do not say which image it was."""

    def read(i: int) -> Image:
        try:
            with guarding_pillow():
                found = item(i)
        except DataError as error:
            raise DataError(f"{names[i]}: {error}") from None
        except (OSError, SyntaxError, ValueError) as error:
            raise DataError(f"{names[i]} cannot be read as an image: {error}") from None
        return read_image(found, names[i])

    return read


def _numbers(labels: np.ndarray) -> list[str]:
    """Names of classes that have none: 0, 1, 2 …"""
    return [str(k) for k in range(int(labels.max(initial=-1)) + 1)]


def divided(items: list[T], held_out: float, seed: int) -> tuple[list[T], list[T]]:
    """Most of the items and, drawn by `seed`, the part `held_out`; each has at least one where there are two."""
    order = np.random.default_rng(seed).permutation(len(items))
    count = min(max(1, round(held_out * len(items))), len(items) - 1) if items else 0
    return [items[i] for i in sorted(order[count:])], [items[i] for i in sorted(order[:count])]


def _divide(images: ImageSet, held_out: float, seed: int) -> ImageSets:
    """Hold out a part of each class, at least one image of every class that has two."""
    if not 0.0 < held_out < 1.0:
        raise UsageError(f"held_out must be a part between 0 and 1, got {held_out}")
    generator = np.random.default_rng(seed)
    test: list[int] = []
    for k in range(len(images.classes)):
        members = generator.permutation(np.flatnonzero(images.labels == k))
        test += (
            members[: min(max(1, round(held_out * len(members))), len(members) - 1)].tolist() if len(members) else []
        )
    chosen = np.zeros(len(images), dtype=bool)
    chosen[test] = True
    return ImageSets(images.subset(np.flatnonzero(~chosen)), images.subset(np.flatnonzero(chosen)))
