"""What an audit says: numbers with their errors, references, a verdict; as objects, a table and JSON."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from leafward.files import finite
from leafward.measure.audit_pairs import Estimate

QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
TOP_ROWS = 10
SHOWN_ROWS = 5


@dataclass(frozen=True)
class Summary:
    """Mean, standard deviation, extremes and quantiles of one number per row."""

    mean: float
    std: float
    min: float
    max: float
    quantiles: dict[str, float]

    @staticmethod
    def of(values: np.ndarray) -> Summary:
        levels = np.quantile(values, QUANTILES)
        quantiles = {f"{level:g}": float(value) for level, value in zip(QUANTILES, levels, strict=True)}
        return Summary(float(values.mean()), float(values.std()), float(values.min()), float(values.max()), quantiles)


@dataclass(frozen=True)
class Largest:
    """The largest |overlap| seen, and the two rows; a lower bound unless every pair was looked at."""

    value: float
    rows: tuple[int, int]
    exact: bool


@dataclass(frozen=True, eq=False)
class Histogram:
    """Share of the ordered pairs in each bin, with the standard error of each share; bins + 1 edges."""

    edges: np.ndarray
    share: np.ndarray
    error: np.ndarray
    exact: bool


@dataclass(frozen=True, eq=False)
class OverlapReport:
    """Overlaps of one set of rows: as they are, or with the mean row removed before normalising.

    Exact: mean_overlap, mean_squared_overlap, participation_ratio, effective_rank, top_share (the part of
    Σ û_i û_iᵀ along its first eigenvector), interference (n,), which is NaN for rows left out. `Estimate`
    carries its standard error. `nearest_overlap` is the mean over rows of the largest |overlap| with another
    row; `shuffled` is the mean squared overlap after permuting each column.
    """

    rows: int
    width: int
    left_out: int
    mean_overlap: float
    mean_squared_overlap: float
    participation_ratio: float
    effective_rank: float
    top_share: float
    fourth_moment: Estimate
    squared_overlap_variance: Estimate
    mean_absolute_overlap: Estimate
    nearest_overlap: Estimate
    largest_overlap: Largest
    histogram: Histogram
    shuffled: Estimate
    sampled_rows: int
    interference: np.ndarray

    @property
    def scaled_overlap(self) -> float:
        """m·⟨o²⟩: 1 for random directions, m/PR in general (up to 1/n)."""
        return self.width * self.mean_squared_overlap

    def to_dict(self) -> dict[str, Any]:
        """Plain values; of the per-row interference a summary and the rows that suffer most."""
        values = {field.name: _plain(getattr(self, field.name)) for field in dataclasses.fields(self)}
        live = np.flatnonzero(np.isfinite(self.interference))
        worst = live[np.argsort(-self.interference[live], kind="stable")[:TOP_ROWS]]
        values["interference"] = {
            **dataclasses.asdict(Summary.of(self.interference[live])),
            "highest": [{"row": int(row), "value": float(self.interference[row])} for row in worst],
        }
        return {**values, "scaled_overlap": self.scaled_overlap}


@dataclass(frozen=True)
class References:
    """What the same n and m give otherwise: random directions, the Welch bound, equiangular tight frames."""

    random_mean_squared_overlap: float
    random_squared_overlap_variance: float
    welch_bound: float
    etf_limit: int
    etf_possible: bool


@dataclass(frozen=True)
class Frequency:
    """Token counts beside the geometry.

    mean_squared_overlap: of two different rows, both drawn by frequency; interference: of a row drawn by
    frequency with all others alike; norm_correlation: Pearson correlation of norm and ln(count), counts > 0.
    """

    tokens: float
    counted_rows: int
    mean_squared_overlap: float
    centred_mean_squared_overlap: float | None
    interference: float
    norm_correlation: float


@dataclass(frozen=True)
class Verdict:
    """In words: `label` on superposition, `geometry` on how the rows lie, and the reasons."""

    label: str
    geometry: str
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.label}; {self.geometry}. " + " ".join(self.reasons)


class TableRow(NamedTuple):
    name: str
    value: str
    error: str
    reference: str


@dataclass(frozen=True, eq=False)
class AuditReport:
    """The audit of one matrix (n rows used, width m). Figures at the top level are those of the raw rows."""

    target: str
    tensor: str
    role: str
    dtype: str
    rows: int
    width: int
    stored_rows: int
    hidden_size: int | None
    zero_rows: tuple[int, ...]
    duplicate_rows: int
    norm_folded: bool
    norms: Summary
    represented: float
    raw: OverlapReport
    centred: OverlapReport | None
    references: References
    frequency: Frequency | None
    verdict: Verdict
    notes: tuple[str, ...]
    device: str
    precision: str
    seed: int

    @property
    def mean_overlap(self) -> float:
        return self.raw.mean_overlap

    @property
    def mean_squared_overlap(self) -> float:
        return self.raw.mean_squared_overlap

    @property
    def scaled_overlap(self) -> float:
        return self.raw.scaled_overlap

    @property
    def participation_ratio(self) -> float:
        return self.raw.participation_ratio

    @property
    def effective_rank(self) -> float:
        return self.raw.effective_rank

    @property
    def fourth_moment(self) -> Estimate:
        return self.raw.fourth_moment

    @property
    def squared_overlap_variance(self) -> Estimate:
        return self.raw.squared_overlap_variance

    @property
    def mean_absolute_overlap(self) -> Estimate:
        return self.raw.mean_absolute_overlap

    @property
    def largest_overlap(self) -> Largest:
        return self.raw.largest_overlap

    @property
    def histogram(self) -> Histogram:
        return self.raw.histogram

    @property
    def interference(self) -> np.ndarray:
        """Mean squared overlap of each row with all others (n,); NaN for rows left out."""
        return self.raw.interference

    def to_dict(self) -> dict[str, Any]:
        """Plain, finite values, ready for JSON."""
        return finite({field.name: _plain(getattr(self, field.name)) for field in dataclasses.fields(self)})

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False, allow_nan=False)

    def table(self) -> list[TableRow]:
        """Rows (name, value, standard error or "exact", reference) for a terminal or a page."""
        rows = [
            TableRow("rows × width", f"{self.rows:,} × {self.width:,}", "exact", ""),
            TableRow("rows left out (zero)", _listed(self.zero_rows), "exact", ""),
            TableRow("rows that repeat another", f"{self.duplicate_rows:,}", "exact", ""),
            TableRow("norm, mean ± std", f"{self.norms.mean:.4g} ± {self.norms.std:.4g}", "exact", ""),
            TableRow("norm, min … max", f"{self.norms.min:.4g} … {self.norms.max:.4g}", "exact", ""),
            TableRow("rows with norm > ½ mean", f"{self.represented:.2%}", "exact", ""),
        ]
        rows += _overlap_rows("raw", self.raw, self.references)
        if self.centred is not None:
            rows += _overlap_rows("mean removed", self.centred, self.references)
        if self.frequency is not None:
            rows += _frequency_rows(self.frequency, self.references)
        return rows


def _overlap_rows(view: str, report: OverlapReport, references: References) -> list[TableRow]:
    shuffled = f"shuffled {report.shuffled.value:.4g} ± {report.shuffled.error:.1g}"
    bounds = f"random {references.random_mean_squared_overlap:.4g}, Welch bound {references.welch_bound:.4g}"
    spread = f"random {references.random_squared_overlap_variance:.4g}"
    most = f"at most {report.width:,}"
    largest = report.largest_overlap
    pair = f"{largest.value:.4g} (rows {largest.rows[0]}, {largest.rows[1]})"
    seen = "exact" if largest.exact else f"at least, from {report.sampled_rows:,} rows"
    return [
        TableRow(f"mean overlap, {view}", f"{report.mean_overlap:.4g}", "exact", "random 0"),
        TableRow(
            f"mean squared overlap, {view}", f"{report.mean_squared_overlap:.4g}", "exact", f"{bounds}, {shuffled}"
        ),
        TableRow(f"m × mean squared overlap, {view}", f"{report.scaled_overlap:.4g}", "exact", "random 1"),
        TableRow(f"participation ratio, {view}", f"{report.participation_ratio:.4g}", "exact", most),
        TableRow(f"effective rank, {view}", f"{report.effective_rank:.4g}", "exact", most),
        TableRow(f"mean |overlap|, {view}", *_shown(report.mean_absolute_overlap), ""),
        TableRow(f"fourth moment, {view}", *_shown(report.fourth_moment), ""),
        TableRow(f"variance of squared overlap, {view}", *_shown(report.squared_overlap_variance), spread),
        TableRow(f"nearest |overlap|, mean over rows, {view}", *_shown(report.nearest_overlap), ""),
        TableRow(f"largest |overlap|, {view}", pair, seen, ""),
    ]


def _frequency_rows(frequency: Frequency, references: References) -> list[TableRow]:
    random = f"random {references.random_mean_squared_overlap:.4g}"
    return [
        TableRow(
            "mean squared overlap, pairs by frequency",
            f"{frequency.mean_squared_overlap:.4g}",
            "exact",
            random,
        ),
        TableRow("interference of a token by frequency", f"{frequency.interference:.4g}", "exact", random),
        TableRow("correlation of norm and ln(count)", f"{frequency.norm_correlation:.3f}", "exact", ""),
    ]


def _listed(rows: tuple[int, ...]) -> str:
    """How many, and which: the first few."""
    if not rows:
        return "0"
    more = ", …" if len(rows) > SHOWN_ROWS else ""
    return f"{len(rows):,}: {', '.join(map(str, rows[:SHOWN_ROWS]))}{more}"


def _shown(estimate: Estimate) -> tuple[str, str]:
    return f"{estimate.value:.4g}", "exact" if estimate.exact else f"± {estimate.error:.1g}"


def _plain(value: Any) -> Any:
    """Dataclasses, arrays and tuples as dictionaries and lists."""
    if isinstance(value, OverlapReport):
        return value.to_dict()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, np.ndarray):
        return value.tolist()
    return list(value) if isinstance(value, tuple) else value
