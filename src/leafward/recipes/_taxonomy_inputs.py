"""What a user hands in: taxonomies, matrices, columns of names, folders of embeddings. Every error names the file."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import NamedTuple

import numpy as np

from leafward.errors import DataError, UsageError, nearest
from leafward.files import check_arrays, read_json, read_text, whole_arrays
from leafward.hierarchy import Taxonomy

WORDNET = "wordnet"
ARRAYS = (".npy", ".npz", ".safetensors")
TEXTS = (".txt", ".json", ".csv")


@contextmanager
def named(source: str | Path) -> Iterator[None]:
    """Wrong values that came out of a file are the file's fault; say which."""
    try:
        yield
    except UsageError as error:
        raise DataError(f"{source}: {error}") from error


def read_taxonomy(source: str | Path, root: str | None = None) -> Taxonomy:
    """A .csv, .json or .txt file, ``wordnet`` (its nouns) or ``wordnet:NODE`` (the nouns under that node)."""
    name, colon, node = str(source).partition(":")
    if name == WORDNET and not Path(source).exists():
        whole = Taxonomy.from_wordnet()
        if not colon:
            return whole
        with named(source):
            return whole.subtree(node)
    return Taxonomy.load(source, root)


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Every array of a .npy (called "array"), .npz or .safetensors file; nothing is unpickled."""
    _check_ending(path, ARRAYS)
    try:
        check_arrays(path)
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            # by way of torch, which knows bfloat16
            return {
                name: (tensor.float() if tensor.is_floating_point() else tensor).numpy()
                for name, tensor in load_file(path).items()
            }
        loaded = np.load(path, allow_pickle=False)
        return {"array": loaded} if isinstance(loaded, np.ndarray) else whole_arrays(loaded)
    except Exception as error:  # a damaged file can raise nearly anything in these libraries
        raise DataError(f"{path}: cannot be read as {path.suffix}: {error}") from error


def read_matrix(path: Path, array: str | None = None, vector: bool = False) -> np.ndarray:
    """The matrix of a file: (N, n), float32 and finite; `array` chooses where there are several.

    vector: a file that holds one vector (n) in place of a matrix is a matrix of one row.
    """
    found = read_arrays(path)
    if vector and len(found) == 1:
        found = {name: values[None] if values.ndim == 1 else values for name, values in found.items()}
    if array is None:
        matrices = [name for name, values in found.items() if values.ndim == 2]
        if len(matrices) != 1:
            shapes = ", ".join(f"{name} {values.shape}" for name, values in found.items()) or "nothing"
            raise DataError(f"{path}: expected one matrix, found {shapes}; say which array to take")
        array = matrices[0]
    if array not in found:
        raise DataError(f"{path}: holds no array {array!r}; {nearest(array, found)}")
    return checked_matrix(found[array], f"{path}: {array}")


def checked_matrix(values: np.ndarray, what: str) -> np.ndarray:
    """`values` as a float32 matrix with at least one row and column, all finite."""
    if values.ndim != 2 or 0 in values.shape or values.dtype.kind not in "fiu":
        raise DataError(f"{what} must be a matrix of numbers, got {values.dtype} of shape {values.shape}")
    wrong = np.flatnonzero(~np.isfinite(values).all(axis=1))
    if wrong.size:
        raise DataError(f"{what}: {wrong.size} rows hold a number that is not finite, the first is row {wrong[0]}")
    return values.astype(np.float32)


def read_table(path: Path) -> dict[str, list[str]]:
    """The columns of a CSV file with a header."""
    try:
        rows = [row for row in csv.reader(StringIO(read_text(path), newline="")) if row]
    except csv.Error as error:
        raise DataError(f"{path}: not a CSV file: {error}") from error
    if len(rows) < 2:
        raise DataError(f"{path}: expected a header and at least one row, got {len(rows)} lines")
    header = [name.strip() for name in rows[0]]
    for name in header:
        if header.count(name) > 1:
            raise DataError(f"{path}: the column {name!r} stands {header.count(name)} times in the header")
    for number, row in enumerate(rows[1:], start=2):
        if len(row) != len(header):
            raise DataError(f"{path}: row {number} has {len(row)} fields for {len(header)} columns")
    return {name: [row[i].strip() for row in rows[1:]] for i, name in enumerate(header)}


def read_names(path: Path, column: str) -> list[str]:
    """Names, one for each row: lines of a .txt, a list in a .json, or the column of a .csv."""
    _check_ending(path, TEXTS)
    if path.suffix == ".csv":
        table = read_table(path)
        if column not in table:
            raise DataError(f"{path}: has no column {column!r}; {nearest(column, table)}")
        return table[column]
    names = read_json(path) if path.suffix == ".json" else [line.strip() for line in read_text(path).splitlines()]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DataError(f"{path}: expected a list of names")
    return names


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
        vector = read_arrays(file)["array"]
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


def _check_ending(path: Path, allowed: tuple[str, ...]) -> None:
    if path.suffix not in allowed:
        raise UsageError(f"{path}: expected a file that ends in {', '.join(allowed)}")
    if not path.is_file():
        raise DataError(f"no such file: {path}")
