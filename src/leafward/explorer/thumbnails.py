"""Small pictures for points, made once at the start from a folder of images; requests never reach the files."""

from __future__ import annotations

import io
from pathlib import Path

from leafward.data.image_files import ENDINGS, read_image
from leafward.errors import DataError, require

#: Longest side of a thumbnail, in pixels.
SIDE = 96
MOST_IMAGES = 20_000


def read_thumbnails(folder: Path, names: list[str], classes: list[str] | None) -> tuple[dict[int, bytes], list[str]]:
    """JPEG bytes for the points that have an image, and what to tell the user.

    A point's image is the file whose path in the folder, or whose name, without its ending is the point's name; else
    the one that is called like its class. Links are not followed out of the folder.
    """
    if not folder.is_dir():
        raise DataError(f"--images {folder} is not a folder")
    require("PIL.Image", "serve")
    files = _by_name(folder)
    made: dict[Path, bytes | None] = {}
    found: dict[int, bytes] = {}
    for row, name in enumerate(names):
        file = files.get(_stem(name)) or (files.get(classes[row]) if classes is not None else None)
        if file is None or (file not in made and len(made) >= MOST_IMAGES):
            continue
        if file not in made:
            made[file] = thumbnail(file)
        content = made[file]
        if content is not None:
            found[row] = content
    if not found:
        raise DataError(f"--images {folder}: none of its {len(files)} images is called like a point or a class")
    bad = sum(content is None for content in made.values())
    notes = [f"{len(found):,} of {len(names):,} points have a thumbnail"]
    if bad:
        notes.append(f"{bad} images are too large or cannot be read, and were left out")
    return found, notes


def thumbnail(file: Path) -> bytes | None:
    """An image decoded, made small and encoded anew, so that nothing else of the file goes on; None if it cannot be."""
    try:
        small = read_image(file, near=(2 * SIDE, 2 * SIDE))
    except DataError:
        return None
    small.thumbnail((SIDE, SIDE))
    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=80)
    return buffer.getvalue()


def _by_name(folder: Path) -> dict[str, Path]:
    """Images by their path in the folder without ending and, where it is theirs alone, by their name."""
    home = folder.resolve()
    files = [
        file
        for file in sorted(folder.rglob("*"))
        if file.suffix.lower() in ENDINGS and file.is_file() and file.resolve().is_relative_to(home)
    ]
    by_stem: dict[str, Path | None] = {}
    for file in files:
        by_stem[file.stem] = None if file.stem in by_stem else file
    by_path = {file.relative_to(folder).with_suffix("").as_posix(): file for file in files}
    return {stem: file for stem, file in by_stem.items() if file is not None} | by_path


def _stem(name: str) -> str:
    """A point's name without the ending of an image."""
    stem, dot, ending = name.rpartition(".")
    return stem if dot and f".{ending.lower()}" in ENDINGS else name
