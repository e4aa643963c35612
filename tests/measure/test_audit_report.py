"""The audit as a whole: the report, its references, verdict, token counts and progress."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

import leafward.systems.superposition
from leafward.errors import DataError, UsageError
from leafward.measure.audit_matrix import audit
from leafward.measure.matrix_files import Matrix, from_array
from leafward.measure.overlap import Centre, measure, scan


def random_rows(n: int = 2500, m: int = 32, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, m, generator=torch.Generator().manual_seed(seed))


def gram(x: torch.Tensor) -> torch.Tensor:
    unit = torch.nn.functional.normalize(x.double())
    return unit @ unit.T


def off_diagonal(g: torch.Tensor) -> torch.Tensor:
    return g[~torch.eye(len(g), dtype=torch.bool)]


def test_the_package_offers_the_function_and_no_module_hides_it() -> None:
    assert leafward.measure.audit is audit


def test_exact_and_estimated_figures_of_a_cone() -> None:
    x = random_rows() * 0.5 + 0.5
    report = audit(x, sample=256)
    assert report.centred is not None
    for view, data in ((report.raw, x), (report.centred, x - x.mean(0))):
        o = off_diagonal(gram(data))
        assert view.mean_overlap == pytest.approx(float(o.mean()), abs=1e-6)
        assert view.mean_squared_overlap == pytest.approx(float(o.square().mean()), rel=1e-5)
        assert view.sampled_rows == 256
        for estimate, truth in (
            (view.fourth_moment, o.pow(4).mean()),
            (view.squared_overlap_variance, o.square().var(correction=0)),
            (view.mean_absolute_overlap, o.abs().mean()),
        ):
            assert not estimate.exact
            assert 0 < estimate.error < 0.01 * float(truth)
            assert abs(estimate.value - float(truth)) < 4 * estimate.error
        assert not view.largest_overlap.exact
        assert view.largest_overlap.value <= float(o.abs().max()) + 1e-6
        i, j = view.largest_overlap.rows
        assert view.largest_overlap.value == pytest.approx(float(gram(data)[i, j].abs()), abs=1e-5)
        histogram = view.histogram
        truth = np.histogram(o.numpy(), histogram.edges)[0] / len(o)
        assert histogram.share.sum() == pytest.approx(1)
        off = np.abs(histogram.share - truth) / np.maximum(histogram.error, 1e-6)
        assert np.quantile(off, 0.95) < 3


def test_exact_mode_leaves_nothing_to_estimate() -> None:
    x = random_rows() * 0.5 + 0.5
    report, o = audit(x, exact=True), off_diagonal(gram(x))
    for estimate in (report.fourth_moment, report.squared_overlap_variance, report.mean_absolute_overlap):
        assert estimate.exact
    assert report.fourth_moment.value == pytest.approx(float(o.pow(4).mean()), rel=1e-5)
    assert report.largest_overlap.exact
    assert report.largest_overlap.value == pytest.approx(float(o.abs().max()), abs=1e-6)
    truth = np.histogram(o.numpy(), report.histogram.edges)[0] / len(o)
    np.testing.assert_allclose(report.histogram.share, truth, atol=1e-5)
    assert report.histogram.exact


def test_random_rows_meet_the_random_reference() -> None:
    report = audit(random_rows(6000, 48))
    assert report.mean_squared_overlap == pytest.approx(report.references.random_mean_squared_overlap, rel=0.01)
    variance = report.squared_overlap_variance.value
    assert variance == pytest.approx(report.references.random_squared_overlap_variance, rel=0.03)
    assert report.scaled_overlap == pytest.approx(1, rel=0.01)
    assert report.raw.shuffled.value == pytest.approx(1 / 48, rel=0.02)
    assert report.verdict.label == "not told apart from random rows"  # noise was called strong superposition
    assert report.verdict.geometry == "spread about as random directions are"


def test_a_shared_mean_is_not_taken_for_interference() -> None:
    # The published m·⟨o²⟩ of language-model heads is 5–99, not 1, because of one shared direction.
    x = random_rows() + 1.5
    report = audit(x)
    assert report.centred is not None
    assert report.scaled_overlap > 10
    assert report.centred.scaled_overlap == pytest.approx(1, rel=0.05)
    assert report.verdict.geometry == "anisotropic: a shared mean direction dominates"
    assert "one direction that all rows share" in str(report.verdict)
    assert report.participation_ratio == pytest.approx(1 / report.mean_squared_overlap, rel=0.01)


def test_few_directions_are_told_from_a_shared_mean() -> None:
    spectrum = torch.cat([torch.full((3,), 5.0), torch.ones(29)])
    assert audit(random_rows() * spectrum).verdict.geometry == "anisotropic: a few directions dominate"
    both = audit(random_rows() * spectrum + 9).verdict.geometry
    assert both == "anisotropic: a shared mean direction dominates, a few others follow"
    assert audit(random_rows() + 2, centre=False).verdict.geometry == "anisotropic"


def test_a_tight_frame_is_recognised() -> None:
    # Rows pushed apart to S = (n/m) I: the mean squared overlap is the Welch bound.
    basis = torch.linalg.qr(random_rows(96, 32).double()).Q
    for _ in range(200):
        basis = torch.nn.functional.normalize(basis)
        basis = torch.linalg.qr(basis).Q
    report = audit(basis)
    assert report.mean_squared_overlap == pytest.approx(report.references.welch_bound, rel=0.02)
    assert "tight frame" in report.verdict.geometry
    assert report.references.etf_possible
    assert report.references.etf_limit == 32 * 33 // 2


@pytest.mark.parametrize(
    ("n", "m", "live", "label"),
    [
        (20, 32, 20, "no superposition needed"),
        (400, 32, 30, "weak superposition"),
        (400, 32, 200, "partial superposition"),
        (100, 32, 100, "not told apart from random rows"),
        (400, 32, 400, "not told apart from random rows"),
    ],
)
def test_the_label_follows_the_represented_rows(n: int, m: int, live: int, label: str) -> None:
    x = torch.nn.functional.normalize(random_rows(n, m))
    x[live:] *= 1e-3
    report = audit(x)
    assert report.verdict.label == label
    assert report.represented == pytest.approx(live / n)


def test_rows_that_were_pushed_apart_or_together_are_in_superposition() -> None:
    x = random_rows(400, 32)
    basis = torch.linalg.qr(x[:, :32].double()).Q.float()
    assert audit(basis).verdict.label == "strong superposition"
    assert audit(x + 0.5).verdict.label == "strong superposition"
    assert audit((x + 0.5)[:100]).verdict.label == "partial superposition"
    for seed in range(8):
        assert audit(random_rows(1000, 24, seed)).verdict.label == "not told apart from random rows"


def test_zero_rows_and_copies_are_reported_and_zero_rows_left_out() -> None:
    x = random_rows(500, 16)
    x[[4, 77]] = 0
    x[100:103] = x[99]
    report = audit(x)
    assert report.zero_rows == (4, 77)
    assert next(row.value for row in report.table() if row.name == "rows left out (zero)") == "2: 4, 77"
    assert report.duplicate_rows == 3
    assert report.raw.rows == 498
    assert np.isnan(report.interference[[4, 77]]).all()
    kept = torch.cat([x[:4], x[5:77], x[78:]])
    assert report.mean_squared_overlap == pytest.approx(float(off_diagonal(gram(kept)).square().mean()), rel=1e-5)
    assert report.largest_overlap.value == pytest.approx(1, abs=1e-6)
    assert report.norms.min > 0


def test_json_and_table_say_the_same_as_the_report() -> None:
    report = audit(random_rows(600, 8), token_counts=np.arange(600) + 1.0)
    data = json.loads(report.to_json())
    assert data["raw"]["mean_squared_overlap"] == report.mean_squared_overlap
    assert data["centred"]["fourth_moment"]["exact"] is True  # every row was sampled
    assert data["references"]["welch_bound"] == pytest.approx((600 - 8) / (8 * 599))
    worst = data["raw"]["interference"]["highest"][0]
    assert worst["row"] == int(np.nanargmax(report.interference))
    assert data["verdict"]["label"] in str(report.verdict)
    table = {row.name: row for row in report.table()}
    row = table["mean squared overlap, raw"]
    assert row.value == f"{report.mean_squared_overlap:.4g}"
    assert row.error == "exact"
    assert "Welch bound" in row.reference
    assert "shuffled" in row.reference
    assert {"mean squared overlap, mean removed", "correlation of norm and ln(count)"} <= set(table)
    sampled = audit(random_rows(600, 8), sample=64)
    named = {row.name: row for row in sampled.table()}
    assert named["fourth moment, raw"].error.startswith("±")
    assert named["largest |overlap|, raw"].error == "at least, from 64 rows"


def test_json_has_no_nan_where_a_figure_has_no_value() -> None:
    x = torch.zeros(4000, 4)
    x[5], x[3000] = torch.tensor([1.0, 0, 0, 0]), torch.tensor([1.0, 1, 0, 0])
    data = json.loads(audit(x, sample=16).to_json())
    assert data["raw"]["mean_squared_overlap"] == pytest.approx(0.5, rel=1e-6)
    assert data["raw"]["rows"] == 2


def test_the_same_seed_gives_the_same_report() -> None:
    x = random_rows()
    first, again, other = (audit(x, sample=64, seed=seed) for seed in (3, 3, 4))
    assert first.to_json() == again.to_json()
    assert first.fourth_moment != other.fourth_moment
    assert first.mean_squared_overlap == other.mean_squared_overlap


def test_token_counts_weigh_pairs_and_correlate_with_norms(tmp_path: Path) -> None:
    x = random_rows(400, 16)
    counts = np.random.default_rng(0).zipf(1.5, 400).clip(max=10**6).astype(float)
    counts[:50] = 0
    x *= torch.from_numpy(np.log(counts + 2)).float()[:, None]
    np.save(tmp_path / "counts.npy", counts)
    frequency = audit(x, token_counts=tmp_path / "counts.npy").frequency
    assert frequency is not None
    g = gram(x).square()
    pairs = torch.from_numpy(np.outer(counts, counts)).fill_diagonal_(0)
    assert frequency.mean_squared_overlap == pytest.approx(float((pairs * g).sum() / pairs.sum()), rel=1e-5)
    drawn = np.average((g.sum(1) - 1) / 399, weights=counts)
    assert frequency.interference == pytest.approx(drawn, rel=1e-5)
    seen = counts > 0
    expected = stats.pearsonr(x.norm(dim=1).numpy()[seen], np.log(counts[seen])).statistic
    assert frequency.norm_correlation == pytest.approx(expected, rel=1e-5)
    assert frequency.counted_rows == 350
    assert frequency.tokens == counts.sum()


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        (np.ones(9), r"shape \[9\].*each of 10 rows"),
        (np.ones((10, 1)), r"shape \[10, 1\]"),
        (-np.ones(10), "not negative"),
        (np.full(10, np.nan), "finite"),
        (np.eye(10)[0], "at least two positive"),
    ],
)
def test_bad_token_counts_are_refused(counts: np.ndarray, message: str) -> None:
    with pytest.raises(DataError, match=message):
        audit(random_rows(10, 4), token_counts=counts)


def test_an_unreadable_counts_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "counts.npy").write_text("no array")
    with pytest.raises(DataError, match=r"token_counts.*counts\.npy"):
        audit(random_rows(10, 4), token_counts=tmp_path / "counts.npy")


def test_bad_options_are_refused() -> None:
    with pytest.raises(UsageError, match="sample must be at least 16"):
        audit(random_rows(20, 4), sample=3)
    with pytest.raises(UsageError, match="device='abacus'"):
        audit(random_rows(20, 4), device="abacus")
    with pytest.raises(UsageError, match="cpu or cuda"):
        audit(random_rows(20, 4), device="meta")
    with pytest.raises(UsageError, match=r"target must be .*not list"):
        audit([[1.0, 2.0]])  # type: ignore[arg-type]
    with pytest.raises(DataError, match="token_counts must be a list of numbers"):
        audit(random_rows(20, 4), token_counts=["many"] * 20)  # type: ignore[arg-type]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("centre", [False, True])
def test_progress_ends_at_its_total(exact: bool, counted: bool, centre: bool) -> None:
    calls: list[tuple[int, int]] = []
    counts = np.ones(9000) if counted else None
    audit(random_rows(9000, 4), exact=exact, centre=centre, token_counts=counts, progress=lambda *a: calls.append(a))
    done, totals = zip(*calls, strict=True)
    assert list(done) == sorted(done)
    assert set(totals) == {done[-1]}


class RecordedRows:
    """An in-memory matrix that notes what is read from it."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x, self.reads = x, []

    @property
    def shape(self) -> tuple[int, int]:
        return self.x.shape[0], self.x.shape[1]

    @property
    def dtype(self) -> str:
        return "float32"

    def read(self, start: int, stop: int) -> torch.Tensor:
        self.reads.append((start, stop))
        return self.x[start:stop].clone()


def test_the_matrix_is_read_slice_by_slice_once_per_pass() -> None:
    source = RecordedRows(random_rows(1000, 8))
    matrix = Matrix("x", "x", source, rows=990, slice_rows=300)
    scanned = scan(matrix, torch.device("cpu"), 100, 0, lambda rows: None)
    measure(matrix, scanned, Centre.of(scanned.mean), probes=64, exact=False, advance=lambda rows: None)
    assert source.reads == [(0, 300), (300, 600), (600, 900), (900, 990)] * 3


def test_folding_changes_directions() -> None:
    # Overlaps without the final norm's gain are not those that the logits see.
    x, gain = random_rows(300, 16), torch.linspace(0.1, 3, 16)
    matrix = replace(from_array(x), gain=gain)
    scanned = scan(matrix, torch.device("cpu"), 300, 0, lambda rows: None)
    folded = measure(matrix, scanned, None, probes=64, exact=False, advance=lambda rows: None)
    expected = float(off_diagonal(gram(x * gain)).square().mean())
    assert folded.mean_squared_overlap == pytest.approx(expected, rel=1e-5)
    assert expected > 1.2 * float(off_diagonal(gram(x)).square().mean())
