"""A classifier's answers as a user has them: probabilities in an array or CSV file, or predicted labels in a CSV."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from leafward.data.arrays import ARRAYS, checked_matrix, read_arrays
from leafward.data.tables import read_names, read_table
from leafward.errors import DataError, UsageError, named, nearest
from leafward.hierarchy import Taxonomy

TRUE, PREDICTED, ID = "true", "predicted", "id"


class Predictions(NamedTuple):
    """The true node of each sample (B), its name, and either probabilities (B, C) over the nodes `classes` (C) or
    ranked answers (B, k), nodes by number, −1 where none was given."""

    ids: list[str]
    true: np.ndarray
    probabilities: np.ndarray | None = None
    classes: np.ndarray | None = None
    answers: np.ndarray | None = None


def read_predictions(
    path: Path, tax: Taxonomy, *, classes: Path | None, true: Path | None, logits: bool
) -> Predictions:
    """From a .csv, .npy, .npz or .safetensors file; what it does not hold itself comes from `classes` and `true`."""
    if path.suffix == ".csv":
        for flag, given in (("classes", classes), ("true", true)):
            if given is not None:
                raise UsageError(f"--{flag} belongs to an array file; a .csv names its own in its header, {path}")
        return _from_table(path, tax, logits)
    if path.suffix not in ARRAYS:
        raise UsageError(f"{path}: expected a file that ends in .csv, {', '.join(ARRAYS)}")
    return _from_arrays(path, tax, classes, true, logits)


def _from_table(path: Path, tax: Taxonomy, logits: bool) -> Predictions:
    """Columns `true` and `predicted` (`predicted_2`, … for lower ranks), or `true` and one for each class."""
    table = read_table(path)
    if TRUE not in table:
        raise DataError(f"{path}: has no column {TRUE!r} with the true node of each row; {nearest(TRUE, table)}")
    count = len(table[TRUE])
    ids = table.get(ID, [str(row) for row in range(count)])
    with named(path):
        truth = tax.ids(table[TRUE], f"column {TRUE!r}")
        if PREDICTED in table:
            ranks = [PREDICTED]
            while f"{PREDICTED}_{len(ranks) + 1}" in table:
                ranks.append(f"{PREDICTED}_{len(ranks) + 1}")
            return Predictions(ids, truth, answers=np.stack([_column(tax, table, name) for name in ranks], axis=1))
    classes = [name for name in table if name not in (TRUE, ID)]
    for name in classes:
        if name not in tax:
            hint = nearest(name, tax.leaf_names) if len(tax) <= 10_000 else f"there are {len(tax):,} nodes"
            raise DataError(
                f"{path}: expected a column {PREDICTED!r}, or a column of probabilities for each class; {name!r} is "
                f"not a node of the taxonomy; {hint}"
            )
    try:
        values = np.array([table[name] for name in classes], np.float64).T
    except ValueError as error:
        raise DataError(f"{path}: a probability is not a number: {error}") from error
    return _probable(path, ids, truth, checked_matrix(values, str(path)), tax.ids(classes), logits)


def _column(tax: Taxonomy, table: dict[str, list[str]], name: str) -> np.ndarray:
    """A column of answers as numbers; an empty field is no answer."""
    given = np.array([bool(text) for text in table[name]])
    answers = np.full(len(given), -1, np.int64)
    answers[given] = tax.ids([text for text in table[name] if text], f"column {name!r}")
    return answers


def _from_arrays(path: Path, tax: Taxonomy, classes: Path | None, true: Path | None, logits: bool) -> Predictions:
    arrays = read_arrays(path)
    name = next((name for name in ("probabilities", "logits") if name in arrays), None)
    if name is None:
        matrices = [key for key, values in arrays.items() if values.ndim == 2]
        if len(matrices) != 1:
            raise DataError(f"{path}: expected an array 'probabilities' or 'logits', found {', '.join(arrays)}")
        name = matrices[0]
    values = checked_matrix(arrays[name], f"{path}: {name}")
    columns = _classes(path, tax, arrays.get("classes"), classes)
    if len(columns) != values.shape[1]:
        raise DataError(
            f"{path}: {name} has {values.shape[1]} columns for {len(columns)} classes"
            + (" (the leaves of the taxonomy, in its order; --classes says otherwise)" if classes is None else "")
        )
    truth = _truth(path, tax, columns, arrays.get("true"), true)
    if len(truth) != len(values):
        raise DataError(f"{true or path}: {len(truth)} true labels for {len(values)} rows of {name}")
    ids = [str(row) for row in range(len(values))]
    return _probable(path, ids, truth, values, columns, logits or name == "logits")


def _classes(path: Path, tax: Taxonomy, inside: np.ndarray | None, file: Path | None) -> np.ndarray:
    """The node of each column: from the file given, the array beside, or else all leaves in their order."""
    if file is not None:
        with named(file):
            return tax.ids(read_names(file, "class"), "class")
    if inside is None:
        return tax.leaves
    with named(path):
        if inside.dtype.kind != "U" or inside.ndim != 1:
            raise UsageError(f"classes must be a list of names, got {inside.dtype} of shape {inside.shape}")
        return tax.ids(inside, "classes")


def _truth(path: Path, tax: Taxonomy, columns: np.ndarray, inside: np.ndarray | None, file: Path | None) -> np.ndarray:
    """The true node of each row: names, or whole numbers that count the classes."""
    source: str | Path = path if file is None else file
    if file is not None:
        if file.suffix not in ARRAYS:
            with named(file):
                return tax.ids(read_names(file, TRUE), "true")
        inside = next(iter(read_arrays(file).values()))
    if inside is None:
        raise DataError(f"{path}: holds no array 'true'; give the true class of each row with --true FILE")
    with named(source):
        if inside.ndim != 1:
            raise UsageError(f"true must be one label for each row, got shape {inside.shape}")
        if inside.dtype.kind not in "iu":
            return tax.ids(inside, "true")
        wrong = inside[(inside < 0) | (inside >= len(columns))]
        if wrong.size:
            raise UsageError(f"true: class {int(wrong[0])} is out of range, the classes are 0 … {len(columns) - 1}")
        return columns[inside]


def _probable(
    path: Path, ids: list[str], truth: np.ndarray, values: np.ndarray, columns: np.ndarray, logits: bool
) -> Predictions:
    if logits:
        from scipy.special import softmax

        values = softmax(values, axis=1)
    elif (values < 0).any() or (abs(values.sum(axis=1) - 1.0) > 1e-3).any():
        raise DataError(
            f"{path}: probabilities must be ≥ 0 and add up to 1 in each row; --logits takes a softmax first"
        )
    return Predictions(ids, truth, probabilities=values, classes=columns)
