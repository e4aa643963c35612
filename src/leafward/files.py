"""Writing files so that a reader sees the old content or the new one, never half of it."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from leafward.errors import LeafwardError


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path beside `path`; rename it over `path` when the block succeeds.

    On any failure the temporary file is removed and `path` stays as it was.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        os.close(handle)
    except OSError as error:
        raise LeafwardError(f"cannot write {path}: {error.strerror or error}") from error
    temporary = Path(name)
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o666 & ~_umask())
        os.replace(temporary, path)
    except OSError as error:
        raise LeafwardError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def check_writable(folder: str | os.PathLike[str]) -> None:
    """Refuse, before the work that fills it, a folder that could not be made or written to. Makes nothing."""
    folder = Path(folder)
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise LeafwardError(f"cannot write to {folder}: {there} is not a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise LeafwardError(f"cannot write to {folder}: {there} may not be written to")


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Replace `path` by `text` (UTF-8) in one step."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Replace `path` by `value` as indented JSON in one step; NaN and infinities are written as null."""
    write_text(path, json.dumps(finite(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def finite(value: Any) -> Any:
    """`value` with every non-finite float replaced by None, so that it is valid JSON."""
    if isinstance(value, float):
        return value if value - value == 0.0 else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
