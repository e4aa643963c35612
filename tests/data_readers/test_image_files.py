"""The one reader of pictures: which formats it takes, what it makes of them, and that none starts a program."""

from __future__ import annotations

import io
import struct
import threading
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from leafward.data import image_files
from leafward.data.image_files import FORMATS, guarding_pillow, read_image, read_mask
from leafward.errors import DataError

RAMP = np.arange(65536, dtype=np.uint16).reshape(256, 256)
"""Every shade of 16 bits once: its mean as 8 bits is 127.5."""
TURNED = {  # EXIF 2.32, tag 0x0112: what the stored rows and columns are of the upright picture
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
    8: lambda a: np.rot90(a, 1),
}


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def oriented(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


# Values


MODES = {  # that Pillow can write
    "JPEG": ("1", "L", "RGB", "CMYK"),
    "PNG": ("1", "L", "LA", "P", "RGB", "RGBA"),
    "WEBP": ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK"),
    "BMP": ("1", "L", "P", "RGB", "RGBA"),
    "GIF": ("1", "L", "LA", "P", "RGB", "RGBA"),
    "TIFF": ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK"),
}


@pytest.mark.parametrize(("kind", "mode"), [(kind, mode) for kind, modes in MODES.items() for mode in modes])
def test_pictures_of_8_bits_are_what_pillow_makes_of_them(kind: str, mode: str, tmp_path: Path) -> None:
    data = encoded(Image.fromarray(noise(20, 30, 3)).convert(mode), kind)
    with Image.open(io.BytesIO(data)) as opened:
        expected = np.asarray(opened.convert("RGB"))
    (tmp_path / "any.name").write_bytes(data)
    for found in (read_image(tmp_path / "any.name"), read_image(str(tmp_path / "any.name")), read_image(data)):
        assert found.mode == "RGB"
        assert np.array_equal(np.asarray(found), expected)


def test_palettes_with_transparent_colours_keep_their_colours() -> None:
    image = Image.fromarray(noise(8, 8, 3)).quantize(16)
    data = encoded(image, transparency=bytes(range(16)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow advises RGBA
        assert np.array_equal(np.asarray(read_image(data)), np.asarray(image.convert("RGB")))


@pytest.mark.parametrize(("kind", "options"), [("GIF", {}), ("TIFF", {}), ("PNG", {}), ("WEBP", {"lossless": True})])
def test_the_first_of_several_pictures_is_read(kind: str, options: dict[str, Any]) -> None:
    first, second = (Image.new("RGB", (6, 4), colour) for colour in ("red", "blue"))
    data = encoded(first, kind, save_all=True, append_images=[second], **options)
    assert getattr(Image.open(io.BytesIO(data)), "n_frames", 1) == 2
    assert np.array_equal(np.asarray(read_image(data)), np.asarray(first))


def sixteen_bits() -> dict[str, bytes]:
    little = Image.fromarray(RAMP)
    big = Image.frombytes("I;16B", (256, 256), RAMP.astype(">u2").tobytes())
    return {"PNG": encoded(little), "TIFF": encoded(little, "TIFF"), "TIFF, big-endian": encoded(big, "TIFF")}


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "TIFF, big-endian"])
def test_greys_of_16_bits_keep_their_shades(kind: str) -> None:
    found = np.asarray(read_image(sixteen_bits()[kind]))
    assert np.array_equal(found, np.repeat((RAMP // 256)[..., None], 3, axis=2))
    assert found.mean() == 127.5


def deep_png(colours: int, samples: np.ndarray) -> bytes:
    """A PNG of 16 bits in a colour type that Pillow cannot write; samples (H, W, channels)."""
    height, width, _ = samples.shape
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in samples)
    header = struct.pack(">IIBBBBB", width, height, 16, colours, 0, 0, 0)
    parts = [(b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    chunks = [
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in parts
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


@pytest.mark.parametrize(("colours", "channels"), [(0, 1), (2, 3), (4, 2), (6, 4)])
def test_every_kind_of_png_of_16_bits(colours: int, channels: int) -> None:
    samples = np.repeat(RAMP[..., None], channels, axis=2)
    assert np.asarray(read_image(deep_png(colours, samples))).mean() == 127.5


def test_32_bits_are_taken_where_they_hold_16_and_refused_else() -> None:
    wide = RAMP.astype(np.int32)
    assert np.asarray(read_image(encoded(Image.fromarray(wide), "TIFF"))).mean() == 127.5
    assert np.asarray(read_image(Image.fromarray(wide))).mean() == 127.5
    for values in (wide - 1, wide * 2, wide // 256):
        with pytest.raises(
            DataError, match=r"an image cannot be read as an image: its pixels have 32 bits .* and values"
        ):
            read_image(encoded(Image.fromarray(values), "TIFF"))
    with pytest.raises(DataError, match=r"32 bits \(mode F\); save it with 8 or 16"):
        read_image(encoded(Image.fromarray(np.ones((4, 4), np.float32)), "TIFF"))


# Upright


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "WEBP", "JPEG"])
@pytest.mark.parametrize("orientation", TURNED)
def test_pictures_are_upright(kind: str, orientation: int) -> None:
    options = {"lossless": True} if kind == "WEBP" else {}
    data = encoded(Image.fromarray(noise(12, 20, 3)), kind, exif=oriented(orientation), **options)
    found = read_image(data)
    if kind == "TIFF":  # which Pillow turns by itself
        stored = noise(12, 20, 3)
    else:
        stored = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    assert np.array_equal(np.asarray(found), TURNED[orientation](stored))
    assert np.array_equal(np.asarray(found), np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data)))))
    assert np.array_equal(np.asarray(ImageOps.exif_transpose(found)), np.asarray(found))  # it is not turned twice


@pytest.mark.parametrize("mode", ["1", "L", "P", "I;16", "I"])
@pytest.mark.parametrize("orientation", TURNED)
def test_masks_keep_their_numbers_and_are_upright(mode: str, orientation: int) -> None:
    numbers = noise(12, 20) % 2 if mode == "1" else noise(12, 20)
    numbers = numbers.astype(np.uint16) * 200 if mode.startswith("I") else numbers
    made = {"1": numbers.astype(bool), "I": numbers.astype(np.int32)}
    image = Image.fromarray(made.get(mode, numbers))
    if mode == "P":
        image.putpalette(noise(768).tobytes())
    data = encoded(image, "TIFF" if mode == "I" else "PNG", exif=oriented(orientation))
    assert Image.open(io.BytesIO(data)).mode == mode
    found = read_mask(data)
    assert found.dtype == np.int32
    assert np.array_equal(found, TURNED[orientation](numbers))


def test_damaged_exif_data_do_not_cost_the_picture() -> None:
    image = Image.fromarray(noise(12, 20, 3))
    for exif in (b"Exif\0\0II*\0\xff\xff\xff\x7f", b"Exif\0\0MM", b"Exif\0\0" + b"\xff" * 40):
        data = encoded(image, "JPEG", exif=exif)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow says that they are damaged
            assert read_image(data).size == (20, 12)


# Refusals


def fits() -> bytes:
    cards = ["SIMPLE  =                    T", "BITPIX  =                    8", "NAXIS   =                    2"]
    cards += ["NAXIS1  =                    4", "NAXIS2  =                    4", "END"]
    return "".join(card.ljust(80) for card in cards).ljust(2880).encode() + bytes(2880)


def foreign() -> dict[str, bytes]:
    """Files of other formats; those that Pillow can write are valid, the others at least are recognised by it."""
    image = Image.fromarray(noise(8, 8, 3))
    found = {
        kind: encoded(image, kind) for kind in ("EPS", "ICO", "TGA", "PCX", "PDF", "PPM", "DDS", "JPEG2000", "SGI")
    }
    psd = b"8BPS" + struct.pack(">H6xHIIHH", 1, 3, 8, 8, 8, 3) + bytes(12) + b"\0\0" + bytes(192)
    wmf = b"\xd7\xcd\xc6\x9a\0\0" + struct.pack("<4hH", 0, 0, 100, 100, 72) + bytes(6) + b"\x01\0\t\0" + bytes(40)
    return found | {"PSD": psd, "WMF": wmf, "FITS": fits(), "SVG": b"<svg xmlns='http://www.w3.org/2000/svg'/>"}


UNKNOWN_TO_PILLOW = ("PDF", "SVG")


@pytest.mark.parametrize("kind", foreign())
def test_other_formats_are_refused_whatever_they_are_called(kind: str, tmp_path: Path) -> None:
    data, path = foreign()[kind], tmp_path / "z.png"
    if kind not in UNKNOWN_TO_PILLOW:
        assert Image.open(io.BytesIO(data)).format == kind  # so that it is our list that refuses it
    path.write_bytes(data)
    for source, name in ((path, "z.png"), (data, "an image")):
        with pytest.raises(
            DataError, match=f"{name} cannot be read as an image: it is not a valid file .* JPEG, PNG, WEBP"
        ):
            read_image(source)
    with pytest.raises(DataError, match=r"the mask .*z\.png cannot be read: it is not a valid file"):
        read_mask(path)
    if kind not in UNKNOWN_TO_PILLOW:
        with pytest.raises(DataError, match=f"PIL opened it as {kind}"):
            read_image(Image.open(path))


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes that says it has so many pixels."""
    return deep_png(0, np.zeros((1, 1, 1))).replace(struct.pack(">II", 1, 1), struct.pack(">II", width, height))


def with_sums(data: bytes) -> bytes:
    """The same PNG with the checksum of its header mended."""
    return data[:29] + struct.pack(">I", zlib.crc32(data[12:29])) + data[33:]


@pytest.mark.parametrize(("width", "height"), [(100_000, 100_000), (10_000, 10_000)])
def test_pictures_with_too_many_pixels_are_refused_before_they_are_decoded(width: int, height: int) -> None:
    data = with_sums(bomb(width, height))
    for action in ("ignore", "error"):
        with warnings.catch_warnings():
            warnings.simplefilter(action, Image.DecompressionBombWarning)
            for reader in (read_image, read_mask):
                with pytest.raises(DataError, match=r"bomb\.png.*(pixels|decompression bomb)"):
                    reader(data, "bomb.png")


def test_the_limits_are_inclusive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, path = encoded(Image.new("RGB", (8, 5))), tmp_path / "a.png"
    path.write_bytes(data)
    monkeypatch.setattr(image_files, "MOST_PIXELS", 40)
    monkeypatch.setattr(image_files, "LARGEST_FILE", len(data))
    assert read_image(path).size == read_image(data).size == (8, 5)
    monkeypatch.setattr(image_files, "LARGEST_FILE", len(data) - 1)
    for source in (path, data):
        with pytest.raises(DataError, match=f"has {len(data)} bytes, and at most {len(data) - 1}"):
            read_image(source)
    monkeypatch.setattr(image_files, "LARGEST_FILE", len(data))
    monkeypatch.setattr(image_files, "MOST_PIXELS", 39)
    with pytest.raises(DataError, match="8 × 5 pixels, and at most 39"):
        read_image(path)


@pytest.mark.parametrize("kind", FORMATS)
def test_damaged_files_are_named(kind: str, tmp_path: Path) -> None:
    """Cut anywhere, or with bytes changed: a picture or our error, and of most cuts the error."""
    data = encoded(Image.fromarray(noise(40, 40, 3)), kind)
    generator = np.random.default_rng(1)
    said = []
    for part in np.linspace(0, len(data) - 50, 25).astype(int):
        changed = bytearray(data)
        changed[part : part + 4] = generator.bytes(4)
        said += [complaint(damaged) for damaged in (data[:part], bytes(changed))]
    refused = [words for words in said if words is not None]
    assert len(refused) >= 20
    assert all(words.startswith("torn.png cannot be read as an image: ") for words in refused)


def complaint(data: bytes) -> str | None:
    """Our error, if any; no other error is caught."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            read_image(data, "torn.png")
    except DataError as error:
        return str(error)
    return None


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="gone cannot be read as an image"):
        read_image(tmp_path / "gone")
    with pytest.raises(DataError, match="it is a folder"):
        read_image(tmp_path)
    with pytest.raises(DataError, match="a device or a pipe"):
        read_image("/dev/zero")
    with pytest.raises(DataError, match="the bytes of one or a PIL image, not ndarray"):
        read_image(noise(4, 4, 3))  # pyright: ignore[reportArgumentType]


# Libraries that open files themselves


def test_pillow_is_guarded_for_the_calling_thread_and_a_while(tmp_path: Path) -> None:
    pcx, photo = tmp_path / "z.png", tmp_path / "photo.jpg"
    Image.fromarray(noise(8, 6, 3)).save(pcx, "PCX")
    Image.fromarray(noise(8, 6, 3)).save(photo, exif=oriented(6))
    before, seen = Image.open, []
    with guarding_pillow(), guarding_pillow():
        with Image.open(photo) as image:
            assert (image.mode, image.size) == ("RGB", (8, 6))
        with open(photo, "rb") as file:
            assert np.array_equal(np.asarray(Image.open(file)), np.asarray(read_image(photo)))
        with pytest.raises(DataError, match=r"z\.png cannot be read as an image"):
            Image.open(pcx)
        with open(pcx, "rb") as file, pytest.raises(DataError, match=r"z\.png cannot be read as an image"):
            Image.open(file, formats=["PCX"])
        other = threading.Thread(target=lambda: seen.append(Image.open(pcx).format))
        other.start()
        other.join()
    assert seen == ["PCX"]
    assert Image.open is before
    with pytest.raises(ZeroDivisionError), guarding_pillow():
        _ = 1 / 0
    assert Image.open is before
