"""Hashes of files, to find damage: taken of checkpoints while they are written, and beside a published model in
`SHA256SUMS`, which `sha256sum -c` reads as well. They find accidents, not forgery: whoever can change a file can change
its hash. Imports no torch.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import zlib
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from leafward.errors import DataError
from leafward.files import finite, read_text, write_text

SUMS = "SHA256SUMS"
PIECE = 4 << 20
"""Bytes that are read at a time."""
FASTEST = "crc32"
"""Hash of checkpoints, which are written often: it finds every single damaged run of up to 32 bits, and misses one of
4.3 billion other damages. benchmarks/checkpoint_hash.py measures it beside others."""


class Hash(Protocol):
    def update(self, content: bytes | memoryview, /) -> None: ...

    def hexdigest(self) -> str: ...


class Crc32:
    """zlib's CRC-32 with the surface of a hash of hashlib."""

    def __init__(self) -> None:
        self.value = 0

    def update(self, content: bytes | memoryview) -> None:
        self.value = zlib.crc32(content, self.value)

    def hexdigest(self) -> str:
        return f"{self.value:08x}"


def new_hash(kind: str) -> Hash:
    """A hash by its name; those of hashlib and crc32."""
    if kind == "crc32":
        return Crc32()
    try:
        return hashlib.new(kind, usedforsecurity=False)
    except ValueError as error:
        raise DataError(f"unknown hash {kind!r}: this leafward or this Python does not know it") from error


class HashedFile(io.BufferedWriter):
    """A file to be written from its beginning to its end, whose content is hashed meanwhile by a thread of its own.

    `digest` is KIND:HEX once the file is closed.
    """

    def __init__(self, path: str | os.PathLike[str], kind: str = FASTEST):
        super().__init__(io.FileIO(path, "wb"))
        self.kind, self.digest = kind, ""
        self._hash = new_hash(kind)
        self._thread = ThreadPoolExecutor(1)
        self._parts: list[Future[None]] = []

    def write(self, content: Any, /) -> int:
        # What is not bytes may be changed by its owner while it is hashed.
        content = content if isinstance(content, bytes) else bytes(content)
        self._parts.append(self._thread.submit(self._hash.update, content))
        return super().write(content)

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._thread.shutdown()
        for part in self._parts:
            part.result()
        self.digest = f"{self.kind}:{self._hash.hexdigest()}"


def file_hash(path: str | os.PathLike[str], kind: str = FASTEST) -> str:
    """KIND:HEX of the content of a file."""
    found, piece = new_hash(kind), memoryview(bytearray(PIECE))
    try:
        with open(path, "rb", buffering=0) as file:
            while count := file.readinto(piece):
                found.update(piece[:count])
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    return f"{kind}:{found.hexdigest()}"


def record_hash(record: Mapping[str, Any]) -> str:
    """The hash of what a record says, however it is written as JSON."""
    same = json.loads(json.dumps(finite(dict(record))))
    found = new_hash(FASTEST)
    found.update(json.dumps(same, sort_keys=True, separators=(",", ":")).encode())
    return f"{FASTEST}:{found.hexdigest()}"


def first_damage(folder: Path, hashes: Mapping[str, str]) -> str | None:
    """What is wrong with the first of the files NAME -> KIND:HEX in `folder` that has changed; None: all are good."""

    def look(name: str) -> str | None:
        wanted = hashes[name]
        found = file_hash(folder / name, wanted.partition(":")[0])
        return None if found == wanted else f"{folder / name} is damaged: its hash is {found} and should be {wanted}"

    names = sorted(hashes)
    if len(names) < 2:
        return look(names[0]) if names else None
    with ThreadPoolExecutor(min(len(names), os.cpu_count() or 1, 8)) as threads:
        return next((wrong for wrong in threads.map(look, names) if wrong is not None), None)


def write_sums(folder: str | os.PathLike[str], pattern: str = "*") -> None:
    """Write `SHA256SUMS` in `folder`, of the files that lie in it and match `pattern`."""
    folder = Path(folder)
    names = sorted(file.name for file in folder.glob(pattern) if file.is_file() and file.name != SUMS)
    sums = {name: file_hash(folder / name, "sha256").partition(":")[2] for name in names}
    write_text(folder / SUMS, "".join(f"{found}  {name}\n" for name, found in sums.items()))


def check_sums(folder: str | os.PathLike[str]) -> None:
    """Refuse a folder in which a file of its `SHA256SUMS` is missing or has another content; without one, nothing."""
    folder = Path(folder)
    if not (folder / SUMS).is_file():
        return
    hashes: dict[str, str] = {}
    for number, line in enumerate(read_text(folder / SUMS, 1 << 20).splitlines(), 1):
        found, name = line[:64], line[66:]
        if line[64:66] not in ("  ", " *") or Path(name).name != name:
            raise DataError(f"{folder / SUMS}, line {number}: not a SHA-256 sum and the name of a file in this folder")
        if not (folder / name).is_file():
            raise DataError(f"{folder / name} is missing, and {SUMS} names it")
        hashes[name] = f"sha256:{found}"
    wrong = first_damage(folder, hashes)
    if wrong is not None:
        raise DataError(f"{wrong}; if it was changed on purpose, remove {folder / SUMS}")
