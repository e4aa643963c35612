"""The sampler's distribution against dense sampling and closed forms, at fixed seeds."""

import numpy as np
import pytest
import torch
from scipy import stats

from leafward.errors import UsageError
from leafward.systems.superposition import frequencies
from leafward.systems.superposition.sampler import STEPS_PER_DRAW, Blocks, Stream


def rows_of(stream: Stream, batches: int) -> np.ndarray:
    return torch.cat([batch.dense() for batch in stream.training(0, batches)]).double().numpy()


@pytest.fixture(scope="module")
def spread() -> tuple[np.ndarray, np.ndarray]:
    """p from .001 to exactly 1 across the sparse and the dense route, and 160 000 rows of it."""
    p = np.array([1.0, 0.9, 0.31, 0.3, 0.25, 0.1, 0.03, 0.01, 0.001])
    return p, rows_of(Stream(p, 1, 1000, dtype=torch.float64), 160)


def test_marginals_are_exact(spread):
    p, x = spread
    counts = (x > 0).sum(0)
    assert counts[0] == len(x)
    for count, probability in zip(counts[1:], p[1:], strict=True):
        assert stats.binomtest(int(count), len(x), probability).pvalue > 1e-3


def test_values_are_uniform_on_0_2(spread):
    _, x = spread
    for column in range(x.shape[1]):
        values = x[:, column][x[:, column] > 0]
        assert stats.kstest(values, stats.uniform(0, 2).cdf).pvalue > 1e-3


def test_whole_joint_distribution_is_that_of_independent_features(spread):
    """χ² over all 2^5 patterns of five features, sparse and dense ones mixed, against the product of marginals."""
    p, x = spread
    chosen = [1, 2, 3, 4, 5]
    bits = (x[:, chosen] > 0).astype(int)
    patterns = np.bincount(bits @ (1 << np.arange(5)), minlength=32)
    each = ((np.arange(32)[:, None] >> np.arange(5)) & 1).astype(bool)
    expected = np.where(each, p[chosen], 1 - p[chosen]).prod(1) * len(x)
    assert stats.chisquare(patterns, expected).pvalue > 1e-3


def test_active_count_per_row_against_dense_sampling():
    p = frequencies("power:1", 200, density=3.0)
    sparse = (rows_of(Stream(p, 2, 500), 40) > 0).sum(1)
    dense = (np.random.default_rng(0).random((20_000, 200)) < p).sum(1)
    top = int(max(sparse.max(), dense.max()))
    table = np.stack([np.bincount(np.minimum(c, 9), minlength=min(top, 9) + 1) for c in (sparse, dense)])
    assert stats.chi2_contingency(table).pvalue > 1e-3


def test_activity_varies_between_batches_as_independent_cells_do():
    """The number of active cells of a batch is binomial: neither tied to its mean nor overdispersed."""
    stream = Stream(frequencies("uniform", 4, density=1.2), 3, 2000)
    active = [len(batch.values) for batch in stream.training(0, 320)]
    ratio = np.var(active, ddof=1) / (8000 * 0.3 * 0.7)
    assert 1e-3 < stats.chi2(319).cdf(319 * ratio) < 1 - 1e-3


def test_batches_are_a_function_of_seed_and_step():
    p = frequencies("power:1", 50)
    stream = Stream(p, 7, 32)
    whole = list(stream.training(0, 2 * STEPS_PER_DRAW + 3))
    again = list(Stream(p, 7, 32).training(STEPS_PER_DRAW - 2, STEPS_PER_DRAW + 5))
    for one, other in zip(whole[STEPS_PER_DRAW - 2 : STEPS_PER_DRAW + 5], again, strict=True):
        assert torch.equal(one.dense(), other.dense())
    assert not torch.equal(whole[0].dense(), whole[1].dense())
    assert not torch.equal(whole[0].dense(), next(Stream(p, 8, 32).training(0, 1)).dense())
    assert not torch.equal(whole[0].dense(), next(stream.fresh(1)).dense())


def test_transposed_order_holds_the_same_cells():
    batch = next(Stream(frequencies("power:1", 50), 7, 64).training(3, 4))
    columns = torch.repeat_interleave(torch.arange(50), batch.column_offsets.diff())
    x = torch.zeros(64, 50)
    x[batch.rows_by_column, columns] = batch.values_by_column
    assert torch.equal(x, batch.dense())
    rows = torch.repeat_interleave(torch.arange(batch.rows), batch.row_offsets.diff())
    assert torch.equal(rows * 50 + batch.columns, batch.cells)
    totals = torch.zeros(batch.rows).index_add_(0, rows, batch.shares)
    torch.testing.assert_close(totals, batch.row_shares)
    torch.testing.assert_close(totals, torch.full((batch.rows,), 1 / batch.rows))
    assert batch.offsets.tolist() == batch.row_offsets.tolist()


@pytest.mark.parametrize(("law", "density"), [("power:1", 1.0), ([1.0] + [0.2] * 29, None), ("uniform", 1e-6)])
def test_padded_batches_hold_the_same_data_in_one_shape(law, density):
    p = frequencies(law, 30, density)
    plain, padded = Stream(p, 9, 64), Stream(p, 9, 64, pad=True)
    shapes = set()
    for one, other in zip(plain.training(0, 64), padded.training(0, 64), strict=True):
        assert torch.equal(one.dense(), other.dense())
        assert other.rows + other.empty == 64
        assert other.rows > other.active == one.active
        shapes.add((other.rows, len(other.cells)))
    assert len(shapes) == 1


def test_a_batch_too_large_for_the_padding_keeps_its_own_shape():
    p = frequencies("power:1", 30)
    stream = Stream(p, 9, 64, pad=True)
    plain = list(Stream(p, 9, 64).training(0, 32))
    stream._capacity = (int(np.median([batch.rows for batch in plain])), 1000)
    padded = list(stream.training(0, 32))
    assert {batch.like(padded[0]) for batch in padded} == {True, False}
    for one, other in zip(plain, padded, strict=True):
        assert torch.equal(one.dense(), other.dense())
        assert len(other.values[other.values > 0]) == len(one.values)


def test_fixed_data_set_gives_only_its_rows_and_all_alike():
    p = frequencies("power:1", 40, density=2.0)
    stream = Stream(p, 4, 500, dataset_rows=6)
    seen: dict[tuple, int] = {}
    for batch in stream.training(0, 24):
        for row in batch.dense().tolist():
            seen[tuple(row)] = seen.get(tuple(row), 0) + 1
    assert 2 <= len(seen) <= 6
    counts = np.array([count for row, count in seen.items() if any(row)])
    # Non-empty rows are all different (continuous values), so each is drawn with probability 1/6.
    for count in counts:
        assert stats.binomtest(int(count), 12_000, 1 / 6).pvalue > 1e-4
    fresh = {tuple(row) for row in next(stream.fresh(1)).dense().tolist() if any(row)}
    assert not fresh & set(seen)


class TestCorrelation:
    def correlations(self, p: np.ndarray, size: int, rho: float) -> tuple[np.ndarray, np.ndarray]:
        stream = Stream(p, 5, 1000, correlation=f"block:{size}:{rho}", dtype=torch.float64)
        active = (rows_of(stream, 160) > 0).astype(float)
        return active, np.corrcoef(active.T)

    @pytest.mark.parametrize("rho", [0.0, 0.3, 1.0])
    def test_marginals_and_correlation_for_equal_probabilities(self, rho):
        p = np.full(7, 0.2)
        active, found = self.correlations(p, 3, rho)  # blocks {0,1,2}, {3,4,5}, {6}
        for count in active.sum(0):
            assert stats.binomtest(int(count), len(active), 0.2).pvalue > 1e-3
        same = np.equal.outer(np.arange(7) // 3, np.arange(7) // 3)
        np.testing.assert_allclose(found, np.where(same, rho, 0) * (1 - np.eye(7)) + np.eye(7), atol=0.015)

    def test_marginals_and_stated_correlation_for_unequal_probabilities(self):
        p, rho = np.array([0.6, 0.3, 0.05, 0.4, 0.2]), 0.5
        active, found = self.correlations(p, 3, rho)
        for count, probability in zip(active.sum(0), p, strict=True):
            assert stats.binomtest(int(count), len(active), probability).pvalue > 1e-3
        deviation = np.sqrt(p * (1 - p))
        limit = (np.minimum.outer(p, p) - np.outer(p, p)) / np.outer(deviation, deviation)
        same = np.equal.outer(np.arange(5) // 3, np.arange(5) // 3)
        expected = np.where(same, rho * limit, 0.0)
        np.fill_diagonal(expected, 1.0)
        np.testing.assert_allclose(found, expected, atol=0.015)

    def test_pair_distribution_against_the_dense_construction(self):
        """χ² of the 8 patterns of one block against joint = comonotone, else independent, drawn densely."""
        p, rho, rows = np.array([0.5, 0.3, 0.1]), 0.4, 160_000
        active, _ = self.correlations(p, 3, rho)
        rng = np.random.default_rng(1)
        joint = rng.random(rows) < rho
        dense = np.where(joint[:, None], rng.random((rows, 1)) < p, rng.random((rows, 3)) < p)
        codes = 1 << np.arange(3)
        table = np.stack([np.bincount((a @ codes).astype(int), minlength=8) for a in (active, dense)])
        assert stats.chi2_contingency(table).pvalue > 1e-3

    @pytest.mark.parametrize("text", ["block", "block:0:0.5", "block:4:1.5", "block:4:-0.1", "ring:4:0.5", "block:a:b"])
    def test_bad_text_is_refused(self, text):
        with pytest.raises(UsageError, match="block:SIZE:RHO"):
            Blocks.parse(text)
