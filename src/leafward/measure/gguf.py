"""GGUF files (llama.cpp): header, vocabulary, and rows dequantised as they are read.

A file is: magic, version, counts, key-value pairs, tensor descriptions, padding, data. Quantised rows are sequences of
blocks of 32 or 256 numbers, each with its own scales; the layouts are those of ggml's documentation.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from leafward.data.arrays import RowReader
from leafward.errors import DataError
from leafward.files import check_size
from leafward.measure.targets import Entry, Found, entry_of

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT, ARRAY = 8, 9
LARGEST = 1 << 40
MOST_ITEMS = 1 << 24  # of a list or a text in the header
EMBEDDING, OUTPUT = "token_embd.weight", "output.weight"


@dataclass(frozen=True)
class Kind:
    """A type of stored numbers: name, numbers and bytes of a block, and (rows, blocks, bytes) -> numbers."""

    name: str
    size: int
    bytes: int
    unpack: Callable[[np.ndarray], np.ndarray]


def open_gguf(path: Path) -> Found:
    """The matrices of a GGUF file, its token names, and its output matrix."""
    size = check_size(path, LARGEST)
    with open(path, "rb") as file:
        try:
            values, tensors, start = _header(_Reader(file, path, size))
        except (struct.error, OverflowError, MemoryError, UnicodeDecodeError) as error:
            raise DataError(f"{path} cannot be read as GGUF: {error} (is it truncated or damaged?)") from error
    entries: dict[str, Entry] = {}
    skipped: set[str] = set()
    for name, shape, kind, offset in tensors:
        if kind not in KINDS:
            skipped.add(f"type {kind}")
            continue
        found = entry_of(name, shape, KINDS[kind].name, _opener(path, name, shape, KINDS[kind], start + offset, size))
        if found is not None and len(shape) == 2:
            entries[name] = replace(found, notes=(f"dequantised from {KINDS[kind].name}",) if kind > 1 else ())
    notes = (f"tensors of {', '.join(sorted(skipped))} are not read",) if skipped else ()
    tokens = values.get("tokenizer.ggml.tokens")
    architecture = str(values.get("general.architecture", "?"))
    return Found(
        str(path),
        f"GGUF, {architecture}",
        entries,
        notes=notes,
        head=next((name for name in (OUTPUT, EMBEDDING) if name in entries), None),
        tokens=lambda: tokens if isinstance(tokens, list) else None,
    )


class _Reader:
    """Numbers and texts of the header, one after the other; never beyond the end of the file."""

    def __init__(self, file: Any, path: Path, size: int) -> None:
        self.file, self.path, self.size = file, path, size

    def number(self, code: str) -> Any:
        width = struct.calcsize("<" + code)
        return struct.unpack("<" + code, self.file.read(width))[0]

    def count(self) -> int:
        found = self.number("Q")
        if found > MOST_ITEMS:
            raise DataError(f"{self.path} is damaged: its header names {found:,} items at once")
        return found

    def text(self) -> str:
        return self.file.read(self.count()).decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == TEXT:
            return self.text()
        if kind == ARRAY:
            inner = self.number("I")
            return [self.value(inner) for _ in range(self.count())]
        if kind not in SCALARS:
            raise DataError(f"{self.path} is damaged: a value of unknown type {kind} in its header")
        return self.number(SCALARS[kind])


def _header(reader: _Reader) -> tuple[dict[str, Any], list[tuple[str, tuple[int, ...], int, int]], int]:
    """Key-value pairs, (name, shape, type, offset) of each tensor, and where the data begin."""
    if reader.file.read(4) != b"GGUF":
        raise DataError(f"{reader.path} is not a GGUF file: it does not begin as one")
    version = reader.number("I")
    if version not in (2, 3):
        raise DataError(f"{reader.path} is GGUF version {version}; 2 and 3 are read")
    tensors, pairs = reader.count(), reader.count()
    values = {}
    for _ in range(pairs):
        key = reader.text()
        values[key] = reader.value(reader.number("I"))
    found = []
    for _ in range(tensors):
        name = reader.text()
        dimensions = reader.number("I")
        if dimensions > 4:
            raise DataError(f"{reader.path} is damaged: {name} has {dimensions} dimensions")
        shape = tuple(reader.number("Q") for _ in range(dimensions))[::-1]  # stored fastest first
        found.append((name, shape, reader.number("I"), reader.number("Q")))
    step = int(values.get("general.alignment", 32))
    return values, found, -(-reader.file.tell() // step) * step


def _opener(
    path: Path, name: str, shape: tuple[int, ...], kind: Kind, start: int, size: int
) -> Callable[[], RowReader]:
    def reader() -> RowReader:
        rows, width = shape[0], shape[-1]
        if width % kind.size:
            raise DataError(f"{path}: {name} is {width} wide, which {kind.name} cannot hold in blocks of {kind.size}")
        stride = width // kind.size * kind.bytes
        if start + rows * stride > size:
            raise DataError(f"{path} is truncated: {name} ends beyond it")

        def read(first: int, last: int) -> torch.Tensor:
            held = np.memmap(
                path, dtype=np.uint8, mode="r", offset=start + first * stride, shape=((last - first) * stride,)
            )
            blocks = np.array(held).reshape(last - first, width // kind.size, kind.bytes)
            return torch.from_numpy(np.ascontiguousarray(kind.unpack(blocks).reshape(last - first, width)))

        return RowReader((rows, width), kind.name, read)

    return reader


def _half(raw: np.ndarray) -> np.ndarray:
    """float16 numbers (…, 2k bytes) -> (…, k) float32."""
    return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)


def _nibbles(raw: np.ndarray) -> np.ndarray:
    """(…, k) bytes -> (…, 2k): all low halves, then all high ones."""
    return np.concatenate([raw & 15, raw >> 4], axis=-1)


def _floats(dtype: Any) -> Callable[[np.ndarray], np.ndarray]:
    return lambda raw: np.ascontiguousarray(raw).view(dtype).astype(np.float32)


def _bfloat(raw: np.ndarray) -> np.ndarray:
    return (np.ascontiguousarray(raw).view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _q4_0(raw: np.ndarray) -> np.ndarray:
    return _half(raw[..., :2]) * (_nibbles(raw[..., 2:]).astype(np.float32) - 8)


def _q4_1(raw: np.ndarray) -> np.ndarray:
    return _half(raw[..., :2]) * _nibbles(raw[..., 4:]) + _half(raw[..., 2:4])


def _fifth_bits(raw: np.ndarray) -> np.ndarray:
    """The fifth bits (…, 32), as 0 or 16, of 4 bytes."""
    return np.unpackbits(raw, axis=-1, bitorder="little").astype(np.uint8) << 4


def _q5_0(raw: np.ndarray) -> np.ndarray:
    return _half(raw[..., :2]) * ((_nibbles(raw[..., 6:]) | _fifth_bits(raw[..., 2:6])).astype(np.float32) - 16)


def _q5_1(raw: np.ndarray) -> np.ndarray:
    return _half(raw[..., :2]) * (_nibbles(raw[..., 8:]) | _fifth_bits(raw[..., 4:8])) + _half(raw[..., 2:4])


def _q8_0(raw: np.ndarray) -> np.ndarray:
    return _half(raw[..., :2]) * raw[..., 2:].view(np.int8).astype(np.float32)


def _scales_of_eight(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eight 6-bit scales and eight 6-bit minima (…, 8) out of 12 bytes."""
    low, middle, high = raw[..., :4], raw[..., 4:8], raw[..., 8:]
    scale = np.concatenate([low & 63, (high & 15) | (low >> 6) << 4], axis=-1)
    least = np.concatenate([middle & 63, (high >> 4) | (middle >> 6) << 4], axis=-1)
    return scale.astype(np.float32), least.astype(np.float32)


def _eights(raw: np.ndarray) -> np.ndarray:
    """128 bytes -> (…, 8, 32): of each 32 bytes the low halves, then the high ones."""
    parts = raw.reshape(*raw.shape[:-1], 4, 1, 32)
    return np.concatenate([parts & 15, parts >> 4], axis=-2).reshape(*raw.shape[:-1], 8, 32)


def _q4_k(raw: np.ndarray) -> np.ndarray:
    scale, least = _scales_of_eight(raw[..., 4:16])
    scale, least = scale * _half(raw[..., :2]), least * _half(raw[..., 2:4])
    return _flat(scale[..., None] * _eights(raw[..., 16:]) - least[..., None])


def _q5_k(raw: np.ndarray) -> np.ndarray:
    scale, least = _scales_of_eight(raw[..., 4:16])
    scale, least = scale * _half(raw[..., :2]), least * _half(raw[..., 2:4])
    bits = (raw[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    return _flat(scale[..., None] * (_eights(raw[..., 48:]) | bits << 4) - least[..., None])


def _q6_k(raw: np.ndarray) -> np.ndarray:
    """Two halves of 128 numbers: 64 bytes of low four bits, 32 bytes of high two bits; 16 scales of 16 numbers."""
    low = raw[..., :128].reshape(*raw.shape[:-1], 2, 2, 32)
    low = np.concatenate([low & 15, low >> 4], axis=-2)
    high = raw[..., 128:192].reshape(*raw.shape[:-1], 2, 1, 32) >> np.array([0, 2, 4, 6], dtype=np.uint8)[:, None] & 3
    values = (low | high << 4).astype(np.float32) - 32
    scale = raw[..., 192:208].view(np.int8).astype(np.float32) * _half(raw[..., 208:210])
    return values.reshape(*raw.shape[:-1], 256) * np.repeat(scale, 16, axis=-1)


def _flat(values: np.ndarray) -> np.ndarray:
    return values.reshape(*values.shape[:-2], -1)


KINDS = {
    0: Kind("f32", 1, 4, _floats(np.float32)),
    1: Kind("f16", 1, 2, _floats(np.float16)),
    2: Kind("q4_0", 32, 18, _q4_0),
    3: Kind("q4_1", 32, 20, _q4_1),
    6: Kind("q5_0", 32, 22, _q5_0),
    7: Kind("q5_1", 32, 24, _q5_1),
    8: Kind("q8_0", 32, 34, _q8_0),
    12: Kind("q4_k", 256, 144, _q4_k),
    13: Kind("q5_k", 256, 176, _q5_k),
    14: Kind("q6_k", 256, 210, _q6_k),
    28: Kind("f64", 1, 8, _floats(np.float64)),
    30: Kind("bf16", 1, 2, _bfloat),
}
