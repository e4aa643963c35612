"""Tables and columns of names as users hand them in: .csv, .json and .txt. Every error names the file."""

from __future__ import annotations

import csv
from collections import Counter
from io import StringIO
from pathlib import Path

from leafward.errors import DataError, nearest
from leafward.files import check_ending, read_json, read_text

TEXTS = (".txt", ".json", ".csv")


def read_table(path: Path) -> dict[str, list[str]]:
    """The columns of a CSV file with a header."""
    try:
        rows = [row for row in csv.reader(StringIO(read_text(path), newline="")) if row]
    except csv.Error as error:
        raise DataError(f"{path}: not a CSV file: {error}") from error
    if len(rows) < 2:
        raise DataError(f"{path}: expected a header and at least one row, got {len(rows)} lines")
    header = [name.strip() for name in rows[0]]
    for name, times in Counter(header).items():
        if times > 1:
            raise DataError(f"{path}: the column {name!r} stands {times} times in the header")
    for number, row in enumerate(rows[1:], start=2):
        if len(row) != len(header):
            raise DataError(f"{path}: row {number} has {len(row)} fields for {len(header)} columns")
    return {name: [row[i].strip() for row in rows[1:]] for i, name in enumerate(header)}


def read_names(path: Path, column: str) -> list[str]:
    """Names, one for each row: lines of a .txt, a list in a .json, or the column of a .csv."""
    check_ending(path, TEXTS)
    if path.suffix == ".csv":
        table = read_table(path)
        if column not in table:
            raise DataError(f"{path}: has no column {column!r}; {nearest(column, table)}")
        return table[column]
    names = read_json(path) if path.suffix == ".json" else [line.strip() for line in read_text(path).splitlines()]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DataError(f"{path}: expected a list of names")
    return names
