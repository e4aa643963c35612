"""Files in and out: sizes are looked at before reading, and a reader sees the old content or the new, never half."""

from __future__ import annotations

import gzip
import json
import os
import re
import stat
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from leafward.errors import DataError, LeafwardError, UsageError

LARGEST_TEXT = 4 << 30
"""Bytes of a text or table that is read whole."""
LARGEST_RECORD = 512 << 20
"""Bytes of a JSON or YAML file, which takes many times its size in memory."""
LARGEST_UNPACKED = 64 << 30
"""Bytes that an archive may unpack to."""
MOST_PACKED = 200
"""Times that an archive of more than a few megabytes may grow when unpacked; real data do not come near."""


_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")

TEMPORARY = ".tmp"
"""How the names of files and folders end that are being written: .NAME.XXXXXXXX.tmp."""


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path beside `path`; rename it over `path` when the block succeeds.

    On any failure the temporary file is removed and `path` stays as it was.
    """
    path = Path(path)
    made = [] if path.parent.exists() else [path.parent]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=TEMPORARY, dir=path.parent)
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
        for parent in made:  # a folder that was made for nothing is deleted; one that holds something stays
            with suppress(OSError):
                parent.rmdir()


def check_writable(folder: str | os.PathLike[str]) -> None:
    """Refuse, before the work that fills it, a folder that could not be made or written to. Makes nothing."""
    folder = Path(folder)
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise LeafwardError(f"cannot write to {folder}: {there} is not a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise LeafwardError(f"cannot write to {folder}: {there} may not be written to")


def check_size(path: str | os.PathLike[str], most: int = LARGEST_TEXT) -> int:
    """The size of a file; refused where it is no plain file (a folder, a device, a pipe) or has more bytes than `most`.

    Links are followed: what counts is the file that would be read.
    """
    try:
        found = os.stat(path)
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        raise DataError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    if not stat.S_ISREG(found.st_mode):
        kind = "a folder" if stat.S_ISDIR(found.st_mode) else "a device or a pipe"
        raise DataError(f"cannot read {path}: it is {kind}, not a file")
    if found.st_size > most:
        raise DataError(f"cannot read {path}: it has {found.st_size:,} bytes, and at most {most:,} are read")
    return found.st_size


def read_bytes(path: str | os.PathLike[str], most: int = LARGEST_TEXT) -> bytes:
    """The content of a file of at most `most` bytes."""
    check_size(path, most)
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error


def read_unpacked(path: str | os.PathLike[str]) -> bytes:
    """The content of a file, unpacked where its name ends in .gz; a small one that would grow huge is refused."""
    if not str(path).endswith(".gz"):
        return read_bytes(path)
    most = _most_unpacked(check_size(path))
    try:
        with gzip.open(path, "rb") as file:
            content = file.read(most + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    if len(content) > most:
        raise DataError(f"cannot read {path}: it would unpack to more than {most:,} bytes")
    return content


def read_text(path: str | os.PathLike[str], most: int = LARGEST_TEXT) -> str:
    """The UTF-8 text of a file, line ends as they are, without a byte order mark."""
    try:
        return read_bytes(path, most).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"cannot read {path}: not UTF-8 text ({error.reason} at byte {error.start})") from error


def read_json(path: str | os.PathLike[str]) -> Any:
    """What a JSON file holds."""
    text = read_text(path, LARGEST_RECORD)
    try:
        value = json.loads(text)
        if _SURROGATE.search(text):  # half a character: it can be written nowhere
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise DataError(f"cannot read {path}: not valid JSON ({error})") from error
    return value


def check_name(path: str | os.PathLike[str]) -> None:
    """Refuse a file or folder whose name is not UTF-8: it could be shown and written down nowhere."""
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError as error:
        raise DataError(f"the name {os.fsencode(path)!r} is not UTF-8; rename it") from error


def read_record(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The object that a JSON file holds."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise DataError(f"cannot read {path}: expected a JSON object, found {type(value).__name__}")
    return value


def whole_path(name: str) -> str:
    """A name that holds in every folder: of a file or folder that is there, and of one after an @, its whole path."""
    model, at, weights = name.partition("@")
    if at and Path(weights).is_file():
        return f"{model}@{Path(weights).resolve()}"
    return str(Path(name).resolve()) if name and os.path.exists(name) else name


def check_version(record: Mapping[str, Any], newest: int, what: str) -> None:
    """Refuse what a later leafward wrote in a format that this one does not know; without a version it is the first."""
    version = record.get("version", 1)
    if not isinstance(version, int) or not 1 <= version <= newest:
        raise DataError(f"{what} has format version {version!r}; this leafward reads versions up to {newest}")


def check_ending(path: str | os.PathLike[str], allowed: Sequence[str]) -> None:
    """Refuse a file by its name."""
    if Path(path).suffix not in allowed:
        raise UsageError(f"{path}: expected a file that ends in {' or '.join(allowed)}")


def check_archive(path: str | os.PathLike[str]) -> None:
    """Refuse a zip archive (an .npz is one) that would unpack to much more than it is, before anything is unpacked."""
    size = check_size(path, LARGEST_UNPACKED)
    try:
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(member.file_size for member in archive.infolist())
    except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError) as error:
        raise DataError(f"cannot read {path}: not a valid archive ({error})") from error
    if unpacked > _most_unpacked(size):
        raise DataError(f"cannot read {path}: its {size:,} bytes would unpack to {unpacked:,}")


def _most_unpacked(size: int) -> int:
    """What a packed file of `size` bytes may unpack to."""
    return min(LARGEST_UNPACKED, max(64 << 20, MOST_PACKED * size))


def inside(folder: str | os.PathLike[str], name: str | os.PathLike[str]) -> Path:
    """`folder`/`name`, where neither the name nor a link leads out of the folder."""
    path = Path(folder) / name
    if not path.resolve().is_relative_to(Path(folder).resolve()):
        raise DataError(f"{path} leads out of the folder {folder}, which is not followed; copy the file into it")
    return path


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Replace `path` by `text` (UTF-8) in one step."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Replace `path` by `value` as indented JSON in one step; NaN and infinities are written as null."""
    write_text(path, json.dumps(finite(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def finite(value: Any) -> Any:
    """`value` with every non-finite float replaced by None, so that it is valid JSON; arrays become lists."""
    if isinstance(value, float):
        return value if value - value == 0.0 else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return finite(value.tolist()) if hasattr(value, "tolist") else value


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
