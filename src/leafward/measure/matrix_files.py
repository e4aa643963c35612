"""A matrix that is read in row slices, and the files it can lie in: `.npy`, `.npz` and safetensors.

Shapes: n rows (tokens, classes, features) of width m.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError

from leafward.data import arrays
from leafward.errors import DataError, UsageError, nearest
from leafward.files import inside, read_record

SLICE_ROWS = 8192
FLOATING = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
FEATURES = ("image_features", "text_features")
"""The matrices of a feature file (`leafward data features`); of the two, the texts are the classifier."""
PICKLES = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"}


@dataclass(frozen=True)
class Matrix:
    """One audited matrix: its rows, how many of them count, and what was found out on the way.

    `rows` leaves out vocabulary padding; `gain` (m,) is the final-norm gain folded into every row.
    """

    target: str
    tensor: str
    source: arrays.RowReader
    rows: int
    role: str = "matrix"
    gain: torch.Tensor | None = None
    hidden_size: int | None = None
    notes: tuple[str, ...] = ()
    slice_rows: int = SLICE_ROWS

    @property
    def width(self) -> int:
        return self.source.shape[1]

    @property
    def stored_rows(self) -> int:
        return self.source.shape[0]

    def slices(self, device: torch.device, start: int = 0) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first row, float32 block (≤ slice_rows, m) on `device`) from row `start` on, gain folded in.

        The block belongs to the caller. A thread reads the next slice while the caller works on this one.
        """
        gain = None if self.gain is None else self.gain.to(device)
        with ThreadPoolExecutor(1) as reader:

            def fetch(first: int) -> Future[torch.Tensor]:
                return reader.submit(self.source.read, first, min(first + self.slice_rows, self.rows))

            ahead = fetch(start)
            for first in range(start, self.rows, self.slice_rows):
                block = ahead.result()
                if first + self.slice_rows < self.rows:
                    ahead = fetch(first + self.slice_rows)
                block = block.to(device).float()  # in this order: the narrow type travels, the device widens it
                yield first, block if gain is None else block.mul_(gain)
                del block


def from_array(array: torch.Tensor | np.ndarray, label: str = "array") -> Matrix:
    """Wrap a 2-D floating tensor or array (n, m)."""
    if isinstance(array, np.ndarray):
        check_matrix(label, array.shape, array.dtype.kind == "f" and array.dtype.itemsize <= 8, array.dtype.name)
        array = torch.from_numpy(np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("=")))
    check_matrix(label, tuple(array.shape), array.dtype in FLOATING.values(), str(array.dtype))
    return Matrix(target=label, tensor=label, source=arrays.rows_of_tensor(array), rows=array.shape[0])


def from_npy(path: Path) -> Matrix:
    """Open a `.npy` matrix, which is read by rows."""
    array = arrays.open_npy(path)
    check_matrix(str(path), array.shape, array.dtype.kind == "f" and array.dtype.itemsize <= 8, array.dtype.name)
    return Matrix(target=str(path), tensor=path.stem, source=arrays.rows_of_npy(path), rows=len(array))


def from_npz(path: Path, tensor: str | None) -> Matrix:
    """One matrix of an `.npz`, which is held in memory: an archive cannot be read by rows."""
    held = arrays.read_arrays(path)
    shapes = {name: array.shape for name, array in held.items() if array.dtype.kind == "f"}
    matrices = sorted(name for name, shape in shapes.items() if len(shape) == 2 and shape[0] > 1)
    name = tensor or only_one(str(path), matrices)
    if name not in held:
        raise UsageError(f"--tensor: {path} holds no {name!r}; {nearest(name, held)}")
    source = from_array(held[name], f"{path}: {name}").source
    return Matrix(target=str(path), tensor=name, source=source, rows=source.shape[0], notes=feature_notes(name))


def only_one(label: str, names: list[str]) -> str:
    """The only one of the matrices of a file, or the texts of a feature file; else a refusal that lists them."""
    if not names:
        raise DataError(f"{label} holds no 2-D floating tensor with at least two rows")
    if set(FEATURES) <= set(names):
        return FEATURES[1]
    if len(names) > 1:
        shown = ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
        raise UsageError(f"{label} holds {len(names)} matrices: choose one with --tensor; {shown}")
    return names[0]


def feature_notes(name: str) -> tuple[str, ...]:
    """What to tell about the side of a feature file that was taken."""
    if name not in FEATURES:
        return ()
    of, other = ("images", FEATURES[1]) if name == FEATURES[0] else ("classes", FEATURES[0])
    return (f"these are the features of the {of}; --tensor {other} audits the other side",)


def check_matrix(label: str, shape: tuple[int, ...], floating: bool, dtype: str) -> None:
    """Refuse what is not a floating matrix, by name."""
    if len(shape) != 2:
        raise DataError(f"{label} has shape {list(shape)}: the audit needs a 2-D matrix (rows × width)")
    if not floating:
        raise DataError(
            f"{label} has type {dtype}: the audit needs float16, bfloat16, float32 or float64; "
            "dequantise integer or 8-bit weights first"
        )
    if min(shape) < 1 or shape[0] < 2:
        raise DataError(f"{label} has shape {list(shape)}: the audit needs at least two rows and one column")


@dataclass(frozen=True)
class Catalogue:
    """Tensor names and the safetensors file of each; files are opened only when a tensor is asked for."""

    label: str
    files: dict[str, Path]

    @staticmethod
    def of_file(path: Path) -> Catalogue:
        with arrays.open_safetensors(path) as file:
            return Catalogue(str(path), dict.fromkeys(file.keys(), path))

    @staticmethod
    def of_index(path: Path) -> Catalogue:
        """A sharded checkpoint by its `*.index.json`; shards may be absent until they are needed."""
        weight_map = read_record(path).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise DataError(f"{path} has no 'weight_map' from tensor names to shard files")
        return Catalogue(str(path.parent), {name: inside(path.parent, file) for name, file in weight_map.items()})

    def notes(self) -> tuple[str, ...]:
        """What to tell about shard files that the index lists and the disk does not hold."""
        absent = sorted({file.name for file in self.files.values() if not file.is_file()})
        return (f"shards not present and not needed: {', '.join(absent)}",) if absent else ()

    def load(self, name: str) -> torch.Tensor:
        """A whole tensor; for the small ones (norm gains)."""
        return self._with(name, lambda file: file.get_tensor(name).clone())

    def rows(self, name: str) -> arrays.RowReader:
        """The rows of a floating 2-D tensor."""
        if name not in self.files:
            raise UsageError(f"--tensor: {self.label} holds no {name!r}; {nearest(name, self.files)}")
        shape, dtype = self._with(name, lambda file: _shape_and_dtype(file, name))
        check_matrix(f"{self.label}: {name}", shape, dtype in FLOATING, dtype)
        return arrays.rows_of_safetensors(self.files[name], name)

    def matrices(self) -> list[str]:
        """Names of the floating 2-D tensors with at least two rows, in the files that are here."""
        found = []
        for path in sorted(set(self.files.values())):
            if not path.is_file():
                continue
            with arrays.open_safetensors(path) as file:
                for name in file.keys():  # noqa: SIM118 (a safetensors handle, not a dict)
                    shape, dtype = _shape_and_dtype(file, name)
                    if len(shape) == 2 and shape[0] > 1 and dtype in FLOATING:
                        found.append(name)
        return sorted(found)

    def described(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and type of every tensor in the files that are here, in the order of the files."""
        found = {}
        for path in dict.fromkeys(self.files.values()):
            if path.is_file():
                with arrays.open_safetensors(path) as file:
                    found |= {name: _shape_and_dtype(file, name) for name in file.keys() if name in self.files}  # noqa: SIM118
        return found

    def only_matrix(self) -> str:
        """The one 2-D floating tensor, or a refusal that lists the candidates."""
        return only_one(self.label, self.matrices())

    def _with(self, name: str, use: Callable[[Any], Any]) -> Any:
        path = self.files[name]
        if not path.is_file():
            raise DataError(f"missing shard {path.name} of {self.label}: it should hold {name!r}")
        with arrays.open_safetensors(path) as file:
            try:
                return use(file)
            except SafetensorError as error:
                raise DataError(f"{path} does not hold {name!r}, which the index puts there: {error}") from error


def refuse_pickle(path: Path) -> None:
    """Pickles run code when they are opened, so no file of that kind is."""
    if path.suffix.lower() in PICKLES:
        raise DataError(
            f"{path} is a pickle (or of a kind that usually is), which can run code when opened: convert it "
            "to safetensors first, for example with model.save_pretrained or safetensors.torch.save_file"
        )


def _shape_and_dtype(file: Any, name: str) -> tuple[tuple[int, ...], str]:
    part = file.get_slice(name)
    return tuple(part.get_shape()), part.get_dtype()
