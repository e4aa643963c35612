"""Audit of a matrix: is it in superposition, and how do its rows overlap?

report = audit("path/to/checkpoint")
report.mean_squared_overlap, report.centred.participation_ratio, str(report.verdict), report.to_json()
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import numpy as np
import torch

from leafward.data.counts import read_counts
from leafward.errors import DataError, LeafwardError, UsageError
from leafward.measure.audit_pairs import BINS, Estimate, PairSums, regression_estimate
from leafward.measure.audit_report import AuditReport, Frequency, Histogram, Largest, OverlapReport, References, Summary
from leafward.measure.audit_verdict import judge
from leafward.measure.devices import compute_device
from leafward.measure.matrices import Target, open_matrix
from leafward.measure.matrix_files import Matrix
from leafward.measure.overlap import (
    SHUFFLE_ROWS,
    Centre,
    Overlaps,
    Scan,
    measure,
    scan,
    shuffled_squared_overlap,
    weighted_squared_overlap,
)
from leafward.measure.theory import etf_limit, random_overlap, welch_bound

LEAST_SAMPLE = 16

Counts = str | os.PathLike[str] | np.ndarray | torch.Tensor | Sequence[float]


def audit(
    target: Target,
    *,
    tensor: str | None = None,
    centre: bool = True,
    fold_norm: bool = False,
    token_counts: Counts | None = None,
    sample: int = 1024,
    exact: bool = False,
    device: str | torch.device | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> AuditReport:
    """Measure the overlaps of the rows of `target` (see `open_matrix`), streaming it in slices.

    `centre` also measures them with the mean row removed; `fold_norm` multiplies the final norm's gain into
    the rows; `token_counts` (n,) are frequencies of the rows, or a file of them in that order (see
    `data.counts.read_counts`); `sample` rows serve the estimates; `exact` computes these from all pairs instead
    (n²m FLOP).
    `device` defaults to CUDA where there is one. `progress(done, total)` is called as rows go by.
    """
    if sample < LEAST_SAMPLE:
        raise UsageError(f"sample must be at least {LEAST_SAMPLE} rows, got {sample}")
    where = compute_device(device)
    matrix = open_matrix(target, tensor=tensor, fold_norm=fold_norm)
    counts = None if token_counts is None else _read_counts(token_counts, matrix)
    advance = _Progress(progress, _work(matrix, 1 + centre, exact, counts is not None))

    scanned = scan(matrix, where, max(sample, SHUFFLE_ROWS), seed, advance)
    middle = Centre.of(scanned.mean)
    reports: list[OverlapReport] = []
    for view in (None, middle)[: 1 + centre]:
        overlaps = measure(matrix, scanned, view, probes=sample, exact=exact, advance=advance)
        reports.append(_overlap_report(matrix, scanned, overlaps, view, seed))
    raw, centred = reports[0], reports[1] if centre else None
    frequency = None
    if counts is not None:
        frequency = _frequency(matrix, scanned, counts, raw, middle if centre else None, advance)
    return _report(matrix, scanned, raw, centred, frequency, device=str(where), seed=seed)


def _report(
    matrix: Matrix,
    scanned: Scan,
    raw: OverlapReport,
    centred: OverlapReport | None,
    frequency: Frequency | None,
    *,
    device: str,
    seed: int,
) -> AuditReport:
    """All that was measured, with the verdict."""
    norms = scanned.norms.cpu().numpy()
    lengths = Summary.of(norms[norms > 0])
    represented = float((norms > lengths.mean / 2).mean())
    references = _references(raw.rows, matrix.width)
    return AuditReport(
        target=matrix.target,
        tensor=matrix.tensor,
        role=matrix.role,
        dtype=matrix.source.dtype,
        rows=matrix.rows,
        width=matrix.width,
        stored_rows=matrix.stored_rows,
        hidden_size=matrix.hidden_size,
        zero_rows=tuple(np.flatnonzero(norms == 0).tolist()),
        duplicate_rows=scanned.duplicate_rows,
        norm_folded=matrix.gain is not None,
        norms=lengths,
        represented=represented,
        raw=raw,
        centred=centred,
        references=references,
        frequency=frequency,
        verdict=judge(matrix.rows, matrix.width, represented, lengths, raw, centred, references),
        notes=matrix.notes,
        device=device,
        precision="rows and products in float32 (no TF32), sums in float64",
        seed=seed,
    )


class _Progress:
    """Counts rows over all passes and tells the caller's callback."""

    def __init__(self, callback: Callable[[int, int], None] | None, total: int) -> None:
        self.callback, self.total, self.done = callback, total, 0

    def __call__(self, rows: int) -> None:
        self.done += rows
        if self.callback is not None:
            self.callback(self.done, self.total)


def _work(matrix: Matrix, views: int, exact: bool, counted: bool) -> int:
    """Rows that go by in all passes: the scan, two per view, one per view for counts, and the Gram blocks."""
    rows = matrix.rows
    gram = sum(rows - start for start in range(0, rows, matrix.slice_rows)) if exact else 0
    return rows + views * (2 * rows + gram + (rows if counted else 0))


def _references(rows: int, width: int) -> References:
    mean, variance = random_overlap(width)
    limit = etf_limit(width)
    return References(mean, variance, welch_bound(rows, width), limit, rows <= limit)


def _overlap_report(
    matrix: Matrix, scanned: Scan, overlaps: Overlaps, centre: Centre | None, seed: int
) -> OverlapReport:
    """Turn sums over pairs into estimates with the per-row interference as control."""
    sums, partners = overlaps.pairs, overlaps.rows - 1
    index = sums.index.cpu().numpy()
    control = overlaps.interference[index]
    population = overlaps.interference[np.isfinite(overlaps.interference)]

    def estimate(values: torch.Tensor, scale: float) -> Estimate:
        return regression_estimate(values.double().cpu().numpy() / scale, control, population)

    fourth = estimate(sums.fourth, partners)
    variance = fourth.value - overlaps.mean_squared_overlap**2
    return OverlapReport(
        rows=overlaps.rows,
        width=matrix.width,
        left_out=overlaps.left_out,
        mean_overlap=overlaps.mean_overlap,
        mean_squared_overlap=overlaps.mean_squared_overlap,
        participation_ratio=overlaps.participation_ratio,
        effective_rank=overlaps.effective_rank,
        top_share=overlaps.top_share,
        fourth_moment=fourth,
        squared_overlap_variance=Estimate(max(0.0, variance), fourth.error, fourth.exact),
        mean_absolute_overlap=estimate(sums.absolute, partners),
        nearest_overlap=estimate(sums.nearest, 1),
        largest_overlap=_largest(sums, fourth.exact),
        histogram=_histogram(sums, overlaps.rows),
        shuffled=shuffled_squared_overlap(scanned, centre, seed),
        sampled_rows=len(index),
        interference=overlaps.interference,
    )


def _largest(sums: PairSums, exact: bool) -> Largest:
    if not len(sums.nearest):
        return Largest(float("nan"), (-1, -1), False)
    best = int(sums.nearest.argmax())
    value = min(1.0, float(sums.nearest[best]))
    return Largest(value, (int(sums.index[best]), int(sums.nearest_index[best])), exact)


def _histogram(sums: PairSums, rows: int) -> Histogram:
    """Shares of pairs; the error of a sampled one is that of a mean over probe rows, drawn from `rows`."""
    edges = np.linspace(-1, 1, BINS + 1)
    counts = sums.counts.double().cpu().numpy()
    if sums.whole:
        return Histogram(edges, counts / counts.sum(), np.zeros(BINS), True)
    share = counts / (rows - 1)
    probes = len(share)
    if probes < 2:
        return Histogram(edges, share.sum(0), np.full(BINS, np.nan), False)
    error = share.std(0, ddof=1) * np.sqrt((1 - probes / rows) / probes)
    return Histogram(edges, share.mean(0), error, probes == rows)


def _read_counts(given: Counts, matrix: Matrix) -> torch.Tensor:
    """Token counts (n,) as float64; counts for stored padding rows are cut off."""
    if isinstance(given, str | os.PathLike):
        try:
            given = read_counts(given)
        except LeafwardError as error:
            raise type(error)(f"token_counts: {error}") from error
    try:
        counts = torch.as_tensor(given).double().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"token_counts must be a list of numbers: {error}") from error
    if counts.shape not in ((matrix.rows,), (matrix.stored_rows,)):
        raise DataError(
            f"token_counts has shape {list(counts.shape)}; it needs one count for each of {matrix.rows} rows"
        )
    counts = counts[: matrix.rows]
    if not bool((counts.isfinite() & (counts >= 0)).all()) or int((counts > 0).sum()) < 2:
        raise DataError("token_counts must be finite and not negative, with at least two positive counts")
    return counts


def _frequency(
    matrix: Matrix,
    scanned: Scan,
    counts: torch.Tensor,
    raw: OverlapReport,
    centre: Centre | None,
    advance: Callable[[int], None],
) -> Frequency:
    device = scanned.norms.device
    share = (counts / counts.sum()).to(device)
    both = weighted_squared_overlap(matrix, share, device, None, advance)
    centred = None if centre is None else weighted_squared_overlap(matrix, share, device, centre, advance)
    norms, weight = scanned.norms.cpu().numpy(), counts.numpy()
    live, seen = norms > 0, (norms > 0) & (weight > 0)
    varied = seen.sum() > 1 and np.ptp(weight[seen]) > 0 and np.ptp(norms[seen]) > 0
    correlation = np.corrcoef(norms[seen], np.log(weight[seen]))[0, 1] if varied else np.nan
    drawn = np.average(raw.interference[live], weights=weight[live]) if weight[live].any() else np.nan
    return Frequency(
        tokens=float(counts.sum()),
        counted_rows=int((weight > 0).sum()),
        mean_squared_overlap=both,
        centred_mean_squared_overlap=centred,
        interference=float(drawn),
        norm_correlation=float(correlation),
    )
