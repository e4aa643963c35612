"""Vectors with their names and labels: a file, or a folder of embeddings. Every error names the file."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from leafward.data.arrays import ARRAYS, ONLY, checked_matrix, read_arrays, read_matrix
from leafward.data.tables import TEXTS, read_names
from leafward.errors import DataError
from leafward.files import check_name


class Items(NamedTuple):
    """Vectors (N, n) with the name of each and, where it is known, the node that each belongs to."""

    vectors: np.ndarray
    names: list[str]
    labels: list[str] | None


def read_items(path: Path, labels: Path | None = None, array: str | None = None, vector: bool = False) -> Items:
    """Embeddings with their names and labels; vector: a file may also hold a single one, (n).

    A file holds one matrix; its rows are called by their number. A folder holds ``embeddings`` (.npy, .npz or
    .safetensors) and, if it likes, ``names`` and ``labels`` (.txt, .json or .csv); or else one folder for each label,
    with a .npy file for each item.
    """
    if not path.exists():
        raise DataError(f"no such file or folder: {path}")
    given = None if labels is None else read_names(labels, "label")
    if path.is_file():
        vectors = read_matrix(path, array, vector)
        found = Items(vectors, [str(row) for row in range(len(vectors))], given)
    elif (file := _only(path, "embeddings", ARRAYS)) is not None:
        vectors = read_matrix(file, array)
        names, own = _only(path, "names", TEXTS), _only(path, "labels", TEXTS)
        if own is not None and given is None:
            given = read_names(own, "label")
        called = [str(row) for row in range(len(vectors))] if names is None else read_names(names, "name")
        found = Items(vectors, called, given)
    else:
        found = _read_folders(path)
        found = found if given is None else found._replace(labels=given)
    for what, values in (("names", found.names), ("labels", found.labels)):
        if values is not None and len(values) != len(found.vectors):
            raise DataError(f"{labels or path}: {len(values)} {what} for {len(found.vectors)} vectors of {path}")
    return found


def _read_folders(path: Path) -> Items:
    """path/LABEL/ITEM.npy, each one vector (n)."""
    files = sorted(path.glob("*/*.npy"))
    if not files:
        raise DataError(
            f"{path}: holds neither embeddings{'|'.join(ARRAYS)} nor folders LABEL/ with a .npy file for each item"
        )
    vectors = []
    for file in files:
        check_name(file)
        vector = read_arrays(file)[ONLY]
        if vector.ndim != 1 or len(vector) != len(vectors[0] if vectors else vector):
            expected = "one vector (n)" if not vectors else f"one vector ({len(vectors[0])},) as in {files[0]}"
            raise DataError(f"{file}: expected {expected}, got shape {vector.shape}")
        vectors.append(vector)
    names = [f"{file.parent.name}/{file.stem}" for file in files]
    return Items(checked_matrix(np.stack(vectors), str(path)), names, [file.parent.name for file in files])


def _only(folder: Path, stem: str, endings: tuple[str, ...]) -> Path | None:
    """The file of that name in a folder, whatever its ending; two are refused."""
    found = [folder / f"{stem}{ending}" for ending in endings if (folder / f"{stem}{ending}").is_file()]
    if len(found) > 1:
        raise DataError(f"{folder}: holds {' and '.join(file.name for file in found)}; keep one of them")
    return found[0] if found else None
