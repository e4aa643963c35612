"""A table of losses as people keep them: which column is what, and the laws that it allows."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from typing import Any

import numpy as np

from leafward.errors import DataError, UsageError, nearest
from leafward.files import read_text
from leafward.stats.power_laws.separable import Array

KNOWN: dict[str, tuple[str, ...]] = {
    "loss": ("loss", "l", "bits_per_byte", "nll"),
    "N": ("n", "params", "parameters", "model size", "size", "num_params"),
    "D": ("d", "tokens", "training tokens", "data"),
    "C": ("c", "flop", "flops", "compute", "training flop", "training flops"),
    "m": ("m", "width", "hidden_size", "d_model", "n_embd"),
    "depth": ("depth", "layers", "l_depth", "n_layer", "num_layers"),
    "corpus": ("corpus", "dataset", "group"),
    "model": ("model", "run", "name", "cluster"),
}
LABELS = ("corpus", "model")
DELIMITERS = ",;\t"


@dataclass(frozen=True, eq=False)
class Table:
    """Columns of numbers and of labels by what they are; `unused` are those that no law takes."""

    numbers: Mapping[str, Array]
    labels: Mapping[str, tuple[str, ...]]
    unused: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def rows(self) -> int:
        return len(self.numbers["loss"])


def read_table(path: str | os.PathLike[str], given: Mapping[str, str] | None = None) -> Table:
    """Read a CSV (also with ; or tabs). `given`: what is where ("N" -> "Model Size"), for columns of other names.

    Of N, D and C any two give the third by C = 6 N D.
    """
    columns, rows = _cells(path)
    place = _places(path, columns, given or {})
    numbers: dict[str, Array] = {}
    labels: dict[str, tuple[str, ...]] = {}
    for name, column in place.items():
        cells = [row[columns.index(column)].strip() for _, row in rows]
        if name in LABELS:
            labels[name] = tuple(cells)
            continue
        values = [_number(path, line, column, cell) for (line, _), cell in zip(rows, cells, strict=True)]
        numbers[name] = np.array(values)
    if "loss" not in numbers:
        raise DataError(f"{path} has no column of losses; it has {', '.join(columns)}; say which with --loss NAME")
    notes = _third(numbers)
    unused = tuple(column for column in columns if column not in place.values())
    return Table(numbers, labels, unused, notes)


def _cells(path: str | os.PathLike[str]) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """Names of the columns, and (line, cells) of each row that is not blank."""
    text = read_text(path)
    first = text.partition("\n")[0]
    if not first.strip():
        raise DataError(f"{path} is empty: a table has a line of column names first")
    delimiter = max(DELIMITERS, key=first.count)
    try:
        lines = [(n, row) for n, row in enumerate(csv.reader(StringIO(text), delimiter=delimiter), 1)]
    except csv.Error as error:
        raise DataError(f"{path} cannot be read as a table: {error}") from error
    columns = [name.strip() for name in lines[0][1]]
    if len(set(columns)) < len(columns):
        raise DataError(f"{path} names a column twice: {', '.join(columns)}")
    rows = [(n, row) for n, row in lines[1:] if any(cell.strip() for cell in row)]
    for n, row in rows:
        if len(row) != len(columns):
            raise DataError(f"{path}, line {n}: expected {len(columns)} fields, one per column, got {len(row)}")
    if not rows:
        raise DataError(f"{path} has no rows below its header")
    return columns, rows


def _places(path: object, columns: Sequence[str], given: Mapping[str, str]) -> dict[str, str]:
    """What is in which column: as told, else by the names that people use."""
    place = {}
    for name, column in given.items():
        if column not in columns:
            raise UsageError(f"{path} has no column {column!r}; {nearest(column, columns)}")
        place[name] = column
    for name, names in KNOWN.items():
        if name in place:
            continue
        found = [column for column in columns if column == name and column not in place.values()]
        found = found or [c for c in columns if c.strip().lower() in names and c not in place.values()]
        if len(found) > 1:
            raise UsageError(f"{path}: {' and '.join(found)} could both be {name}; say which with --{name} COLUMN")
        if found:
            place[name] = found[0]
    return place


def _number(path: object, line: int, column: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise DataError(f"{path}, line {line}: {column} must be a positive number, got {text!r}")
    return value


def _third(numbers: dict[str, Any]) -> tuple[str, ...]:
    """Of N, D and C the one that is missing."""
    there = {"N", "D", "C"} & set(numbers)
    if there == {"N", "C"}:
        numbers["D"] = numbers["C"] / (6 * numbers["N"])
        return ("D = C/(6 N)",)
    if there == {"D", "C"}:
        numbers["N"] = numbers["C"] / (6 * numbers["D"])
        return ("N = C/(6 D)",)
    return ()
