"""Frequency laws and closed-form references."""

import json

import numpy as np
import pytest
import torch

from leafward.errors import DataError, UsageError
from leafward.measure import etf_limit, etf_overlap, random_overlap, welch_bound
from leafward.systems.superposition import frequencies, weak_loss, weak_loss_leading


def test_laws_have_their_shape_and_density():
    i = np.arange(1, 101)
    shapes = {"power:1.2": i**-1.2, "exponential:40": np.exp(-i / 40), "linear": 101 - i, "uniform": np.ones(100)}
    for law, shape in shapes.items():
        np.testing.assert_allclose(frequencies(law, 100, 0.7), 0.7 * shape / shape.sum())
    assert frequencies("power", 10) == pytest.approx(frequencies("power:1", 10))


def test_density_sweep_of_the_paper_reaches_p_one():
    """α = 1 scaled until p_1 = 1: E = H_1000 = 7.485, allowed although rounding may land above 1."""
    harmonic = float((1 / np.arange(1, 1001)).sum())
    p = frequencies("power:1", 1000, harmonic)
    assert p[0] == 1.0
    assert p.sum() == pytest.approx(7.485, abs=1e-3)


def test_given_vector_as_probabilities_or_as_weights():
    assert frequencies([1.0, 0.5, 0.25], 3, density=None).tolist() == [1.0, 0.5, 0.25]
    assert frequencies([4, 2, 2], 3).tolist() == [0.5, 0.25, 0.25]


@pytest.mark.parametrize("suffix", [".npy", ".txt", ".json", "-object.json"])
def test_counts_from_files(tmp_path, suffix):
    counts, path = [5, 0, 10, 1, 4], tmp_path / f"counts{suffix}"
    if suffix == ".npy":
        np.save(path, np.array(counts))
    elif suffix == ".txt":
        path.write_text("\n".join(map(str, counts)))
    else:
        named = {f"t{i}": count for i, count in enumerate(counts)}
        path.write_text(json.dumps(named if "object" in suffix else counts))
    assert frequencies(f"counts:{path}", 4) == pytest.approx([0.5, 0.25, 0.2, 0.05])
    assert frequencies(f"counts:{path}", 2) == pytest.approx([2 / 3, 1 / 3])
    with pytest.raises(DataError, match="4 non-zero counts"):
        frequencies(f"counts:{path}", 5)


@pytest.mark.parametrize(
    ("law", "density", "message"),
    [
        ("pwoer:1", 1.0, "did you mean 'power'"),
        ("power:steep", 1.0, "not a number"),
        ("power:nan", 1.0, "finite"),
        ("exponential:0", 1.0, "positive"),
        ("uniform:3", 1.0, "no parameter"),
        ("power:3", 2.0, "> 1"),
        ("uniform", 0.0, "density"),
        ("uniform", float("inf"), "density"),
        ([0.1, 0.2], 1.0, "shape"),
        ([0.1, 0.0, 0.2, 0.1], 1.0, "zero"),
        ([0.1, np.nan, 0.2, 0.1], 1.0, "not finite"),
        ([0.1, 1.5, 0.2, 0.1], None, "> 1"),
    ],
)
def test_bad_laws_are_refused(law, density, message):
    with pytest.raises(UsageError, match=message):
        frequencies(law, 4, density)


def test_bad_count_files_are_refused(tmp_path):
    with pytest.raises(UsageError, match="must end in"):
        frequencies("counts:a.csv", 4)
    with pytest.raises(DataError, match="cannot read"):
        frequencies(f"counts:{tmp_path / 'absent.npy'}", 4)
    np.save(tmp_path / "object.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match="cannot read"):
        frequencies(f"counts:{tmp_path / 'object.npy'}", 4)
    (tmp_path / "negative.txt").write_text("1\n-2\n")
    with pytest.raises(DataError, match="≥ 0"):
        frequencies(f"counts:{tmp_path / 'negative.txt'}", 2)


def test_random_overlap_against_simulation():
    torch.manual_seed(0)
    for m in (1, 2, 7, 30):
        a, b = torch.nn.functional.normalize(torch.randn(2, 200_000, m, dtype=torch.float64), dim=-1)
        squared = (a * b).sum(-1).square()
        mean, variance = random_overlap(m)
        assert float(squared.mean()) == pytest.approx(mean, rel=0.01)
        assert float(squared.var()) == pytest.approx(variance, rel=0.03, abs=1e-12)


def test_welch_bound_is_met_by_a_simplex_and_by_the_icosahedron():
    simplex = torch.eye(5, dtype=torch.float64) - 1 / 5  # five vectors in R^4
    golden = (1 + 5**0.5) / 2
    axes = [[0, 1, golden], [0, 1, -golden], [1, golden, 0], [1, -golden, 0], [golden, 0, 1], [-golden, 0, 1]]
    for vectors, m in ((simplex, 4), (torch.tensor(axes, dtype=torch.float64), 3)):
        units = torch.nn.functional.normalize(vectors, dim=1)
        squared = (units @ units.t()).square()[~torch.eye(len(units), dtype=torch.bool)]
        assert squared.tolist() == pytest.approx([welch_bound(len(units), m)] * len(squared))
    assert etf_limit(3) == 6
    assert welch_bound(3, 5) == welch_bound(1, 5) == 0.0


def test_reference_line_of_the_paper():
    widths = (10, 15, 25, 39, 63, 100)
    line = [0.0816, 0.0583, 0.0369, 0.0244, 0.0149, 0.00901]
    assert [etf_overlap(1000, m) for m in widths] == pytest.approx(line, rel=0.005)


def test_weak_loss_ignores_all_but_the_most_frequent():
    p = torch.tensor([0.1, 0.4, 0.2, 0.3])
    assert weak_loss(p, 2) == pytest.approx(4 / 3 * 0.3 - 0.1**2 - 0.2**2)
    assert weak_loss_leading(p, 2) == pytest.approx(4 / 3 * 0.3)
    assert weak_loss(p, 4) == weak_loss_leading(p, 4) == 0.0
    for theory in (weak_loss, weak_loss_leading):
        with pytest.raises(UsageError, match="represented"):
            theory(p, 5)
    with pytest.raises(UsageError, match="width"):
        welch_bound(5, 0)


def test_weak_loss_is_what_the_best_biases_leave_of_ignored_features():
    """A model that keeps m features exactly, the others' rows zero and biases searched numerically, on drawn data."""
    p = torch.from_numpy(frequencies("power:1", 6, density=2.0))  # p_1 = .82: the second term is large
    generator = torch.Generator().manual_seed(0)
    rows = 400_000
    x = 2 * torch.rand(rows, 6, generator=generator, dtype=torch.float64)
    x = x * (torch.rand(rows, 6, generator=generator, dtype=torch.float64) < p)
    for kept in (0, 2, 5):
        weights = torch.eye(6, kept, dtype=torch.float64)
        outputs = x @ weights @ weights.t()
        # Each bias of an ignored feature has a term of the loss to itself: the best of a fine grid.
        grid = torch.linspace(0, 1, 501, dtype=torch.float64)
        best = [0.0 if i < kept else float(grid[_losses(x[:, i], grid).argmin()]) for i in range(6)]
        per_row = (torch.relu(outputs + torch.tensor(best)) - x).square().sum(1)
        error = 4 * float(per_row.std()) / rows**0.5
        assert float(per_row.mean()) == pytest.approx(weak_loss(p, kept), abs=error)
        assert abs(weak_loss_leading(p, kept) - weak_loss(p, kept)) > 3 * error  # the test can tell them apart
        without = (torch.relu(outputs) - x).square().sum(1)
        assert float(without.mean()) == pytest.approx(
            weak_loss_leading(p, kept), abs=4 * float(without.std()) / rows**0.5
        )
        assert 1 - weak_loss(p, kept) / weak_loss_leading(p, kept) <= 0.75 * float(p[kept]) + 1e-12


def _losses(values: torch.Tensor, biases: torch.Tensor) -> torch.Tensor:
    """The mean squared error of each constant output ReLU(bias): values (B), biases (G) -> (G)."""
    outputs = torch.relu(biases)
    return values.square().mean() - 2 * outputs * values.mean() + outputs.square()


@pytest.mark.parametrize("probability", [0.01, 0.5, 1.0])
def test_weak_loss_of_one_feature_is_its_variance(probability):
    """E[x²] − E[x]² by integrating over v ~ U(0, 2); at p = 1 the variance 1/3 of the uniform distribution."""
    v = np.linspace(0, 2, 200_001)
    mean = probability * np.trapezoid(v, v) / 2
    variance = probability * np.trapezoid(v**2, v) / 2 - mean**2
    assert weak_loss(torch.tensor([probability], dtype=torch.float64), 0) == pytest.approx(variance, rel=1e-8)
