"""What a run reads: told apart by fingerprints, and small files kept beside what was made of them. Imports no torch.

The first rank notes every file and folder that the settings name in `inputs.json`, with a fingerprint, and copies small
files to `inputs/`. A run that goes on compares: other data under the same name would make a model of neither.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from leafward.errors import DataError, UsageError
from leafward.files import read_record, replacing, write_json

RECORD, COPIES = "inputs.json", "inputs"
WRITTEN = (RECORD, COPIES)
SMALL = 1 << 20
"""Bytes of the largest file that is copied into the run directory."""
BLOCK, BLOCKS = 1 << 16, 64
"""Bytes of a block of a file, and how many are read of one that has more of them."""
MOST_FILES = 4096
"""Files of a folder whose content is read; of more of them so many, evenly spaced by name."""


def fingerprint(path: str | Path) -> str:
    """A hash by which a file or folder is known again, made from at most some 16 GB whatever its size.

    Of a file: its size and its bytes; of one over 4 MB its size and 64 blocks of 64 KB, the first, the last and others
    evenly between. Of a folder: the names, below it, and sizes of all files, and the bytes of 4,096 of them in the
    same way; hidden ones do not count. Times do not count, so a copy has the fingerprint of what it was made from.
    Blind to a change that leaves every size as it was and lies between the blocks of a large file, or in a file that
    is not read.
    """
    path = Path(path)
    known = hashlib.blake2b(digest_size=16)
    try:
        files = sorted(_files(path)) if path.is_dir() else [("", path)]
        step = max(1, -(-len(files) // MOST_FILES))
        for place, (name, file) in enumerate(files):
            size = file.stat().st_size
            known.update(f"{name}\0{size}\0".encode("utf-8", "surrogateescape"))
            for block in _blocks(file, size) if place % step == 0 else ():
                known.update(block)
    except OSError as error:
        raise DataError(f"cannot read {error.filename or path}: {error.strerror or error}") from error
    return known.hexdigest()


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Name below `folder` -> file, through links, but for hidden ones; a folder that links to one above it is left."""
    seen: set[str] = set()
    for place, folders, names in os.walk(folder, followlinks=True):
        if (real := os.path.realpath(place)) in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in names:
            file = Path(place, name)
            if not name.startswith(".") and file.is_file():
                yield file.relative_to(folder).as_posix(), file


def _blocks(file: Path, size: int) -> Iterator[bytes]:
    with open(file, "rb") as opened:
        if size <= BLOCK * BLOCKS:
            yield opened.read()
            return
        for number in range(BLOCKS):
            opened.seek((size - BLOCK) * number // (BLOCKS - 1))
            yield opened.read(BLOCK)


def compare(run: Path, inputs: Mapping[str, Path]) -> None:
    """Refuse to go on in `run` with other data than it was started with. What it has no note of is not compared."""
    known = _noted(run)
    for name, path in inputs.items():
        if name in known and (now := fingerprint(path)) != known[name]["fingerprint"]:
            raise UsageError(
                f"{name}: {path} has changed since {run} was started: its fingerprint was {known[name]['fingerprint']} "
                f"and is {now}; to go on with it all the same add --data-changed, or start again (--overwrite)"
            )


def note(run: Path, inputs: Mapping[str, Path], changed: bool = False) -> None:
    """Write down what `run` reads, with copies of small files. Earlier notes stay, unless the data have `changed`."""
    known = {} if changed else _noted(run)
    new = {name: _entry(run, name, path) for name, path in inputs.items() if name not in known}
    if new:
        write_json(run / RECORD, known | new)


def _entry(run: Path, name: str, path: Path) -> dict[str, Any]:
    entry: dict[str, Any] = {"path": str(path), "fingerprint": fingerprint(path)}
    if path.is_file() and path.stat().st_size <= SMALL:
        entry["copy"] = f"{COPIES}/{name}{''.join(path.suffixes)}"
        with replacing(run / entry["copy"]) as temporary:
            shutil.copyfile(path, temporary)
    return entry


def kept(run: Path) -> dict[str, Path]:
    """Name of a setting -> the copy of the file that it names, for those whose file is no longer in its place."""
    noted = _noted(run).items()
    copies = {name: run / each["copy"] for name, each in noted if "copy" in each and not os.path.exists(each["path"])}
    return {name: copy for name, copy in copies.items() if copy.is_file()}


def _noted(run: Path) -> dict[str, Any]:
    return read_record(run / RECORD) if (run / RECORD).is_file() else {}
