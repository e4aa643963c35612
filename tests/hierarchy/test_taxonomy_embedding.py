"""Losses and scores against loops over pairs, angles against the geometry's own, and that training orders a tree."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from leafward.errors import UsageError
from leafward.hierarchy import Taxonomy
from leafward.hierarchy.embedding import (
    GEOMETRIES,
    Closure,
    TaxonomyEmbedding,
    cone_loss,
    distance_loss,
    proper_ancestors,
)
from leafward.hierarchy.reconstruction import reconstruction

from . import hierarchy_oracles as oracles


@given(st.integers(2, 14), st.booleans(), st.integers(0, 10_000))
def test_batches_hold_every_ancestor_once(size, dag, seed):
    rng = np.random.default_rng(seed)
    tax = oracles.random_taxonomy(rng, size, dag)
    brute, closure = oracles.Brute(tax), Closure(tax)
    assert closure.pairs == sum(len(brute.ancestors(i)) - 1 for i in range(size))
    anchors = rng.permutation(size)[: int(rng.integers(1, size + 1))]
    batch = closure.batch(torch.from_numpy(anchors))
    assert batch.candidates[batch.own].tolist() == anchors.tolist()
    assert set(batch.candidates.tolist()) == set().union(*(brute.ancestors(int(i)) for i in anchors))
    pairs = list(zip(batch.owner.tolist(), batch.candidates[batch.place].tolist(), strict=True))
    assert sorted(pairs) == sorted((row, j) for row, i in enumerate(anchors.tolist()) for j in brute.ancestors(i) - {i})
    for row, i in enumerate(anchors.tolist()):
        assert set(batch.candidates[batch.hidden[row]].tolist()) == brute.ancestors(i)


def batch_and_values(seed: int = 0):
    tax = oracles.random_taxonomy(np.random.default_rng(seed), 12, dag=True)
    batch = Closure(tax).batch(torch.arange(0, 12, 2))
    generator = torch.Generator().manual_seed(seed)
    values = 3.0 * torch.rand(batch.hidden.shape, generator=generator, dtype=torch.float64)
    return batch, values.requires_grad_()


def test_distance_loss_equals_definition():
    batch, values = batch_and_values()
    table, hidden = values.tolist(), batch.hidden.tolist()
    total = 0.0
    for row, column in zip(batch.owner.tolist(), batch.place.tolist(), strict=True):
        near = np.exp(-table[row][column] / 0.7)
        others = sum(np.exp(-d / 0.7) for d, out in zip(table[row], hidden[row], strict=True) if not out)
        total -= np.log(near / (near + others))
    loss = distance_loss(values, batch, 0.7)
    assert loss.item() == pytest.approx(total)
    assert torch.autograd.gradcheck(lambda x: distance_loss(x, batch, 0.7), values)


def test_cone_loss_equals_definition():
    batch, values = batch_and_values(1)
    with torch.no_grad():
        values -= 1.0
    table, hidden = values.tolist(), batch.hidden.tolist()
    inside = sum(max(0, table[r][c]) for r, c in zip(batch.owner.tolist(), batch.place.tolist(), strict=True))
    outside = [
        max(0, 0.1 - energy)
        for row, out in zip(table, hidden, strict=True)
        for energy, o in zip(row, out, strict=True)
        if not o
    ]
    expected = inside + sum(outside) * len(batch.owner) / len(outside)
    assert cone_loss(values, batch, 0.1).item() == pytest.approx(expected)


def test_a_batch_without_a_negative_has_no_loss():
    """An only chain hides everything; the empty sum is the exponential of minus infinity, and no gradient is NaN."""
    tax = Taxonomy.from_edges([("a", None), ("b", "a"), ("c", "b")])
    batch = Closure(tax).batch(torch.tensor([int(tax.ids("c"))]))
    values = torch.rand(batch.hidden.shape, requires_grad=True)
    loss = distance_loss(values, batch, 1.0) + cone_loss(values, batch, 0.1) * 0
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(values.grad, torch.zeros_like(values))


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("objective", ["distance", "cones"])
def test_scores_of_all_pairs_equal_those_of_single_ones(geometry, objective):
    model = TaxonomyEmbedding(9, 3, geometry, objective, c=0.7, seed=1)
    with torch.no_grad():
        model.weight.normal_(generator=torch.Generator().manual_seed(2))
        table = model.scores(torch.arange(9))
        below, above = torch.meshgrid(torch.arange(9), torch.arange(9), indexing="ij")
        pairs = model.pair_scores(below.ravel(), above.ravel()).view(9, 9)
    off = ~torch.eye(9, dtype=torch.bool)
    torch.testing.assert_close(table[off], pairs[off], rtol=1e-4, atol=1e-4)


def test_tangent_vectors_are_as_long_as_the_radius():
    for geometry in GEOMETRIES:
        model = TaxonomyEmbedding(6, 4, geometry, c=0.5, seed=3)
        radius = model.manifold.dist0(model.points())
        torch.testing.assert_close(model.weight.norm(dim=1), radius)


@pytest.mark.parametrize("objective", ["distance", "cones"])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_gradients_are_finite_from_the_start(geometry, objective):
    tax = oracles.random_taxonomy(np.random.default_rng(4), 30, dag=True)
    model = TaxonomyEmbedding(30, 3, geometry, objective)
    with torch.no_grad():
        model.weight[:2] = 0.0  # two nodes at the origin, and so in one place
    model(Closure(tax).batch(torch.arange(30))).backward()
    assert model.weight.grad is not None
    assert torch.isfinite(model.weight.grad).all()
    assert model.weight.grad.abs().max() > 0


@pytest.mark.parametrize("geometry", ["lorentz", "poincare"])
@pytest.mark.parametrize(("objective", "lr"), [("distance", 0.1), ("cones", 0.03)])
def test_training_puts_ancestors_first(geometry, objective, lr):
    tax = Taxonomy.from_edges([("0", None), *((str(i), str((i - 1) // 3)) for i in range(1, 40))])
    closure, related = Closure(tax), proper_ancestors(tax)
    model = TaxonomyEmbedding(40, 4, geometry, objective, seed=0)

    def precision() -> float:
        return reconstruction(related, lambda nodes: model.scores(nodes).detach()).mean_average_precision

    before = precision()
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    for _ in range(150):
        optimizer.zero_grad()
        (model(closure.batch(torch.arange(40))) / closure.pairs).backward()
        optimizer.step()
    assert before < 0.5
    assert precision() > 0.9


def test_bad_arguments_are_named():
    with pytest.raises(UsageError, match="geometry must be one of lorentz, poincare, euclidean, got 'flat'"):
        TaxonomyEmbedding(3, 2, "flat")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="objective must be one of"):
        TaxonomyEmbedding(3, 2, "lorentz", "order")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="dim must be a whole number ≥ 1, got 0"):
        TaxonomyEmbedding(3, 0)
