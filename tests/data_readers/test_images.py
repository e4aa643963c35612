"""Labelled images from every kind of source, and what is said about bad ones."""

import io
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from leafward.config import checked
from leafward.data.image_files import read_image
from leafward.data.images import check, check_classes, from_arrays, from_dataset, load_images
from leafward.errors import DataError, UsageError
from leafward.systems.vision.augment import Augment


def picture(value: int) -> Image.Image:
    return Image.fromarray(np.full((10, 12, 3), value, dtype=np.uint8))


def fill(folder, counts):
    for name, count in counts.items():
        (folder / name).mkdir(parents=True)
        for i in range(count):
            picture(10 * i).save(folder / name / f"{i}.png")


def test_class_folders_are_divided_class_by_class(tmp_path):
    fill(tmp_path, {"cat": 10, "ant": 5, "bee": 2})
    sets = load_images(tmp_path, held_out=0.2)
    assert sets.train.classes == sets.held_out.classes == ["ant", "bee", "cat"]
    assert np.bincount(sets.held_out.labels).tolist() == [1, 1, 2]
    assert np.bincount(sets.train.labels).tolist() == [4, 1, 8]
    assert not set(sets.train.names) & set(sets.held_out.names)
    assert load_images(tmp_path, held_out=0.2).held_out.names == sets.held_out.names
    i = next(i for i, name in enumerate(sets.train.names) if name.endswith("3.png"))
    assert np.asarray(sets.train.read(i)).mean() == 30


def test_own_split_is_kept(tmp_path):
    fill(tmp_path / "train", {"a": 2, "b": 3})
    fill(tmp_path / "val", {"b": 4})
    sets = load_images(tmp_path)
    assert sets.train.labels.tolist() == [0, 0, 1, 1, 1]
    assert sets.held_out.labels.tolist() == [1] * 4
    (tmp_path / "val" / "c").mkdir()
    with pytest.raises(DataError, match="val/c is a class that the training images do not have"):
        load_images(tmp_path)


def test_parquet_with_splits(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    table = {
        "split": ["train", "train", "validation", "test"],
        "label": ["b", "a", "b", "a"],
        "file": ["0", "1", "2", "3"],
        "png": [encoded_png(5), encoded_png(6), encoded_png(7), b"nonsense"],
    }
    parquet.write_table(arrow.table(table), tmp_path / "x.parquet")
    sets = load_images(tmp_path / "x.parquet")
    assert load_images(tmp_path).train.classes == sets.train.classes
    assert sets.train.labels.tolist() == [1, 0]
    assert np.asarray(sets.held_out.read(0)).mean() == 7
    assert len(sets.held_out) == 1
    parquet.write_table(arrow.table({**table, "split": ["train", "train", "test", "test"]}), tmp_path / "x.parquet")
    with pytest.raises(DataError, match=r"x\.parquet: 3 cannot be read as an image"):
        check(load_images(tmp_path / "x.parquet").held_out, "held-out images")


def encoded_png(value: int) -> bytes:
    buffer = io.BytesIO()
    picture(value).save(buffer, "PNG")
    return buffer.getvalue()


def test_parquet_of_the_hub_keeps_the_split_of_its_file_names(tmp_path):
    """data/train-00000-of-00001.parquet: the split is in the name, and mixing both would train on what is scored."""
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    (tmp_path / "data").mkdir()
    for part, values in (("train", (1, 2, 3)), ("test", (7, 8))):
        cells = [{"bytes": encoded_png(value), "path": None} for value in values]
        table = arrow.table({"image": cells, "label": [value % 2 for value in values]})
        parquet.write_table(table, tmp_path / "data" / f"{part}-00000-of-00001.parquet")
    sets = load_images(tmp_path)
    assert [np.asarray(sets.train.read(i)).mean() for i in range(3)] == [1, 2, 3]
    assert [np.asarray(sets.held_out.read(i)).mean() for i in range(len(sets.held_out))] == [7, 8]
    cells = arrow.table({"image": [{"bytes": None, "path": "gone.png"}] * 2, "label": [0, 0]})
    parquet.write_table(cells, tmp_path / "data" / "train-00000-of-00001.parquet")
    with pytest.raises(DataError, match=r"train-00000-of-00001\.parquet: 0 has no encoded image in the column image"):
        check(load_images(tmp_path).train, "x")


@pytest.mark.parametrize("labels", [["b", "a", "b", "a"], [1, 0, 1, 0]], ids=["texts", "numbers"])
def test_hugging_face_data_on_disk(tmp_path, labels):
    datasets = pytest.importorskip("datasets")
    rows = {"image": [picture(value) for value in (1, 2, 3, 4)], "label": labels}
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.Value("string" if labels[0] == "b" else "int64")}
    )
    whole = datasets.Dataset.from_dict(rows, features=features)
    parts = {"train": whole.select([0, 1]), "validation": whole.select([3])}
    datasets.DatasetDict(parts).with_format("numpy").save_to_disk(tmp_path / "split")
    sets = load_images(tmp_path / "split")
    assert sets.train.classes == (["a", "b"] if labels[0] == "b" else ["0", "1"])
    assert (sets.train.labels.tolist(), sets.held_out.labels.tolist()) == ([1, 0], [0])
    assert np.asarray(sets.held_out.read(0)).mean() == 4
    whole.save_to_disk(tmp_path / "whole")
    assert len(load_images(tmp_path / "whole", held_out=0.5).held_out) == 2
    if labels[0] == "b":
        parts["train"] = whole.select([0, 2])
        datasets.DatasetDict(parts).save_to_disk(tmp_path / "other")
        with pytest.raises(DataError, match="the training images do not have the class 'a'"):
            load_images(tmp_path / "other")


def test_parts_of_torchvision_by_other_names_and_none(tmp_path, monkeypatch):
    """The pets have trainval and test, ImageNet train and val; EuroSAT has one part alone."""
    torchvision = pytest.importorskip("torchvision")

    class Pets(torchvision.datasets.VisionDataset):
        def __init__(self, root, split="trainval"):
            torchvision.datasets.utils.verify_str_arg(split, "split", ("trainval", "val"))
            super().__init__(root)
            self._labels = [0, 1, 0] if split == "trainval" else [1, 0]

        def __len__(self):
            return len(self._labels)

        def __getitem__(self, index):
            return picture(5), self._labels[index]

    monkeypatch.setattr(torchvision.datasets, "OxfordIIITPet", Pets)
    sets = load_images(f"torchvision:OxfordIIITPet:{tmp_path}")
    assert (sets.train.labels.tolist(), sets.held_out.labels.tolist()) == ([0, 1, 0], [1, 0])
    fill(tmp_path / "one", {"a": 4, "b": 4})
    sets = load_images(f"torchvision:ImageFolder:{tmp_path / 'one'}", held_out=0.25)
    assert (len(sets.train), len(sets.held_out), sets.train.classes) == (6, 2, ["a", "b"])
    with pytest.raises(DataError, match="CocoDetection cannot be read from"):
        load_images(f"torchvision:CocoDetection:{tmp_path}")
    with pytest.raises(DataError, match="every image must have one whole number as its label"):
        from_dataset([(picture(1), {"boxes": []})], "boxes")


def test_images_of_16_bits_keep_their_shades_and_those_of_32_are_refused(tmp_path):
    """Pillow's own conversion makes everything above 255 white."""
    Image.fromarray(np.array([[0, 257], [32896, 65535]], dtype=np.uint16)).save(tmp_path / "16.png")
    assert np.asarray(read_image(tmp_path / "16.png"))[..., 0].tolist() == [[0, 1], [128, 255]]
    Image.fromarray(np.ones((4, 4), dtype=np.float32)).save(tmp_path / "32.tif")
    with pytest.raises(DataError, match=r"32\.tif cannot be read as an image: its pixels have 32 bits"):
        read_image(tmp_path / "32.tif")


def test_hidden_folders_are_no_classes(tmp_path):
    fill(tmp_path, {"a": 2, "b": 2, ".cache": 0})
    assert load_images(tmp_path).train.classes == ["a", "b"]


def test_arrays_and_torchvision(tmp_path):
    images, labels = np.zeros((6, 8, 8, 3), dtype=np.uint8), np.array([0, 1, 2, 0, 1, 2])
    np.savez(tmp_path / "x.npz", images=images, labels=labels, classes=np.array(["a", "b", "c"]))
    sets = load_images(tmp_path / "x.npz", held_out=0.5)
    assert len(sets.train) == len(sets.held_out) == 3
    torchvision = pytest.importorskip("torchvision")
    fake = from_dataset(torchvision.datasets.FakeData(5, (3, 8, 8), 4), "fake")
    assert len(fake) == 5
    assert fake.read(2).size == (8, 8)
    with pytest.raises(UsageError, match="did you mean 'CIFAR10'"):
        load_images("torchvision:CIFAR1O:/nowhere")
    with pytest.raises(DataError, match="CIFAR10 cannot be read from"):
        load_images(f"torchvision:CIFAR10:{tmp_path}")


class Torn:
    """A data set of a library: its second image cannot be decoded, its last class has no image."""

    targets = (0, 1)

    def __len__(self):
        return 2

    def __getitem__(self, index):
        if index:
            raise OSError("broken data stream")
        return picture(3), 0


def test_images_of_libraries_are_named_and_share_the_classes_of_the_training():
    found = from_dataset(Torn(), "library", ["a", "b", "c"])
    assert found.classes == ["a", "b", "c"]
    with pytest.raises(DataError, match=r"library\[1\] cannot be read as an image: broken data stream"):
        check(found, "x")


def test_large_sets_are_decoded_at_even_distances(monkeypatch):
    monkeypatch.setattr("leafward.data.images.DECODED", 4)
    seen = []
    given = from_arrays(np.zeros((10, 8, 8, 3), dtype=np.uint8), np.zeros(10, dtype=int))
    check(replace(given, read=lambda i: seen.append(i)), "x")
    assert seen == [0, 3, 6, 9]


def test_bad_data_are_named(tmp_path):
    fill(tmp_path, {"a": 2, "b": 2})
    (tmp_path / "a" / "1.png").write_bytes((tmp_path / "a" / "0.png").read_bytes()[:40])
    whole = load_images(tmp_path, 0.5)
    torn = next(part for part in (whole.train, whole.held_out) if any("a/1.png" in name for name in part.names))
    with pytest.raises(DataError, match=r"a/1\.png cannot be read as an image"):
        check(torn, "x")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"class folder .*empty has no image"):
        load_images(tmp_path)
    images = np.zeros((2, 8, 8, 3), dtype=np.uint8)
    wrong = from_arrays(images, np.array([0, 2]), ["a", "b"], "set")
    with pytest.raises(DataError, match=r"label of set\[1\] is 2, but there are 2 classes"):
        check(wrong, "x")
    with pytest.raises(DataError, match="the class 'c' has no image"):
        check_classes(from_arrays(images, np.array([0, 1]), ["a", "b", "c"]), "x")
    with pytest.raises(DataError, match="not there"):
        load_images(tmp_path / "nothing")
    with pytest.raises(DataError, match="nothing cannot be read"):
        read_image(tmp_path / "nothing")


@pytest.mark.parametrize(("name", "value"), [("hflip", 2.0), ("mixup", -1.0), ("scale", (0.5, 0.2))])
def test_bad_augmentation_is_named(name, value):
    with pytest.raises(UsageError, match=name):
        checked(Augment, {name: value})
