"""Several models of one family: overlap against width, and the table of their losses."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import numpy as np

from leafward.errors import DataError, UsageError, nearest
from leafward.files import read_text
from leafward.measure.audit_report import AuditReport
from leafward.stats.power_laws import PowerLawFit, fit_power_law

REQUIRED = ("model", "corpus", "m", "loss")
OPTIONAL = ("params", "depth", "tokens")


@dataclass(frozen=True, eq=False)
class LossTable:
    """One row per (model, corpus), all arrays (rows,); optional columns are None where the file has none."""

    model: tuple[str, ...]
    corpus: tuple[str, ...]
    width: np.ndarray
    loss: np.ndarray
    params: np.ndarray | None = None
    depth: np.ndarray | None = None
    tokens: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class Family:
    """Audited models by width: m and m·⟨o²⟩, raw and mean-removed (NaN where that was not measured)."""

    names: tuple[str, ...]
    width: np.ndarray
    scaled_overlap: np.ndarray
    centred_scaled_overlap: np.ndarray
    losses: LossTable | None

    def overlap_fits(self) -> dict[str, PowerLawFit]:
        """⟨o²⟩ = C/m^a of the raw and the mean-removed rows, where three widths have it; random rows: a = 1."""
        found = {}
        for name, scaled in (("raw", self.scaled_overlap), ("mean removed", self.centred_scaled_overlap)):
            keep = np.isfinite(scaled) & (scaled > 0)
            if len(np.unique(self.width[keep])) >= 3:
                found[name] = fit_power_law(self.width[keep], scaled[keep] / self.width[keep])
        return found


def audit_family(
    *reports: AuditReport,
    names: Sequence[str] | None = None,
    losses: LossTable | str | os.PathLike[str] | None = None,
) -> Family:
    """Put reports side by side, narrowest first, with the losses table or its file.

    `names` (default: the last part of each target) are the models' names in that table. Where a model is in
    both, the widths must agree: a fit against a width that the rows do not have is wrong.
    """
    if len(reports) < 2:
        raise UsageError(f"a family needs at least two reports, got {len(reports)}")
    called = [Path(report.target).name for report in reports] if names is None else list(names)
    if len(called) != len(reports) or len(set(called)) != len(called):
        raise UsageError(f"names must be {len(reports)} different names, got {called}")
    table = losses if losses is None or isinstance(losses, LossTable) else read_losses(losses)
    if table is not None:
        _check_widths(dict(zip(called, reports, strict=True)), table)
    order = sorted(range(len(reports)), key=lambda k: (reports[k].width, called[k]))
    ordered = [reports[k] for k in order]
    return Family(
        names=tuple(called[k] for k in order),
        width=np.array([report.width for report in ordered]),
        scaled_overlap=np.array([report.scaled_overlap for report in ordered]),
        centred_scaled_overlap=np.array(
            [np.nan if report.centred is None else report.centred.scaled_overlap for report in ordered]
        ),
        losses=table,
    )


def check_names(names: Sequence[str], table: LossTable) -> None:
    """Refuse, before any work, models that the table has no row for."""
    there = sorted(set(table.model))
    for name in names:
        if name not in there:
            raise DataError(f"losses: no row is about {name}; {nearest(name, there, 'models there:')}")


def _check_widths(reports: dict[str, AuditReport], table: LossTable) -> None:
    check_names(list(reports), table)
    for name, width in zip(table.model, table.width, strict=True):
        report = reports.get(name)
        if report is not None and report.width != width:
            raise DataError(
                f"losses: {name} has m = {width:g} in the table but the audited matrix is {report.width} wide"
                + (" (a projected embedding)" if width == report.hidden_size else "")
                + f"; put m = {report.width} there, the width that its tokens share"
            )


def read_losses(path: str | os.PathLike[str]) -> LossTable:
    """Read a CSV with columns model, corpus, m, loss and, optionally, params, depth, tokens."""
    try:
        reader = csv.DictReader(StringIO(read_text(path), newline=""), skipinitialspace=True)
        columns = [name.strip() for name in reader.fieldnames or ()]
        reader.fieldnames = columns
        _check_columns(path, columns)
        rows = [(reader.line_num, row) for row in reader if any((value or "") for value in row.values())]
    except csv.Error as error:
        raise DataError(f"losses: cannot read {path}: {error}") from error
    if not rows:
        raise DataError(f"losses: {path} has no rows below its header")
    numeric = [name for name in ("m", "loss", *OPTIONAL) if name in columns]
    values: dict[str, list[float]] = {name: [] for name in numeric}
    keys: dict[tuple[str, str], int] = {}
    widths: dict[str, float] = {}
    for line, row in rows:
        if None in row or None in row.values():
            raise DataError(f"{path}, line {line}: expected {len(columns)} fields, one per column")
        key = (row["model"].strip(), row["corpus"].strip())
        if not all(key):
            raise DataError(f"{path}, line {line}: model and corpus must not be empty")
        if key in keys:
            raise DataError(f"{path}, line {line}: {key[0]} on {key[1]} is already on line {keys[key]}")
        keys[key] = line
        for name in numeric:
            values[name].append(_positive(f"{path}, line {line}", name, row[name]))
        if widths.setdefault(key[0], values["m"][-1]) != values["m"][-1]:
            raise DataError(f"{path}, line {line}: {key[0]} has m = {row['m']} here and {widths[key[0]]:g} above")
    arrays = {name: np.array(column) for name, column in values.items()}
    return LossTable(
        model=tuple(model for model, _ in keys),
        corpus=tuple(corpus for _, corpus in keys),
        width=arrays.pop("m"),
        loss=arrays.pop("loss"),
        **arrays,
    )


def _check_columns(path: str | os.PathLike[str], columns: list[str]) -> None:
    missing = [name for name in REQUIRED if name not in columns]
    if missing:
        raise DataError(f"losses: {path} lacks the column(s) {', '.join(missing)}; it has {', '.join(columns)}")
    for name in columns:
        if name not in REQUIRED + OPTIONAL:
            raise DataError(f"losses: {path} has an unknown column {name!r}; {nearest(name, REQUIRED + OPTIONAL)}")
    if len(set(columns)) != len(columns):
        raise DataError(f"losses: {path} names a column twice: {', '.join(columns)}")


def _positive(place: str, name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise DataError(f"{place}: {name} must be a positive number, got {text!r}")
    return value
