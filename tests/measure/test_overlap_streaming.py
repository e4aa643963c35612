"""Streamed overlap figures against the float64 Gram matrix."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from leafward.errors import DataError
from leafward.measure.audit_pairs import BINS
from leafward.measure.matrix_files import Matrix, from_array
from leafward.measure.overlap import (
    Centre,
    Frame,
    Overlaps,
    Scan,
    full_float32,
    measure,
    scan,
    shuffled_squared_overlap,
    unit_rows,
    weighted_squared_overlap,
)

CPU = torch.device("cpu")


def quiet(rows: int) -> None:
    """A progress callback that does nothing."""


def streamed(x: torch.Tensor, slice_rows: int = 250, sample: int = 4096) -> tuple[Matrix, Scan]:
    matrix = replace(from_array(x), slice_rows=slice_rows)
    return matrix, scan(matrix, CPU, sample, 0, quiet)


def overlaps(x: torch.Tensor, *, centred: bool = False, exact: bool = False, slice_rows: int = 250) -> Overlaps:
    matrix, scanned = streamed(x, slice_rows)
    centre = Centre.of(scanned.mean) if centred else None
    return measure(matrix, scanned, centre, probes=4096, exact=exact, advance=quiet)


def gram(x: torch.Tensor, centred: bool = False) -> torch.Tensor:
    """Overlaps of all pairs of non-zero rows in float64."""
    x = x.double()
    x = x[x.abs().amax(1) > 0]
    if centred:
        x = x - x.mean(0)
    x = x / x.norm(dim=1, keepdim=True)
    return x @ x.T


def off_diagonal(g: torch.Tensor) -> torch.Tensor:
    return g[~torch.eye(len(g), dtype=torch.bool)]


def random_rows(n: int = 600, m: int = 24, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, m, generator=torch.Generator().manual_seed(seed))


def anisotropic() -> torch.Tensor:
    return random_rows() * torch.arange(1, 25).float().pow(-1.0) * 3


def cone() -> torch.Tensor:
    return random_rows() * 0.3 + 1


def duplicated() -> torch.Tensor:
    x = random_rows()
    x[40:60] = x[7]
    x[500] = -2 * x[8]
    return x


def with_zero_rows() -> torch.Tensor:
    x = random_rows() + 0.2
    x[[0, 249, 250, 599]] = 0
    return x


def extreme() -> torch.Tensor:
    """Rows whose squares underflow or overflow float32."""
    x = random_rows()
    x[::3] *= 1e-30
    x[1::3] *= 1e30
    return x


SHAPES = {f.__name__: f for f in (random_rows, anisotropic, cone, duplicated, with_zero_rows, extreme)}


# Rows of 1e30 and 1e-30 have no common centre.
VIEWS = [(shape, centred) for shape in SHAPES for centred in (False, True) if (shape, centred) != ("extreme", True)]


@pytest.mark.parametrize(("shape", "centred"), VIEWS)
@pytest.mark.parametrize("exact", [False, True])
def test_every_figure_equals_the_gram_matrix(shape: str, exact: bool, centred: bool) -> None:
    # All rows are probes (the sample is larger than n), so the pair sums must agree too, by either route.
    x = SHAPES[shape]()
    got, g = overlaps(x, exact=exact, centred=centred), gram(x, centred)
    n, o = len(g), off_diagonal(g)
    assert got.rows == n
    assert got.left_out == len(x) - n
    assert got.mean_overlap == pytest.approx(float(o.mean()), abs=2e-7)
    assert got.mean_squared_overlap == pytest.approx(float(o.square().mean()), rel=2e-6)
    assert got.participation_ratio == pytest.approx(n**2 / float(g.square().sum()), rel=2e-6)
    eigenvalues = np.linalg.eigvalsh(g.numpy()).clip(1e-300) / n
    assert got.effective_rank == pytest.approx(np.exp(-(eigenvalues * np.log(eigenvalues)).sum()), rel=1e-5)
    assert got.top_share == pytest.approx(eigenvalues[-1], rel=1e-5)

    kept = np.flatnonzero(np.isfinite(got.interference))
    alive = np.flatnonzero(x.abs().amax(1).numpy() > 0)
    np.testing.assert_array_equal(kept, alive)
    expected = (g.square().sum(1) - 1) / (n - 1)
    np.testing.assert_allclose(got.interference[kept], expected, rtol=1e-5, atol=1e-9)

    sums = got.pairs
    place = torch.full((len(x),), -1)
    place[alive] = torch.arange(n)
    order = place[sums.index]
    hollow = g - torch.diag(g.diagonal())
    torch.testing.assert_close(sums.fourth, (hollow**4).sum(1)[order], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(sums.absolute, hollow.abs().sum(1)[order], rtol=1e-5, atol=1e-4)
    nearest = hollow.abs().amax(1)[order]
    torch.testing.assert_close(sums.nearest.double(), nearest, rtol=1e-5, atol=1e-6)
    found = hollow.abs()[order, place[sums.nearest_index]]
    torch.testing.assert_close(found, nearest, rtol=1e-5, atol=1e-6)

    counts = sums.counts if exact else sums.counts.sum(0)
    assert int(counts.sum()) == n * (n - 1)
    reference = np.histogram(o.numpy(), bins=BINS, range=(-1, 1))[0]
    # An overlap within rounding of an edge may fall on its other side.
    assert np.abs(np.cumsum(counts.numpy()) - np.cumsum(reference))[:-1].max() <= 40


@given(
    st.integers(2, 40),
    st.integers(1, 12),
    st.integers(0, 10_000),
    st.floats(0, 3),
    st.integers(1, 50),
)
def test_moment_identities_hold_for_any_matrix(n: int, m: int, seed: int, shift: float, slice_rows: int) -> None:
    x = random_rows(n, m, seed) + shift
    got, o = overlaps(x, slice_rows=slice_rows), off_diagonal(gram(x))
    assert got.mean_overlap == pytest.approx(float(o.mean()), abs=1e-6)
    assert got.mean_squared_overlap == pytest.approx(float(o.square().mean()), rel=1e-5, abs=1e-6)
    assert np.mean(got.interference) == pytest.approx(got.mean_squared_overlap, rel=1e-4, abs=1e-6)
    assert got.participation_ratio <= min(n, m) * (1 + 1e-6)
    assert got.participation_ratio <= got.effective_rank * (1 + 1e-6)


def test_the_slice_size_does_not_matter() -> None:
    one, many = overlaps(cone(), slice_rows=8192), overlaps(cone(), slice_rows=37)
    assert one.mean_squared_overlap == pytest.approx(many.mean_squared_overlap, rel=1e-7)
    np.testing.assert_allclose(one.interference, many.interference, rtol=1e-5)


def test_wide_rows_use_several_strips() -> None:
    x = random_rows(300, 2500)
    got, o = overlaps(x), off_diagonal(gram(x))
    assert got.mean_squared_overlap == pytest.approx(float(o.square().mean()), rel=2e-6)


def test_an_orthonormal_basis_has_no_overlap_and_full_rank() -> None:
    got = overlaps(torch.eye(16))
    assert got.mean_squared_overlap == 0
    assert got.participation_ratio == pytest.approx(16)
    assert got.effective_rank == pytest.approx(16)
    assert np.abs(got.interference).max() == 0


def test_centring_survives_a_mean_far_larger_than_the_spread() -> None:
    x = random_rows() * 1e-5 + 1.3  # a mean rounded to one float32 is off by up to 1 % of the spread here
    got, o = overlaps(x, centred=True), off_diagonal(gram(x, centred=True))
    assert got.mean_overlap == pytest.approx(float(o.mean()), abs=1e-6)
    assert got.mean_squared_overlap == pytest.approx(float(o.square().mean()), rel=3e-6)


def test_rows_equal_to_the_mean_are_left_out_of_the_centred_view() -> None:
    x = torch.cat([random_rows(50, 6), -random_rows(50, 6)]) + 1
    x[0], x[50] = 1, 1
    got = overlaps(x, centred=True)
    assert got.left_out == 2
    assert np.isnan(got.interference[[0, 50]]).all()


def test_identical_rows_have_no_centred_view() -> None:
    with pytest.raises(DataError, match="0 rows that differ from the mean"):
        overlaps(torch.full((20, 5), 0.1), centred=True)


def test_the_callers_array_is_not_changed() -> None:
    x = cone()
    before = x.clone()
    overlaps(x, centred=True, exact=True)
    assert torch.equal(x, before)


def test_scan_counts_copies_and_zero_rows() -> None:
    x = duplicated()
    x[3] = 0
    x[5] = 0
    _, scanned = streamed(x)
    assert scanned.duplicate_rows == 20  # twenty copies of row 7; −2 × row 8 is another row
    assert (scanned.norms == 0).nonzero().squeeze(1).tolist() == [3, 5]
    torch.testing.assert_close(scanned.norms, x.double().norm(dim=1), rtol=1e-6, atol=0)
    torch.testing.assert_close(scanned.mean, x.double().sum(0) / (len(x) - 2), rtol=1e-12, atol=1e-12)


def test_scan_samples_rows_uniformly_and_by_seed() -> None:
    x = random_rows()
    matrix = replace(from_array(x), slice_rows=100)
    first, again, other = (scan(matrix, CPU, 50, seed, quiet) for seed in (1, 1, 2))
    assert torch.equal(first.sample, x[first.sample_index])
    assert torch.equal(first.sample_index, again.sample_index)
    assert not torch.equal(first.sample_index, other.sample_index)
    assert len(first.sample_index.unique()) == 50


def test_broken_rows_are_refused_with_their_number_and_places() -> None:
    x = random_rows()
    x[3, 2], x[420, 0] = torch.nan, torch.inf
    with pytest.raises(DataError, match=r"2 of 600 rows .*3, 420"):
        streamed(x)


def test_a_matrix_of_zero_rows_is_refused() -> None:
    x = torch.zeros(10, 4)
    x[2] = 1
    with pytest.raises(DataError, match="1 non-zero rows"):
        streamed(x)


def test_unit_rows_keep_zero_rows_at_zero() -> None:
    x = torch.tensor([[0.0, 0.0], [3e-40, 4e-40], [3e38, -1e38]])
    unit, alive = unit_rows(x)
    assert alive.tolist() == [False, True, True]
    torch.testing.assert_close(unit.norm(dim=1), torch.tensor([0.0, 1.0, 1.0]))


def test_weighted_overlap_equals_the_weighted_gram() -> None:
    x = with_zero_rows()
    weight = torch.rand(len(x), dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    matrix, _ = streamed(x)
    got = weighted_squared_overlap(matrix, weight, CPU, None, quiet)
    w = weight[x.abs().amax(1) > 0]
    pairs = torch.outer(w, w).fill_diagonal_(0)
    assert got == pytest.approx(float((pairs * gram(x).square()).sum() / pairs.sum()), rel=1e-5)


def test_equal_weights_give_the_plain_mean() -> None:
    matrix, _ = streamed(cone())
    got = weighted_squared_overlap(matrix, torch.full((600,), 2.0, dtype=torch.float64), CPU, None, quiet)
    assert got == pytest.approx(overlaps(cone()).mean_squared_overlap, rel=1e-6)


def test_shuffling_columns_keeps_the_mean_and_destroys_what_columns_say_together() -> None:
    # Rows along one random line: every pair overlaps fully, but the columns alone are just signs.
    generator = torch.Generator().manual_seed(0)
    x = torch.sign(torch.randn(2000, 1, generator=generator)) * torch.ones(1, 32)
    _, scanned = streamed(x)
    got = shuffled_squared_overlap(scanned, None, seed=5)
    assert overlaps(x).mean_squared_overlap == pytest.approx(1)
    assert got.value == pytest.approx(1 / 32, rel=0.02)
    # A shared mean is a matter of each column: shuffling keeps it.
    _, scanned = streamed(cone())
    assert shuffled_squared_overlap(scanned, None, 5).value == pytest.approx(
        overlaps(cone()).mean_squared_overlap, rel=0.02
    )
    assert shuffled_squared_overlap(scanned, None, 5) == shuffled_squared_overlap(scanned, None, 5)


def test_stated_error_of_the_shuffled_reference_covers_its_scatter() -> None:
    x = random_rows(20_000, 16) * torch.arange(1, 17).float().pow(-0.5) + 0.3
    matrix = from_array(x)
    values, errors = [], []
    for seed in range(12):
        result = shuffled_squared_overlap(scan(matrix, CPU, 1000, seed, quiet), None, seed)
        values.append(result.value)
        errors.append(result.error)
    assert 0.5 < np.std(values, ddof=1) / np.mean(errors) < 1.6


def test_frame_sums_in_float64() -> None:
    frame = Frame(2, CPU)
    for _ in range(100):
        frame.add(torch.tensor([[1.0, 0.0]]).repeat(2**18, 1))
    assert frame.symmetric()[0, 0] == 100 * 2**18  # beyond 2^24, where float32 stops counting


def test_products_are_full_float32_inside_and_the_setting_is_restored() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        with full_float32():
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
