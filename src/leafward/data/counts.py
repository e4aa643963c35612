"""How often each token occurs: counts from a file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from leafward.data.arrays import read_arrays
from leafward.errors import DataError, UsageError
from leafward.files import check_size, read_json


def ranked_counts(path: str | os.PathLike[str]) -> np.ndarray:
    """Non-zero counts from a file (see `read_counts`), largest first."""
    counts = read_counts(path)
    return np.sort(counts[counts > 0])[::-1]


def read_counts(path: str | os.PathLike[str]) -> np.ndarray:
    """Counts ≥ 0 from a file, in its order, float64.

    ``.npy`` holds a vector, ``.txt`` one number per line, ``.json`` a list or an object of token → count.
    """
    path = Path(path)
    readers: dict[str, Callable[[Path], np.ndarray]] = {
        ".npy": lambda file: next(iter(read_arrays(file).values())),
        ".txt": _read_lines,
        ".json": _read_json,
    }
    if path.suffix not in readers:
        raise UsageError(f"counts file {path} must end in .npy, .txt or .json")
    try:
        counts = np.asarray(readers[path.suffix](path), dtype=np.float64)
    except (DataError, OSError, ValueError, TypeError, EOFError, MemoryError) as error:
        raise DataError(f"cannot read counts from {path}: {error}") from error
    if counts.ndim != 1 or not np.isfinite(counts).all() or (counts < 0).any():
        raise DataError(f"counts in {path} must be one list of finite numbers ≥ 0")
    return counts


def _read_lines(path: Path) -> np.ndarray:
    check_size(path)
    return np.loadtxt(path, ndmin=1)


def _read_json(path: Path) -> np.ndarray:
    content = read_json(path)
    return np.array(list(content.values()) if isinstance(content, dict) else content)
