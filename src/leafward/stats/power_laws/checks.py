"""What a fit may be given. Every refusal names the argument, what it was and what is allowed."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from leafward.errors import UsageError, nearest

Array = NDArray[np.float64]


def positive_vector(name: str, values: ArrayLike, length: int | None = None) -> Array:
    """`values` as a 1-D float64 array of finite positive numbers."""
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{name} must be a list of numbers: {error}") from error
    if array.ndim != 1:
        raise UsageError(f"{name} must have one dimension, got shape {array.shape}")
    if length is not None and len(array) != length:
        raise UsageError(f"{name} must have one entry per row: {length} rows, got {len(array)} entries")
    bad = np.flatnonzero(~(np.isfinite(array) & (array > 0)))
    if len(bad):
        raise UsageError(f"{name} must be finite and positive, got {array[bad[0]]} at position {bad[0]}")
    return array


def varied(name: str, x: Array, at_least: int) -> None:
    """Refuse x with fewer than `at_least` different values."""
    found = len(np.unique(x))
    if found < at_least:
        raise UsageError(f"{name} needs at least {at_least} different values for this law, got {found}")


def enough_rows(name: str, rows: int, parameters: int) -> None:
    """Refuse a table that leaves no degree of freedom for the error."""
    if rows <= parameters:
        raise UsageError(
            f"{name} has too few points: the law has {parameters} parameters and needs at least "
            f"{parameters + 1} rows, got {rows}"
        )


def labels(name: str, values: Iterable[object], length: int) -> tuple[list[str], NDArray[np.intp]]:
    """Distinct labels as text, in order of appearance, and the index of each row's label."""
    text = [str(value) for value in values]
    if len(text) != length:
        raise UsageError(f"{name} must have one entry per row: {length} rows, got {len(text)} entries")
    names = list(dict.fromkeys(text))
    position = {label: index for index, label in enumerate(names)}
    return names, np.array([position[label] for label in text], dtype=np.intp)


def choice(name: str, value: str, allowed: Iterable[str]) -> str:
    """`value` if it is one of `allowed`."""
    allowed = tuple(allowed)
    if value not in allowed:
        raise UsageError(f"{name} {value!r} is unknown; {nearest(str(value), allowed)}")
    return value


def fraction(name: str, value: float) -> float:
    """A number strictly between 0 and 1."""
    if not 0 < value < 1:
        raise UsageError(f"{name} must lie strictly between 0 and 1, got {value}")
    return float(value)
