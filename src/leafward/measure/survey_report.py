"""What a survey of a checkpoint found: figures with intervals and nulls, as a data frame, CSV, Parquet and JSON."""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from leafward.errors import require
from leafward.files import finite, replacing
from leafward.measure.columns import COLUMNS
from leafward.measure.duplicates import Cluster
from leafward.measure.measured import Measured
from leafward.measure.targets import Entry

Figures = Mapping[str, Measured]
NOTHING = "not told apart from its nulls"


@dataclass(frozen=True, eq=False)
class MatrixRow:
    """One matrix. `nulls`: kind -> figures of the sample without its structure. `without`: near-duplicates aside."""

    name: str
    shape: tuple[int, int]
    rows: int
    dtype: str
    values: Figures = field(default_factory=dict)
    nulls: Mapping[str, Figures] = field(default_factory=dict)
    calls: tuple[str, ...] = ()
    clusters: tuple[Cluster, ...] = ()
    rows_without: int | None = None
    without: Figures | None = None
    nulls_without: Mapping[str, Figures] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    problem: str = ""
    vocabulary: bool = False
    seconds: float = 0.0

    @staticmethod
    def of(entry: Entry, values: Figures, notes: Sequence[str]) -> MatrixRow:
        named = any(word in entry.name for word in ("embed", "wte", "head", "embd", "output.weight", "shared"))
        return MatrixRow(entry.name, entry.shape, entry.used, entry.dtype, values, notes=tuple(notes), vocabulary=named)

    @staticmethod
    def broken(entry: Entry, problem: str) -> MatrixRow:
        return MatrixRow(entry.name, entry.shape, entry.used, entry.dtype, problem=problem)

    @property
    def verdict(self) -> str:
        """What may be said of the matrix, or that nothing may."""
        if self.problem:
            return self.problem
        if not self.nulls:
            return "not compared with nulls"
        return "; ".join(self.calls) or NOTHING

    def flat(self) -> dict[str, Any]:
        """One level of names and plain values: the row of a data frame."""
        found: dict[str, Any] = {
            "matrix": self.name, "rows": self.shape[0], "width": self.shape[1], "rows_used": self.rows,
            "dtype": self.dtype, "verdict": self.verdict,
        }  # fmt: skip
        found |= _flat(self.values, "")
        for kind, figures in self.nulls.items():
            found |= {f"{name}_{kind}": _plain(each.value) for name, each in figures.items()}
        if self.without is not None:
            found |= {"rows_without": self.rows_without} | _flat(self.without, "_without")
        return found | {"seconds": self.seconds, "notes": "; ".join(self.notes)}

    def to_dict(self) -> dict[str, Any]:
        values = {name: each.to_dict() for name, each in self.values.items()}
        return finite(
            {
                "matrix": self.name,
                "shape": list(self.shape),
                "rows": self.rows,
                "dtype": self.dtype,
                "verdict": self.verdict,
                "calls": list(self.calls),
                "values": values,
                "nulls": {kind: {k: v.to_dict() for k, v in found.items()} for kind, found in self.nulls.items()},
                "near_duplicates": [{"rows": len(c.rows), "named": c.title} for c in self.clusters[:20]],
                "rows_without": self.rows_without,
                "without": self.without and {k: v.to_dict() for k, v in self.without.items()},
                "notes": list(self.notes),
                "seconds": self.seconds,
            }
        )


@dataclass(frozen=True, eq=False)
class Survey:
    """The matrices of one target. `level`: of the intervals behind verdicts: one false word in 20 tables."""

    target: str
    kind: str
    rows: tuple[MatrixRow, ...]
    notes: tuple[str, ...]
    sample: int
    seed: int
    quick: bool
    level: float
    head: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Survey({self.target!r}, {len(self.rows)} matrices)"

    @property
    def heading(self) -> str:
        count = f"{len(self.rows)} matri{'x' if len(self.rows) == 1 else 'ces'}"
        if self.quick:
            return f"{self.target} ({self.kind}): {count}; exact columns"
        return (
            f"{self.target} ({self.kind}): {count}; sampled columns from at most {self.sample:,} rows, seed {self.seed}"
        )

    def row(self, name: str) -> MatrixRow:
        return next(each for each in self.rows if each.name == name)

    def to_frame(self) -> Any:
        """A pandas data frame with one row for each matrix."""
        return require("pandas", "lm").DataFrame([row.flat() for row in self.rows])

    def to_dict(self) -> dict[str, Any]:
        meanings = {key: column.meaning for key, column in COLUMNS.items()}
        return finite(
            {
                "target": self.target,
                "kind": self.kind,
                "sample": self.sample,
                "seed": self.seed,
                "level": self.level,
                "columns": meanings,
                "matrices": [row.to_dict() for row in self.rows],
                "notes": list(self.notes),
                **self.extra,
            }
        )

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False, allow_nan=False)

    def write_csv(self, path: str | os.PathLike[str]) -> None:
        """One line for each matrix, a column for each figure, its interval and its nulls."""
        flat = [row.flat() for row in self.rows]
        names = list(dict.fromkeys(name for row in flat for name in row))
        with replacing(path) as temporary, open(temporary, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, names, restval="")
            writer.writeheader()
            writer.writerows(flat)

    def write_parquet(self, path: str | os.PathLike[str]) -> None:
        """The same as a Parquet file."""
        pyarrow, parquet = require("pyarrow", "lm"), require("pyarrow.parquet", "lm")
        flat = [row.flat() for row in self.rows]
        names = list(dict.fromkeys(name for row in flat for name in row))
        table = pyarrow.table({name: [row.get(name) for row in flat] for name in names})
        with replacing(Path(path)) as temporary:
            parquet.write_table(table, temporary)


def _flat(figures: Figures, ending: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, each in figures.items():
        found[name + ending] = _plain(each.value)
        ends = each.interval()
        if ends is not None:
            found |= {f"{name}{ending}_low": ends[0], f"{name}{ending}_high": ends[1]}
    return found


def _plain(value: float) -> float | None:
    return value if math.isfinite(value) else None
