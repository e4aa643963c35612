"""Every way in which a picture gets into the package leads through the one reader."""

from __future__ import annotations

import ast
import io
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import EpsImagePlugin, Image
from radial_toys import clip

from leafward.data.images import ImageSets, load_images
from leafward.data.scenes import load_scenes
from leafward.encoders.encoder import Encoder, load_encoder
from leafward.encoders.zeroshot import labelled_images
from leafward.errors import DataError
from leafward.explorer.thumbnails import thumbnail

ROOT = Path(__file__).resolve().parents[2]
READER = ROOT / "src/leafward/data/image_files.py"
RAMP = np.arange(65536, dtype=np.uint16).reshape(256, 256)[:, :192]


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def written(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    torch.manual_seed(0)
    return load_encoder(clip(tmp_path_factory.mktemp("clip")))


# The ways: (bytes of a picture, empty folder, encoder) -> what the package makes of it


def _classes(data: bytes, place: Path) -> Path:
    for name in ("a/z.png", "a/y.png", "b/z.png", "b/y.png"):
        written(place / name, data)
    return place


def _read(sets: ImageSets) -> np.ndarray:
    return np.asarray(sets.train.read(0))


def class_folder(data: bytes, place: Path, _: Encoder) -> np.ndarray:
    return _read(load_images(_classes(data, place)))


def torchvision_folder(data: bytes, place: Path, _: Encoder) -> np.ndarray:
    return _read(load_images(f"torchvision:ImageFolder:{_classes(data, place)}"))


def torchvision_pets(data: bytes, place: Path, _: Encoder) -> np.ndarray:
    """A data set whose files have a fixed layout and that opens them itself."""
    names = [f"{name}_{i}" for name in ("Abyssinian", "american_bulldog") for i in (1, 2)]
    for name in names:
        written(place / "oxford-iiit-pet/images" / f"{name}.jpg", data)
    lines = "".join(f"{name} {1 + names.index(name) // 2} 1 1\n" for name in names)
    for part in ("trainval", "test"):
        written(place / "oxford-iiit-pet/annotations" / f"{part}.txt", lines.encode())
    return _read(load_images(f"torchvision:OxfordIIITPet:{place}"))


def parquet(data: bytes, place: Path, _: Encoder) -> np.ndarray:
    return _read(load_images(_parquet(place, [data] * 4)))


def hub_parquet(data: bytes, place: Path, _: Encoder) -> np.ndarray:
    return _read(load_images(_parquet(place, [{"bytes": data, "path": "z.png"}] * 4)))


def _parquet(place: Path, cells: list[Any]) -> Path:
    import pyarrow
    from pyarrow.parquet import write_table

    write_table(pyarrow.table({"image": cells, "label": ["a", "a", "b", "b"]}), place / "x.parquet")
    return place / "x.parquet"


def hugging_face(data: bytes, place: Path, _: Encoder) -> np.ndarray:
    """With a second column of images, which nobody asks for."""
    import datasets

    features = datasets.Features(
        {"image": datasets.Image(), "other": datasets.Image(), "label": datasets.Value("int64")}
    )
    cells = [{"bytes": data, "path": "z.png"}] * 4
    table = datasets.Dataset.from_dict({"image": cells, "other": cells, "label": [0, 0, 1, 1]}, features=features)
    table.save_to_disk(place / "set")
    return _read(load_images(place / "set"))


def scene(data: bytes, place: Path, _: Encoder) -> np.ndarray:
    for name in ("0.png", "1.png"):
        written(place / "images" / name, data)
        written(place / "masks" / name, encoded(Image.fromarray(np.eye(4, dtype=np.uint8))))
    return np.asarray(load_scenes(place).train.image(0))


def detection(data: bytes, place: Path, _: Encoder) -> np.ndarray:
    from leafward.data.boxes import load_objects
    from leafward.systems.vision.detection import Examples

    for name in ("0.png", "1.png"):
        written(place / "images" / name, data)
    images = [{"id": i, "file_name": f"{i}.png", "width": 192, "height": 256} for i in (0, 1)]
    things = [{"id": i, "image_id": i, "category_id": 1, "bbox": [1, 1, 9, 9]} for i in (0, 1)]
    record = {"images": images, "annotations": things, "categories": [{"id": 1, "name": "cat"}]}
    written(place / "all.json", json.dumps(record).encode())
    pixels = Examples(load_objects(place).train, masks=False, hflip=0.0)[0][0]
    return (pixels * 255).round().byte().permute(1, 2, 0).numpy()


def explained_clusters(data: bytes, place: Path, _: Encoder) -> np.ndarray:
    from leafward.systems.hcformer.explain import _prepare
    from leafward.systems.vision.build import Card

    return _prepare(written(place / "z.png", data), 192, Card("classify", "hcformer_nano"))[0]


def explained_hierarchy(data: bytes, place: Path, _: Encoder) -> np.ndarray:
    from leafward.systems.himapper.explain import _prepare
    from leafward.systems.vision.build import Card

    return _prepare(written(place / "z.png", data), 192, Card("classify", "resnet10t"))[0]


def small_picture(data: bytes, place: Path, _: Encoder) -> np.ndarray:
    made = thumbnail(written(place / "z.png", data))
    if made is None:
        raise DataError("the picture was left out")
    return np.asarray(Image.open(io.BytesIO(made)))


def encoded_file(data: bytes, place: Path, encoder: Encoder) -> np.ndarray:
    return encoder.encode_image([written(place / "z.png", data)]).numpy()


def encoded_bytes(data: bytes, place: Path, encoder: Encoder) -> np.ndarray:
    return encoder.encode_image([data]).numpy()


def zero_shot_folder(data: bytes, place: Path, encoder: Encoder) -> np.ndarray:
    return encoder.encode_image(labelled_images(_classes(data, place))[0]).numpy()


def zero_shot_parquet(data: bytes, place: Path, encoder: Encoder) -> np.ndarray:
    return encoder.encode_image(labelled_images(_parquet(place, [data] * 4))[0]).numpy()


def zero_shot_hub_parquet(data: bytes, place: Path, encoder: Encoder) -> np.ndarray:
    cells = [{"bytes": data, "path": "z.png"}] * 4
    return encoder.encode_image(labelled_images(_parquet(place, cells))[0]).numpy()


def few_shot_pixels(data: bytes, place: Path, encoder: Any) -> np.ndarray:
    from leafward.systems.lathadapter.images import image_set

    return image_set(_classes(data, place), encoder, "a photo of a {}.").images[torch.arange(2)].numpy()


WAYS: list[Callable[[bytes, Path, Any], np.ndarray]] = [
    class_folder,
    torchvision_folder,
    torchvision_pets,
    parquet,
    hub_parquet,
    hugging_face,
    scene,
    detection,
    explained_clusters,
    explained_hierarchy,
    small_picture,
    encoded_file,
    encoded_bytes,
    zero_shot_folder,
    zero_shot_parquet,
    zero_shot_hub_parquet,
    few_shot_pixels,
]
every_way = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
PLAIN = Image.fromarray((RAMP // 256).astype(np.uint8)).convert("RGB")
"""The ramp with 8 bits, upright: what all of the pictures below are."""


def sideways() -> bytes:
    """To be turned by a quarter to the right: EXIF orientation 6."""
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(PLAIN.transpose(Image.Transpose.ROTATE_90), exif=exif)


@every_way
def test_16_bits_and_orientation_make_no_difference(
    way: Callable[..., np.ndarray], tmp_path: Path, encoder: Encoder
) -> None:
    def seen(name: str, data: bytes) -> np.ndarray:
        place = tmp_path / name
        place.mkdir()
        return way(data, place, encoder).astype(np.float64)

    plain = seen("plain", encoded(PLAIN))
    if plain.ndim == 3:
        assert plain.mean() == pytest.approx(127.5, abs=0.5)
    assert np.array_equal(seen("16", encoded(Image.fromarray(RAMP))), plain)
    assert np.array_equal(seen("sideways", sideways()), plain)
    assert not np.allclose(seen("white", encoded(Image.new("RGB", PLAIN.size, "white"))), plain, atol=1e-3)


# No program is started


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that is there once anybody has called Ghostscript."""
    marker, folder = tmp_path / "started", tmp_path / "bin"
    folder.mkdir()
    (folder / "gs").write_text(f'#!/bin/sh\necho "$@" >> "{marker}"\nexit 0\n')
    (folder / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)  # Pillow keeps what it has found
    return marker


EPS = encoded(Image.new("RGB", (16, 16), "red"), "EPS")


def test_pillow_alone_would_start_ghostscript(started: Path, tmp_path: Path) -> None:
    """Without this the tests below would say nothing."""
    path = written(tmp_path / "z.png", EPS)
    with Image.open(path) as image, pytest.raises(OSError):  # this Ghostscript draws nothing
        image.convert("RGB")
    assert started.exists()


@every_way
def test_an_eps_file_called_png_is_refused_and_starts_nothing(
    way: Callable[..., np.ndarray], started: Path, tmp_path: Path, encoder: Encoder
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    with pytest.raises(DataError):
        way(EPS, place, encoder)
    assert not started.exists()


def test_masks_and_labels_that_are_eps_files_start_nothing(started: Path, tmp_path: Path) -> None:
    import datasets

    for name in ("0.png", "1.png"):
        written(tmp_path / "images" / name, encoded(PLAIN))
        written(tmp_path / "masks" / name, EPS)
    with pytest.raises(DataError, match=r"the mask .*masks/\d\.png cannot be read: it is not a valid file"):
        load_scenes(tmp_path)
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Image()})
    cells = [{"bytes": EPS, "path": "z.png"}] * 4
    datasets.Dataset.from_dict({"image": cells, "label": cells}, features=features).save_to_disk(tmp_path / "set")
    with pytest.raises(DataError, match="labels must be texts or whole numbers"):
        load_images(tmp_path / "set")
    assert not started.exists()


def test_what_pil_has_opened_but_not_decoded_starts_nothing(started: Path, tmp_path: Path, encoder: Encoder) -> None:
    with Image.open(written(tmp_path / "z.png", EPS)) as image, pytest.raises(DataError, match="PIL opened it as EPS"):
        encoder.encode_image([image])
    assert not started.exists()


def test_hugging_face_sets_without_the_bytes_are_refused(tmp_path: Path) -> None:
    """A set could name any file of the machine, or of another one."""
    import datasets

    path = str(written(tmp_path / "z.png", encoded(PLAIN)))
    labels = {"label": [0, 0, 1, 1]}
    datasets.Dataset.from_dict({"image": [{"bytes": None, "path": path}] * 4} | labels).save_to_disk(tmp_path / "named")
    with pytest.raises(DataError, match=r"named\[\d\] has no encoded image in the column image; the bytes .* table"):
        load_images(tmp_path / "named").train.read(0)
    whole = datasets.Dataset.from_dict({"image": [path] * 4} | labels).cast_column("image", datasets.Image())
    whole.save_to_disk(tmp_path / "whole")  # which reads the file
    assert load_images(tmp_path / "whole").train.read(0).size == PLAIN.size


def test_grey_hugging_face_sets_stay_grey(tmp_path: Path) -> None:
    import datasets

    features = datasets.Features({"image": datasets.Image(mode="L"), "label": datasets.Value("int64")})
    colours = Image.fromarray(np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8))
    cells = [{"bytes": encoded(colours), "path": None}] * 4
    datasets.Dataset.from_dict({"image": cells, "label": [0, 0, 1, 1]}, features=features).save_to_disk(tmp_path / "s")
    found = np.asarray(load_images(tmp_path / "s").train.read(0))
    assert np.array_equal(found, np.asarray(colours.convert("L").convert("RGB")))


# The source


OTHER_READERS = ("cv2", "imageio", "skimage.io", "torchvision.io", "matplotlib.image", "accimage", "tifffile")
OTHER_CALLS = {"imread", "decode_image", "decode_jpeg", "decode_png", "pil_loader", "default_loader"}


def _modules(node: ast.AST) -> Iterator[tuple[str, str]]:
    """The modules that a statement imports, with the name that each gets; `require` imports as well."""
    if isinstance(node, ast.Import):
        yield from ((alias.name, alias.asname or alias.name) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield from ((f"{node.module}.{alias.name}", alias.asname or alias.name) for alias in node.names)
    elif isinstance(node, ast.Assign):
        target = node.targets[0]
        names = target.elts if isinstance(target, ast.Tuple) else [target]
        values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
        for name, value in zip(names, values, strict=False):
            if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "require":
                yield ast.unparse(value.args[0]).strip("'"), ast.unparse(name)


def readers(source: str) -> list[str]:
    """What in a module opens pictures by itself."""
    tree = ast.parse(source)
    bound = [pair for node in ast.walk(tree) for pair in _modules(node)]
    found = [module for module, _ in bound if module.startswith(OTHER_READERS) or module == "PIL.Image.open"]
    pillow = {name for module, name in bound if module == "PIL.Image"} | {"PIL.Image", "Image"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            opens = node.func.attr == "open" and (
                ast.unparse(node.func.value) in pillow or "PIL" in ast.unparse(node.func.value)
            )
            if opens or node.func.attr in OTHER_CALLS:
                found.append(ast.unparse(node.func))
    return found


def test_the_search_finds_readers() -> None:
    for source in (
        "from PIL import Image\nImage.open(path)",
        "import PIL.Image\nwith PIL.Image.open(path) as image: pass",
        "from PIL import Image as pictures\npictures.open(path)",
        "pillow = require('PIL.Image', 'vision')\npillow.open(path)",
        "one, two = require('PIL.Image', 'serve'), require('PIL.ImageOps', 'serve')\none.open(path)",
        "require('PIL.Image', 'vision').open(path)",
        "from PIL.Image import open",
        "from torchvision.io import decode_image",
        "import matplotlib.pyplot as plt\nplt.imread(path)",
        "import cv2",
    ):
        assert readers(source), source
    assert not readers("import gzip\nfrom PIL import Image\ngzip.open(path)\nImage.fromarray(pixels).save(path)")


def test_no_other_module_opens_pictures() -> None:
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "benchmarks").glob("*.py")]
    assert len(files) > 100
    found = {str(file.relative_to(ROOT)): readers(file.read_text(encoding="utf-8")) for file in files if file != READER}
    assert {file: calls for file, calls in found.items() if calls} == {}
    assert readers(READER.read_text(encoding="utf-8")) == ["pillow.open"]
