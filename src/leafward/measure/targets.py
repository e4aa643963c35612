"""Everything that an audit can be pointed at, as a table of matrices by name that are opened only when they are read.

    found = open_target("HuggingFaceTB/SmolLM2-135M@main")
    found.entries["model.embed_tokens.weight"].open()      # a RowReader

Hub names and their cache, Hugging Face folders, safetensors, pickled weights (tensors alone are unpickled), fp8 with
scales, GGUF, PEFT adapters (the product BA·s of each layer), timm and open_clip models, feature files, .npy and .npz,
our own runs, and folders of sparse autoencoders.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from leafward.data import arrays
from leafward.data.arrays import RowReader
from leafward.errors import DataError, UsageError, nearest
from leafward.measure.matrix_files import PICKLES, from_array, from_npy

SHAPES = "the audit takes floating-point tensors with at least two rows and two columns"


@dataclass(frozen=True)
class Entry:
    """One matrix (n, m) of a target; `rows` ≤ n leaves padding out. `curvature` c: its rows are Lorentz points."""

    name: str
    shape: tuple[int, int]
    dtype: str
    open: Callable[[], RowReader] = field(repr=False, compare=False)
    rows: int | None = None
    curvature: float | None = None
    role: str = ""
    notes: tuple[str, ...] = ()

    @property
    def used(self) -> int:
        return self.shape[0] if self.rows is None else self.rows


@dataclass(frozen=True, eq=False)
class Found:
    """The matrices of a target. `tokens()` names the rows of its embedding; `head` is its output matrix."""

    label: str
    kind: str
    entries: Mapping[str, Entry]
    notes: tuple[str, ...] = ()
    folder: Path | None = None
    head: str | None = None
    tokens: Callable[[], Sequence[str] | None] = lambda: None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def chosen(self, tensor: str | None) -> dict[str, Entry]:
        """All matrices, or the one of this name; a refusal where there is none."""
        if tensor is not None:
            if tensor not in self.entries:
                raise UsageError(f"--tensor: {self.label} holds no {tensor!r}; {nearest(tensor, self.entries)}")
            return {tensor: self.entries[tensor]}
        if not self.entries:
            raise DataError(f"{self.label} holds no matrix: {SHAPES}")
        return dict(self.entries)


def entry_of(name: str, shape: Sequence[int], dtype: str, reader: Callable[[], RowReader], **more: Any) -> Entry | None:
    """An entry for a tensor of any shape, as a matrix; None for what has fewer than two rows or columns.

    A convolution (out, in, …) is (out, in·…); stacked experts (experts, n, m) are (experts·n, m).
    """
    matrix = as_matrix(name, shape)
    if matrix is None or min(matrix) < 2:
        return None
    return Entry(name, matrix, dtype, reader, **more)


def as_matrix(name: str, shape: Sequence[int]) -> tuple[int, int] | None:
    """The matrix that a tensor of this shape is read as."""
    if len(shape) < 2:
        return None
    if len(shape) == 3 and "experts" in name:
        return shape[0] * shape[1], shape[2]
    return shape[0], int(np.prod(shape[1:]))


def of_state(state: Mapping[str, Any], label: str, kind: str, **more: Any) -> Found:
    """Tensors that are in memory: of a zoo model or of pickled weights."""
    entries = {}
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point() or tensor.is_meta:
            continue
        found = entry_of(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), _held(name, tensor))
        if found is not None:
            entries[name] = found
    return Found(label, kind, entries, **more)


def _held(name: str, tensor: torch.Tensor) -> Callable[[], RowReader]:
    shape = as_matrix(name, tuple(tensor.shape)) or (1, 1)  # of what is no matrix no entry is made
    return lambda: arrays.rows_of_tensor(tensor.reshape(shape))


Target = str | os.PathLike[str] | torch.Tensor | np.ndarray


def open_target(target: Target) -> Found:
    """The matrices that `target` names; nothing of them is read yet."""
    if isinstance(target, torch.Tensor | np.ndarray):
        return _single(from_array(target).source, "array", "array")
    if not isinstance(target, str | os.PathLike):
        raise UsageError(f"target must be a path, a hub or zoo name, a tensor or an array, not {type(target).__name__}")
    text = os.fspath(target)
    zoo, colon, name = text.partition(":")
    from leafward.measure.matrix_zoo import ZOOS, zoo_state

    if colon and zoo in ZOOS:
        found = zoo_state(zoo, name)
        return of_state(found, text, f"{zoo} model") if isinstance(found, dict) else replace(_file(found), label=text)
    path = Path(text).expanduser()
    if path.is_dir():
        return _folder(path, text)
    if path.exists() or path.suffix in {".npy", ".npz", ".safetensors", ".gguf", ".json", *PICKLES}:
        return _file(path)
    from leafward.measure.hub import cached_folder

    return replace(_folder(cached_folder(text), text), label=text)


def _folder(path: Path, text: str) -> Found:
    from leafward.measure import folders

    return replace(folders.open_folder(path), label=text)


def _file(path: Path) -> Found:
    if not path.exists():
        raise DataError(f"no such file or directory: {path}")
    if path.suffix == ".npy":
        matrix = from_npy(path)
        return _single(matrix.source, str(path), path.stem)
    if path.suffix == ".npz":
        return of_state(_npz(path), str(path), "archive of arrays")
    if path.suffix == ".gguf":
        from leafward.measure.gguf import open_gguf

        return open_gguf(path)
    if path.suffix in PICKLES:
        from leafward.measure.folders import pickled

        return of_state(pickled(path), str(path), "pickled weights", notes=("read with weights_only: no code was run",))
    from leafward.measure.folders import of_catalogue
    from leafward.measure.matrices import catalogue_at

    return of_catalogue(catalogue_at(path), str(path), "safetensors")


def _npz(path: Path) -> dict[str, torch.Tensor]:
    held = arrays.read_arrays(path)
    return {name: torch.from_numpy(array) for name, array in held.items() if array.dtype in _NUMPY_FLOATS}


_NUMPY_FLOATS = (np.float16, np.float32, np.float64)


def _single(source: RowReader, label: str, name: str) -> Found:
    if source.shape[1] < 2:
        raise DataError(f"{label} has one column: {SHAPES}")
    return Found(label, "matrix", {name: Entry(name, source.shape, source.dtype, lambda: source)}, head=name)
