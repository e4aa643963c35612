"""Precomputed features in place of a model: named arrays in .npz, .safetensors or .npy files.

One vocabulary for all of them: `image_features` (N, d), `text_features` (C, d), `labels` (N), or for short `image`,
`text` and `label`, and the class names: an array `class_names` in an .npz, a JSON list of that name in the metadata of
a .safetensors. A .npy file of shape (2, N, d) is the pair of images and texts. `read_vectors` takes what an evaluation
asks for, as vectors of unit length; `leafward.data.fewshot.read_feature_set` a whole labelled set, with its norms.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from leafward.data.arrays import ARRAYS, ONLY, array_of, read_arrays, read_metadata
from leafward.errors import DataError, nearest

PAIR = ("image_features", "text_features")
SHORT = {"image": "image_features", "text": "text_features", "label": "labels"}
CLASSES = "class_names"


def read_vectors(path: str | Path, required: Sequence[str], optional: Sequence[str] = ()) -> dict[str, Tensor]:
    """The arrays of a file that an evaluation asks for, under the names that it asks by, short or full.

    Vectors (floating point) come back as float32 of unit length, (..., d); integers as they are. Unknown names,
    missing ones, vectors of different widths and values that are not finite are refused.
    """
    arrays = feature_arrays(path)
    arrays.pop(CLASSES, None)
    asked = {SHORT.get(name, name): name for name in (*required, *optional)}
    for name in arrays:
        if name not in asked:
            raise DataError(f"{path}: there is no use for the array {name!r}; {nearest(name, asked)}")
    for name in required:
        array_of(arrays, SHORT.get(name, name), path)
    found = {
        asked[name]: torch.from_numpy(array.astype(np.int64))
        if array.dtype.kind in "iu"
        else normalize(as_vectors(array, name, path), dim=-1)
        for name, array in arrays.items()
    }
    widths = {name: array.shape[-1] for name, array in found.items() if array.is_floating_point()}
    if len(set(widths.values())) > 1:
        raise DataError(f"{path}: all vectors must be of one width, got {widths}")
    return found


def feature_arrays(path: str | Path, endings: tuple[str, ...] = ARRAYS) -> dict[str, np.ndarray]:
    """The arrays of a feature file under their full names, the class names among them where it has any."""
    path = Path(path)
    arrays = read_arrays(path, endings)
    if path.suffix == ".npy":
        pair = arrays[ONLY]
        if pair.ndim != 3 or len(pair) != 2:
            raise DataError(f"{path} must be of shape (2, N, d), image and text, got {pair.shape}")
        return dict(zip(PAIR, pair, strict=True))
    for short, name in SHORT.items():
        if short in arrays and name in arrays:
            raise DataError(f"{path} holds both {name!r} and {short!r}, which is short for it")
    found = {SHORT.get(name, name): array for name, array in arrays.items()}
    metadata = read_metadata(path)
    if CLASSES in metadata and CLASSES not in found:
        try:
            found[CLASSES] = np.array(list(map(str, json.loads(metadata[CLASSES]))))
        except (ValueError, TypeError, RecursionError) as error:
            raise DataError(f"{path}: the metadata {CLASSES} must be a list in JSON: {error}") from error
    return found


def as_vectors(array: np.ndarray, name: str, path: str | Path) -> Tensor:
    """Vectors (..., d) in float32 with the lengths that they have; zero and non-finite ones are refused."""
    if array.dtype.kind != "f" or not array.ndim or not array.size:
        raise DataError(f"{path}: {name} must be numbers (…, d), got {array.dtype} {array.shape}")
    vectors = torch.from_numpy(array.astype(np.float32))
    lengths = vectors.norm(dim=-1)
    if not bool((lengths.isfinite() & (lengths > 0)).all()):
        raise DataError(f"{path}: {name} holds a vector that is zero or not finite")
    return vectors
