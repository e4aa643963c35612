"""The layouts of the usual few-shot data sets, on folders of single pixels."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from leafward.data.standard_sets import read_images
from leafward.errors import DataError

IDS = {"n01": "tench", "n02": "great white shark", "n03": "crane"}


def pixel(*files: Path) -> None:
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (1, 1)).save(file)


def labelled(folder: Path) -> dict[str, tuple[str, int]]:
    """File -> class name and part."""
    files, labels, names, parts = read_images(folder)
    assert parts is not None
    assert sorted(set(labels)) == list(range(len(names)))
    return {
        str(file.relative_to(folder)): (names[label], part)
        for file, label, part in zip(files, labels, parts, strict=True)
    }


def class_names(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "classnames.txt").write_text("".join(f"{key} {name}\n" for key, name in IDS.items()))
    return folder


def test_imagenet(tmp_path: Path) -> None:
    folder = class_names(tmp_path)
    pixel(*(folder / "images" / part / key / f"{part}.JPEG" for part in ("train", "val") for key in IDS))
    found = labelled(folder)
    assert found["images/train/n02/train.JPEG"] == ("great white shark", 0)
    assert found["images/val/n03/val.JPEG"] == ("crane", 2)
    assert len(found) == 6


@pytest.mark.parametrize(("inner", "keys"), [("imagenet-r", ("n03", "n01")), ("imagenetv2-matched", ("2", "0"))])
def test_other_domains_of_imagenet_have_fewer_classes(tmp_path: Path, inner: str, keys: tuple[str, ...]) -> None:
    """By WordNet id or, as in V2, by number; in the order of the list, and all of them to test on."""
    folder = class_names(tmp_path)
    pixel(*(folder / inner / key / "0.jpg" for key in keys))
    assert labelled(folder) == {f"{inner}/{keys[0]}/0.jpg": ("crane", 2), f"{inner}/{keys[1]}/0.jpg": ("tench", 2)}
    assert read_images(folder)[2] == ("tench", "crane")
    pixel(folder / inner / "n99" / "0.jpg")
    with pytest.raises(DataError, match=r"the class folder .*n99|the class folder .*0 is not among"):
        read_images(folder)


def test_aircraft(tmp_path: Path) -> None:
    (tmp_path / "variants.txt").write_text("707-320\nDC-3\n")
    for word, line in (("train", "11 DC-3"), ("val", "12 707-320"), ("test", "13 DC-3")):
        (tmp_path / f"images_variant_{word}.txt").write_text(line + "\n")
        pixel(tmp_path / "images" / f"{line.split()[0]}.jpg")
    assert labelled(tmp_path) == {
        "images/11.jpg": ("DC-3", 0),
        "images/12.jpg": ("707-320", 1),
        "images/13.jpg": ("DC-3", 2),
    }
    (tmp_path / "images_variant_test.txt").write_text("13 Concorde\n")
    with pytest.raises(DataError, match=r"has the variant 'Concorde', which variants\.txt lacks"):
        read_images(tmp_path)


@pytest.mark.parametrize("name", ["valid", "validation"])
def test_parts_by_other_names_are_no_classes_and_are_not_lost(tmp_path: Path, name: str) -> None:
    pixel(*(tmp_path / part / kind / "0.png" for part in ("train", name) for kind in ("cat", "dog")))
    assert labelled(tmp_path)[f"{name}/dog/0.png"] == ("dog", 2)
    pixel(tmp_path / "test" / "dog" / "0.png")
    assert labelled(tmp_path)[f"{name}/dog/0.png"] == ("dog", 1)


def test_parts_above_the_class_folders_are_no_classes(tmp_path: Path) -> None:
    pixel(*(tmp_path / part / name / "0.png" for part in ("train", "val") for name in ("cat", "dog")))
    assert labelled(tmp_path)["val/dog/0.png"] == ("dog", 2)  # held out is what is scored
    pixel(tmp_path / "test" / "dog" / "0.png")
    found = labelled(tmp_path)
    assert (found["val/dog/0.png"], found["test/dog/0.png"]) == (("dog", 1), ("dog", 2))
    assert read_images(tmp_path)[2] == ("cat", "dog")


def test_training_images_alone_are_split_by_class_and_not_taken_for_one(tmp_path: Path) -> None:
    pixel(*(tmp_path / "train" / name / "0.png" for name in ("cat", "dog")))
    files, labels, names, parts = read_images(tmp_path)
    assert (len(files), labels, names, parts) == (2, [0, 1], ("cat", "dog"), None)
    pixel(tmp_path / "car" / "train" / "0.png", tmp_path / "bus" / "0.png")
    assert read_images(tmp_path)[2] == ("bus", "car", "train")  # here train is a class among others


def test_an_empty_split_is_refused(tmp_path: Path) -> None:
    (tmp_path / "split_zhou_Pets.json").write_text('{"train": [], "val": [], "test": []}')
    with pytest.raises(DataError, match="the labels must be 0…0 without a gap"):
        read_images(tmp_path)
