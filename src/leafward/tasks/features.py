"""Precomputed features in place of a model: named arrays in .safetensors or .npz, or image–text pairs in .npy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from leafward.errors import DataError, UsageError, nearest


def read_features(path: str | Path, required: Sequence[str], optional: Sequence[str] = ()) -> dict[str, Tensor]:
    """The arrays of a file by name. A .npy file of shape (2, N, d) is the pair (image, text).

    Vectors (floating point) come back as float32 of unit length, (..., d); integers as they are. Unknown names,
    missing ones and values that are not finite are refused.
    """
    arrays = _load(Path(path))
    allowed = [*required, *optional]
    for name in arrays:
        if name not in allowed:
            raise DataError(f"{path}: there is no use for the array {name!r}; {nearest(name, allowed)}")
    for name in required:
        if name not in arrays:
            raise DataError(f"{path} lacks the array {name!r}; it holds {', '.join(arrays) or 'nothing'}")
    return {name: _vectors(array, name, path) for name, array in arrays.items()}


def _load(path: Path) -> dict[str, np.ndarray]:
    try:
        if path.suffix == ".safetensors":
            from safetensors import safe_open

            with safe_open(path, framework="numpy") as file:
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a mapping)
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as file:
                return dict(file)
        if path.suffix == ".npy":
            pair = np.load(path, allow_pickle=False)
            if pair.ndim != 3 or len(pair) != 2:
                raise DataError(f"{path} must be of shape (2, N, d), image and text, got {pair.shape}")
            return {"image": pair[0], "text": pair[1]}
    except DataError:
        raise
    except Exception as error:  # each of the three readers has its own
        raise DataError(f"cannot read the features {path}: {error}") from error
    raise UsageError(f"the name of {path} must end in .safetensors, .npz or .npy")


def _vectors(array: np.ndarray, name: str, path: str | Path) -> Tensor:
    if array.dtype.kind in "iu":
        return torch.from_numpy(array.astype(np.int64))
    if array.dtype.kind != "f" or array.ndim < 1:
        raise DataError(f"{path}: the array {name!r} must hold vectors or integers, got {array.dtype} {array.shape}")
    vectors = torch.from_numpy(array.astype(np.float32))
    lengths = vectors.norm(dim=-1)
    if not bool(torch.isfinite(lengths).all()) or bool((lengths == 0).any()):
        raise DataError(f"{path}: the array {name!r} holds a vector that is zero or not finite")
    return normalize(vectors, dim=-1)
