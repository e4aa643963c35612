"""Readers of files alone, with bytes changed at random: each reads on, or refuses the file by name.

Hundreds of files a second, where tests/fuzz/test_fuzz_mutations.py runs whole commands on a few.
"""

from __future__ import annotations

import io
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fuzz_files import npy, npz, safetensors, tensor

from leafward.adapters.io import read_config
from leafward.config import parse_yaml
from leafward.data.arrays import read_arrays
from leafward.data.image_files import read_image
from leafward.data.tables import read_names, read_table
from leafward.errors import LeafwardError
from leafward.files import read_record, read_text
from leafward.hierarchy import LorentzIndex, Taxonomy

MUTATIONS = 60
ROWS = np.arange(12, dtype=np.float32).reshape(3, 4)
TREE = {"animal": {"dog": {"poodle": {}, "corgi": None}, "cat": ["tabby", "manx"]}}
BYTES = [
    b"\0",
    b"\xff",
    b'"',
    b",",
    b"\n",
    b"{",
    b"]",
    b"-",
    b"9" * 20,
    b"null",
    b":",
    b"  ",
    b"\xed\xa0\x80",
    b"\x1b[",
]


def picture(kind: str) -> bytes:
    image = pytest.importorskip("PIL.Image").new("RGB", (6, 5), (200, 10, 10))
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def adapter(path: Path) -> Any:
    path.rename(path.with_name("adapter_config.json"))
    return read_config(path.parent)


ADAPTER = {
    "format": "leafward-adapter", "version": 1, "method": "low-rank", "base_model": {"name": "x"},
    "config": {"rank": 2, "alpha": 4.0},
}  # fmt: skip

READERS: dict[str, tuple[str, Callable[[], bytes], Callable[[Path], Any]]] = {
    "taxonomy, csv": ("t.csv", lambda: b"child,parent\nanimal,\ndog,animal\ncat,animal\npoodle,dog\n", Taxonomy.load),
    "taxonomy, json": ("t.json", lambda: json.dumps(TREE).encode(), Taxonomy.load),
    "taxonomy, text": ("t.txt", lambda: b"animal\n  dog\n    poodle\n    corgi\n  cat\n", Taxonomy.load),
    "table": ("p.csv", lambda: b"true,poodle,cat\npoodle,0.6,0.4\ncat,0.2,0.8\n", read_table),
    "names": ("n.json", lambda: b'["dog", "cat", "poodle"]', lambda path: read_names(path, "name")),
    "record": ("r.json", lambda: json.dumps({"a": [1, 2.5, None], "b": {"c": "é"}}).encode(), read_record),
    "settings": (
        "c.yaml",
        lambda: b"a: 1\nb:\n  c: [1, 2]\n  d: x\n",
        lambda path: parse_yaml(read_text(path), str(path)),
    ),
    "array": ("a.npy", lambda: npy(ROWS), read_arrays),
    "arrays": ("a.npz", lambda: npz(a=npy(ROWS), b=npy(ROWS)), read_arrays),
    "tensors": ("a.safetensors", lambda: safetensors({"a": tensor([3, 4])}, ROWS.tobytes()), read_arrays),
    "index": ("i.safetensors", lambda: safetensors({"a": tensor([3, 4])}, ROWS.tobytes()), LorentzIndex.load),
    "adapter": ("a.json", lambda: json.dumps(ADAPTER).encode(), adapter),
    "image, png": ("i.png", lambda: picture("PNG"), read_image),
    "image, jpeg": ("i.jpg", lambda: picture("JPEG"), read_image),
    "image, gif": ("i.gif", lambda: picture("GIF"), read_image),
    "image, bmp": ("i.bmp", lambda: picture("BMP"), read_image),
    "image, tiff": ("i.tif", lambda: picture("TIFF"), read_image),
    "image, webp": ("i.webp", lambda: picture("WEBP"), read_image),
}


def mutated(content: bytes, rng: np.random.Generator) -> bytes:
    """`content` with one to three places changed, taken out, put in or doubled, or its end cut off."""
    data = bytearray(content)
    for _ in range(rng.integers(1, 4)):
        at, some = int(rng.integers(0, max(1, len(data)))), BYTES[rng.integers(len(BYTES))]
        span = int(rng.integers(1, 20))
        kind = rng.integers(6)
        if kind == 0:
            data[at : at + 1] = some
        elif kind == 1:
            del data[at : at + span]
        elif kind == 2:
            data[at:at] = some
        elif kind == 3:
            data[at:at] = data[at : at + span]
        elif kind == 4:
            data[at : at + 1] = bytes([rng.integers(256)])
        else:
            del data[at:]
    return bytes(data)


def refusal(read: Callable[[Path], Any], path: Path) -> str | None:
    """What a reader says of a file that it does not take; any other exception goes on."""
    try:
        read(path)
    except LeafwardError as error:
        return str(error)
    return None


@pytest.mark.parametrize("case", READERS)
def test_a_changed_file_is_read_or_refused_by_name(case, tmp_path, counts):
    name, make, read = READERS[case]
    content, refused = make(), 0
    rng = np.random.default_rng(zlib.crc32(case.encode()))  # a seed for each that does not depend on the process
    for _ in range(MUTATIONS):
        path = tmp_path / name
        path.write_bytes(mutated(content, rng))
        error = refusal(read, path)
        if error is not None:
            assert name in error or tmp_path.name in error, error
            assert len(error) < 3000
            refused += 1
            counts()
    assert refused >= 5  # else the changes change nothing
