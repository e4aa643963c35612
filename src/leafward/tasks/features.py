"""Precomputed features in place of a model: named arrays in .safetensors or .npz, or image–text pairs in .npy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from leafward.errors import DataError, UsageError, nearest
from leafward.files import check_arrays, whole_arrays

ENDINGS = (".safetensors", ".npz", ".npy")


def read_features(path: str | Path, required: Sequence[str], optional: Sequence[str] = ()) -> dict[str, Tensor]:
    """The arrays of a file by name. A .npy file of shape (2, N, d) is the pair (image, text).

    Vectors (floating point) come back as float32 of unit length, (..., d); integers as they are. Unknown names,
    missing ones, vectors of different widths and values that are not finite are refused.
    """
    arrays, _ = load_arrays(path)
    allowed = [*required, *optional]
    for name in arrays:
        if name not in allowed:
            raise DataError(f"{path}: there is no use for the array {name!r}; {nearest(name, allowed)}")
    need_arrays(arrays, required, path)
    found = {
        name: torch.from_numpy(array.astype(np.int64))
        if array.dtype.kind in "iu"
        else normalize(as_vectors(array, name, path), dim=-1)
        for name, array in arrays.items()
    }
    widths = {name: array.shape[-1] for name, array in found.items() if array.is_floating_point()}
    if len(set(widths.values())) > 1:
        raise DataError(f"{path}: all vectors must be of one width, got {widths}")
    return found


def load_arrays(path: str | Path, endings: Sequence[str] = ENDINGS) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The arrays of a file by name, and the metadata of a .safetensors file; nothing is unpickled."""
    path = Path(path)
    check_ending(path, endings)
    try:
        check_arrays(path)
        if path.suffix == ".safetensors":
            from safetensors import safe_open

            with safe_open(path, framework="numpy") as file:
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a mapping)
                return arrays, file.metadata() or {}
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as file:
                return whole_arrays(file), {}
        pair = np.load(path, allow_pickle=False)
    except Exception as error:  # each of the three readers has its own
        raise DataError(f"cannot read the features {path}: {error}") from error
    if pair.ndim != 3 or len(pair) != 2:
        raise DataError(f"{path} must be of shape (2, N, d), image and text, got {pair.shape}")
    return {"image": pair[0], "text": pair[1]}, {}


def check_ending(path: Path, endings: Sequence[str]) -> None:
    """Refuse a feature file by its name."""
    if path.suffix not in endings:
        raise UsageError(f"the name of a feature file must end in {' or '.join(endings)}, got {path.name!r}")


def need_arrays(arrays: dict[str, np.ndarray], required: Sequence[str], path: str | Path) -> None:
    """Refuse a file that lacks one of the arrays."""
    for name in required:
        if name not in arrays:
            raise DataError(f"{path} lacks the array {name!r}; it holds {', '.join(sorted(arrays)) or 'nothing'}")


def as_vectors(array: np.ndarray, name: str, path: str | Path) -> Tensor:
    """Vectors (..., d) in float32 with the lengths that they have; zero and non-finite ones are refused."""
    if array.dtype.kind != "f" or not array.ndim or not array.size:
        raise DataError(f"{path}: {name} must be numbers (…, d), got {array.dtype} {array.shape}")
    vectors = torch.from_numpy(array.astype(np.float32))
    lengths = vectors.norm(dim=-1)
    if not bool((lengths.isfinite() & (lengths > 0)).all()):
        raise DataError(f"{path}: {name} holds a vector that is zero or not finite")
    return vectors
