"""Arrays as users hand them in: .npy, .npz and .safetensors files, whole or by slices of rows.

Nothing is unpickled, and sizes are looked at before anything is read. Slices open their file anew, so that no more than
one slice of a mapped file is ever resident.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from leafward.errors import DataError, nearest
from leafward.files import LARGEST_UNPACKED, check_archive, check_ending, check_size

ARRAYS = (".npy", ".npz", ".safetensors")
ONLY = "array"
"""What the one array of a .npy file is called."""
NPY_MAGIC = b"\x93NUMPY"


def read_arrays(path: str | Path, endings: tuple[str, ...] = ARRAYS) -> dict[str, np.ndarray]:
    """Every array of a file by name; types that numpy lacks (bfloat16) come as float32."""
    path = Path(path)
    check_ending(path, endings)
    if path.suffix == ".npy":
        return {ONLY: _native(open_npy(path))}
    with _opened(path) as file:
        if path.suffix == ".safetensors":
            return {name: _as_numpy(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        arrays = dict(file)
    for name, array in arrays.items():
        if isinstance(array, bytes):  # what is no array in an archive, numpy gives back so
            raise DataError(f"{path}: {name} is not an array")
    return arrays


def array_names(path: Path) -> list[str]:
    """The names of the arrays of a file, which are not read."""
    if path.suffix == ".npy":
        return [ONLY]
    with _opened(path) as file:
        return list(file.keys())


def read_metadata(path: Path) -> dict[str, str]:
    """The texts in the header of a .safetensors file; other files have none."""
    if path.suffix != ".safetensors":
        return {}
    with open_safetensors(path) as file:
        return file.metadata() or {}


def array_of(arrays: Mapping[str, np.ndarray], name: str, path: str | Path) -> np.ndarray:
    """One of the arrays of a file; of one that is not there, the error names the nearest."""
    if name not in arrays:
        raise DataError(f"{path}: holds no array {name!r}; {nearest(name, arrays, 'it holds')}")
    return arrays[name]


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
    return checked_matrix(array_of(found, array, path), f"{path}: {array}")


def checked_matrix(values: np.ndarray, what: str) -> np.ndarray:
    """`values` as a float32 matrix with at least one row and column, all finite."""
    if values.ndim != 2 or 0 in values.shape or values.dtype.kind not in "fiu":
        raise DataError(f"{what} must be a matrix of numbers, got {values.dtype} of shape {values.shape}")
    wrong = np.flatnonzero(~np.isfinite(values).all(axis=1))
    if wrong.size:
        raise DataError(f"{what}: {wrong.size} rows hold a number that is not finite, the first is row {wrong[0]}")
    return values.astype(np.float32)


@dataclass(frozen=True)
class RowReader:
    """A matrix that is read by rows: `read` returns rows [start, stop) in memory that the caller owns."""

    shape: tuple[int, int]
    dtype: str
    read: Callable[[int, int], Tensor]


def rows_of_tensor(matrix: Tensor) -> RowReader:
    rows, width = matrix.shape
    dtype = str(matrix.dtype).removeprefix("torch.")
    return RowReader((rows, width), dtype, lambda start, stop: matrix[start:stop].detach().clone())


def rows_of_npy(path: Path) -> RowReader:
    def read(start: int, stop: int) -> Tensor:
        return torch.from_numpy(_native(open_npy(path)[start:stop]))

    rows, width = (mapped := open_npy(path)).shape
    return RowReader((rows, width), mapped.dtype.name, read)


def rows_of_safetensors(path: Path, name: str) -> RowReader:
    def read(start: int, stop: int) -> Tensor:
        with open_safetensors(path) as file:
            return file.get_slice(name)[start:stop].clone()

    with open_safetensors(path) as file:
        part = file.get_slice(name)
        rows, width = part.get_shape()
        return RowReader((rows, width), part.get_dtype().lower(), read)


def open_npy(path: Path) -> np.ndarray:
    """The array of a .npy file, mapped: numpy compares the file's size with its header, and refuses objects."""
    with _naming(path), open(path, "rb") as file:
        if file.read(len(NPY_MAGIC)) != NPY_MAGIC:  # numpy would open a pickle or an archive by what it is
            raise DataError(f"{path} is not a .npy file (it may be a pickle): it does not begin as one")
        return np.load(path, mmap_mode="r", allow_pickle=False)


def open_safetensors(path: Path) -> Any:
    """`safe_open` for torch, which compares the file's size with its header; errors name the file."""
    with _naming(path):
        return safe_open(path, framework="pt")


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """An .npz or .safetensors file; what fails while it is read is told of it too."""
    with _naming(path):
        if path.suffix == ".npz":
            check_archive(path)
        with np.load(path, allow_pickle=False) if path.suffix == ".npz" else open_safetensors(path) as file:
            yield file


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Look at the size of a file, and name it in whatever goes wrong with it."""
    if not path.exists():
        raise DataError(f"no such file: {path}")
    check_size(path, LARGEST_UNPACKED)
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # a damaged file can raise nearly anything in these libraries
        raise DataError(f"{path} cannot be read as {path.suffix}: {error} (is it truncated or damaged?)") from error


def _native(array: np.ndarray) -> np.ndarray:
    """A copy in memory, in the byte order of this machine."""
    return np.array(array, dtype=array.dtype.newbyteorder("="), order="C")


def _as_numpy(tensor: Tensor) -> np.ndarray:
    known = not tensor.is_floating_point() or tensor.dtype in (torch.float16, torch.float32, torch.float64)
    return (tensor if known else tensor.float()).numpy()
