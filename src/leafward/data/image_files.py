"""The one reader of pictures that a user hands in: six formats, whatever the name of the file says.

Pillow chooses a decoder by what a file holds, not by its name, and its decoder of EPS runs Ghostscript on the file: a
downloaded z.png could start a program. So only the decoders of `FORMATS` ever see the bytes.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from leafward.errors import DataError, require
from leafward.files import check_size

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")
"""Pillow's names of the formats that are read. Their decoders are compiled code that starts no program."""
ENDINGS = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"})
"""What the names of such files end in."""
LARGEST_FILE = 1 << 30
"""Bytes of an encoded picture."""
MOST_PIXELS = (256 << 20) // 3
"""Pixels of a picture: 256 MiB as RGB. From here on Pillow, too, warns of a decompression bomb."""
MASK_MODES = ("1", "L", "P", "I", "I;16", "I;16L", "I;16B")
"""Pillow's modes of masks: one number of 1, 8, 16 or 32 bits for each pixel."""
ORIENTATION = 0x0112
TURNS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
"""EXIF orientation -> Pillow's transposition that puts the picture upright."""
_LOCK = threading.RLock()


def read_image(source: str | Path | bytes | Image, name: str = "", *, near: tuple[int, int] | None = None) -> Image:
    """A picture as RGB with 8 bits for each colour, upright as its EXIF orientation says.

    source: a file, the bytes of one (called `name` in errors), or what PIL holds, which is not turned again. Of an
    animation or a file of several pages the first. near: a JPEG may be decoded at a fraction of its size, no smaller
    than this (width, height).
    """
    require("PIL.Image", "vision")
    try:
        if not isinstance(source, str | Path | bytes):
            _check_opened(source)
            return _rgb(source)
        with _opened(source) as image:
            if near is not None:
                image.draft("RGB", near)
            return _upright(_rgb(image), _orientation(image))
    except Exception as error:  # a damaged file raises nearly anything in the decoders
        raise DataError(f"{_called(source, name)} cannot be read as an image: {_said(error)}") from None


def read_mask(source: str | Path | bytes, name: str = "") -> np.ndarray:
    """A mask as (H, W) int32: the number of each pixel as the file holds it, of a palette the index."""
    try:
        with _opened(source) as image:
            if image.mode not in MASK_MODES:
                raise DataError(f"it must hold one class number for each pixel, not {image.mode} colours")
            image.load()
            return np.asarray(_upright(image, _orientation(image))).astype(np.int32)
    except Exception as error:  # as above
        raise DataError(f"the mask {_called(source, name)} cannot be read: {_said(error)}") from None


def encoded_image(cell: Any, name: str) -> bytes:
    """The encoded picture in a cell of a table: the bytes, or Hugging Face's {"bytes": …, "path": …}."""
    encoded = cell.get("bytes") if isinstance(cell, dict) else cell
    if not isinstance(encoded, bytes):
        raise DataError(f"{name}; the bytes of the image file must be in the table itself")
    return encoded


@contextmanager
def guarding_pillow() -> Iterator[None]:
    """While this lasts, `PIL.Image.open` is `read_image` for the calling thread.

    torchvision's data sets open their files themselves, and not all of them take a loader. Other threads keep Pillow's
    function, and afterwards all do.
    """
    pillow = require("PIL.Image", "vision")
    owner = threading.get_ident()

    def guarded(fp: Any, mode: Any = "r", formats: Any = None) -> Any:
        if threading.get_ident() != owner or (formats is not None and set(formats) <= set(FORMATS)):
            return theirs(fp, mode, formats)
        if not hasattr(fp, "read"):
            return read_image(Path(os.fsdecode(fp)))
        fp.seek(0)
        return read_image(fp.read(), str(getattr(fp, "name", "")))

    with _LOCK:
        theirs = pillow.open
        pillow.open = guarded  # pyright: ignore[reportAttributeAccessIssue]
        try:
            yield
        finally:
            pillow.open = theirs  # pyright: ignore[reportAttributeAccessIssue]


def _opened(source: str | Path | bytes) -> Any:
    """A picture of which the header alone has been read: its format and its size are allowed."""
    pillow = require("PIL.Image", "vision")
    if not isinstance(source, bytes):
        check_size(source, LARGEST_FILE)
    elif len(source) > LARGEST_FILE:
        raise DataError(f"it has {len(source):,} bytes, and at most {LARGEST_FILE:,} are read")
    try:
        image = pillow.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=FORMATS)
    except pillow.UnidentifiedImageError:
        raise DataError(f"it is not a valid file of one of the formats {', '.join(FORMATS)}") from None
    if image.width * image.height > MOST_PIXELS:
        image.close()
        raise DataError(f"it has {image.width} × {image.height} pixels, and at most {MOST_PIXELS:,} are read")
    return image


def _check_opened(image: Any) -> None:
    """Refuse what PIL opened as another format: its pixels may still be undecoded, and to convert it decodes them."""
    from PIL.Image import Image
    from PIL.ImageFile import ImageFile

    if not isinstance(image, Image):
        raise DataError(f"it must be a file, the bytes of one or a PIL image, not {type(image).__name__}")
    if isinstance(image, ImageFile) and image.format not in (*FORMATS, "MPO"):  # MPO: a JPEG with more pictures behind
        raise DataError(
            f"PIL opened it as {image.format}, and the formats that are read are {', '.join(FORMATS)}; "
            "if its origin is trusted, hand in image.convert('RGB')"
        )


def _rgb(image: Image) -> Image:
    """8 bits for each colour. Pillow itself would cut off what lies above 255: a picture of 16 bits becomes white."""
    if image.mode == "F":
        raise DataError("its pixels have 32 bits (mode F); save it with 8 or 16")
    if not image.mode.startswith("I"):
        return image.convert("RGB")
    shades = np.asarray(image)
    low, high = int(shades.min(initial=0)), int(shades.max(initial=0))
    # What has values up to 255 alone in 32 bits may be meant as 8 bits or as 16.
    if image.mode == "I" and (low < 0 or high > 65535 or 0 < high < 256):
        raise DataError(f"its pixels have 32 bits (mode I) and values {low} … {high}; save it with 8 or 16")
    pillow = require("PIL.Image", "vision")
    return pillow.fromarray((shades >> 8).astype(np.uint8)).convert("RGB")


def _orientation(image: Any) -> int:
    """The EXIF orientation of a decoded picture; 1, upright, where there is none or the EXIF data are damaged."""
    try:
        return int(image.getexif().get(ORIENTATION, 1))
    except Exception:  # many cameras and editors write broken EXIF data beside good pixels
        return 1


def _upright(image: Image, orientation: int) -> Image:
    if orientation not in TURNS:
        return image
    pillow = require("PIL.Image", "vision")
    turned = image.transpose(pillow.Transpose[TURNS[orientation]])
    turned.info = {}  # else the EXIF data would go along, and who looks at them would turn the picture again
    return turned


def turned_hint(found: tuple[int, ...], said: tuple[int, ...]) -> str:
    """What to add to an error about two sizes of one picture where one is the other on its side."""
    if found == said or found != said[::-1]:
        return ""
    return "; images are turned upright as their EXIF orientation says, so what belongs to them must be as well"


def _called(source: Any, name: str) -> str:
    return name or (str(source) if isinstance(source, str | Path) else "an image")


def _said(error: Exception) -> str:
    return str(error) or type(error).__name__
