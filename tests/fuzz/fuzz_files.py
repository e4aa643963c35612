"""Bad files of the kinds that several commands read."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np


class Trap:
    """Unpickling it would make a file called hacked."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return Path.write_text, (Path("hacked"), "by a pickle")  # type: ignore[return-value]


TRAP = pickle.dumps(Trap())


def npy(array: np.ndarray, **options: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


def npy_header(shape: object, kind: str = "<f4", rest: bytes = b"") -> bytes:
    """A .npy whose header says what it likes."""
    text = f"{{'descr': {kind!r}, 'fortran_order': False, 'shape': {shape!r}, }}".encode()
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + rest


def npz(compressed: bool = False, **members: bytes) -> bytes:
    """An archive of members as they are given, .npy or not."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return file.getvalue()


def safetensors(header: object, data: bytes = b"", size: int | None = None) -> bytes:
    """A .safetensors with a header as it is given: text, or what becomes JSON; `size` is what the file says it has."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + data


def tensor(shape: list[int], kind: str = "F32", begin: int = 0, end: int | None = None) -> dict[str, Any]:
    width = {"F32": 4, "F64": 8, "I64": 8, "BF16": 2}.get(kind, 4)
    return {
        "dtype": kind,
        "shape": shape,
        "data_offsets": [begin, begin + width * int(np.prod(shape)) if end is None else end],
    }


OBJECTS = npy(np.array([Trap(), None], dtype=object), allow_pickle=True)
ZEROS = np.zeros((40_000, 1000), np.float32)

ARRAYS: dict[str, tuple[str, bytes]] = {
    "empty.npy": (".npy", b""),
    "text.npy": (".npy", b"not an array"),
    "pickle.npy": (".npy", TRAP),
    "objects.npy": (".npy", OBJECTS),
    "cut.npy": (".npy", npy(np.ones((8, 4), np.float32))[:-20]),
    "cut-header.npy": (".npy", npy(np.ones((8, 4), np.float32))[:30]),
    "lying-shape.npy": (".npy", npy_header((1 << 40, 1 << 20))),
    "negative-shape.npy": (".npy", npy_header((-1, 4), rest=b"\0" * 64)),
    "text-shape.npy": (".npy", npy_header("many")),
    "code-in-header.npy": (".npy", npy_header((2, 2)).replace(b"'shape'", b"__imp__")),
    "unknown-type.npy": (".npy", npy_header((2, 2), "<q9")),
    "future.npy": (".npy", b"\x93NUMPY\x09\x00" + b"\0" * 120),
    "empty.npz": (".npz", b""),
    "no-archive.npz": (".npz", b"PK\x03\x04 and then nothing"),
    "cut.npz": (".npz", npz(a=npy(np.ones((8, 4), np.float32)))[:-30]),
    "objects.npz": (".npz", npz(a=OBJECTS)),
    "text.npz": (".npz", npz(a=b"not an array")),
    "nothing-inside.npz": (".npz", npz()),
    "bomb.npz": (".npz", npz(compressed=True, a=npy(ZEROS))),
    "empty.safetensors": (".safetensors", b""),
    "short.safetensors": (".safetensors", b"\x01\x02"),
    "pickle.safetensors": (".safetensors", TRAP),
    "huge-header.safetensors": (".safetensors", safetensors(b"{}", size=1 << 62)),
    "header-past-end.safetensors": (".safetensors", safetensors(b"{}", size=500)),
    "header-no-json.safetensors": (".safetensors", safetensors(b"{not json}")),
    "header-list.safetensors": (".safetensors", safetensors([1, 2])),
    "header-latin.safetensors": (".safetensors", safetensors(b'{"caf\xe9": 1}')),
    "header-deep.safetensors": (".safetensors", safetensors(b"[" * 5000 + b"]" * 5000)),
    "no-data.safetensors": (".safetensors", safetensors({"a": tensor([8, 4])})),
    "cut-data.safetensors": (".safetensors", safetensors({"a": tensor([8, 4])}, b"\0" * 100)),
    "too-much-data.safetensors": (".safetensors", safetensors({"a": tensor([2, 2])}, b"\0" * 100)),
    "unknown-type.safetensors": (".safetensors", safetensors({"a": tensor([2, 2], "F99")}, b"\0" * 16)),
    "negative-shape.safetensors": (".safetensors", safetensors({"a": tensor([-2, 2], end=16)}, b"\0" * 16)),
    "overlap.safetensors": (".safetensors", safetensors({"a": tensor([2, 2]), "b": tensor([2, 2])}, b"\0" * 16)),
    "backwards.safetensors": (".safetensors", safetensors({"a": tensor([2, 2], begin=16, end=0)}, b"\0" * 16)),
    "overflow.safetensors": (".safetensors", safetensors({"a": tensor([1 << 40, 1 << 40], end=16)}, b"\0" * 16)),
}
"""Files that hold no array that may be read."""


def gzipped(content: bytes) -> bytes:
    return gzip.compress(content, mtime=0)
