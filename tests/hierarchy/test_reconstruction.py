"""Mean average precision, ranks and distortion against their definitions by loops."""

import itertools
import math

import numpy as np
import pytest
import torch

from leafward.errors import UsageError
from leafward.hierarchy import Taxonomy
from leafward.hierarchy.embedding import proper_ancestors
from leafward.hierarchy.graph import Rows
from leafward.hierarchy.reconstruction import distortion, reconstruction

from . import hierarchy_oracles as oracles

CHAIN = Taxonomy.from_edges([("a", None), ("b", "a"), ("c", "b"), ("x", "a"), ("y", "x")])


def precision_by_walking_the_list(scores: np.ndarray, node: int, wanted: set[int]) -> float:
    """Average precision as a reader of a ranked list computes it, no ties: precision at each hit."""
    order = [other for other in np.argsort(scores).tolist() if other != node]
    hits, total = 0, 0.0
    for place, other in enumerate(order, start=1):
        if other in wanted:
            hits += 1
            total += hits / place
    return total / len(wanted)


@pytest.mark.parametrize("dag", [False, True])
@pytest.mark.parametrize("block", [1, 1 << 23])
def test_ranking_equals_definitions_on_random_graphs(dag, block, monkeypatch):
    monkeypatch.setattr("leafward.hierarchy.reconstruction.BLOCK", block)
    rng = np.random.default_rng(int(dag))
    for _ in range(40):
        tax = oracles.random_taxonomy(rng, int(rng.integers(3, 25)), dag)
        brute = oracles.Brute(tax)
        table = rng.random((len(tax), len(tax)))
        found = reconstruction(proper_ancestors(tax), lambda nodes, table=table: torch.from_numpy(table)[nodes])
        nodes = [i for i in range(len(tax)) if i != tax.root]
        expected = {i: precision_by_walking_the_list(table[i], i, brute.ancestors(i) - {i}) for i in nodes}
        ranks = [
            1 + sum(table[i, w] < table[i, v] for w in range(len(tax)) if w not in brute.ancestors(i))
            for i in nodes
            for v in brute.ancestors(i) - {i}
        ]
        assert found.nodes.tolist() == nodes
        np.testing.assert_allclose(found.average_precision, [expected[i] for i in nodes])
        assert found.mean_average_precision == pytest.approx(np.mean(list(expected.values())))
        assert found.mean_rank == pytest.approx(np.mean(ranks))


def test_a_perfect_ranking_and_the_worst():
    related = proper_ancestors(CHAIN)
    near = torch.ones(5, 5)
    for node in range(5):
        near[node, related.of(node)] = 0.0
    best = reconstruction(related, lambda nodes: near[nodes])
    assert (best.mean_average_precision, best.mean_rank) == (1.0, 1.0)
    worst = reconstruction(related, lambda nodes: -near[nodes])
    assert worst.mean_rank > 2
    assert worst.mean_average_precision < 0.7


def test_the_node_itself_is_no_rival():
    """A node is nearest to itself; were it counted as unrelated, no ancestor could be first."""
    distance = torch.tensor(CHAIN.distance(*np.meshgrid(range(5), range(5), indexing="ij")), dtype=torch.float32)
    found = reconstruction(proper_ancestors(CHAIN), lambda nodes: distance[nodes], nodes=CHAIN.ids(["b"]))
    assert found.mean_average_precision == 1.0


def test_some_nodes_only():
    table = torch.rand(5, 5, generator=torch.Generator().manual_seed(0))
    related = proper_ancestors(CHAIN)
    whole = reconstruction(related, lambda nodes: table[nodes])
    part = reconstruction(related, lambda nodes: table[nodes], nodes=CHAIN.ids(["y", "a", "c"]))
    assert part.nodes.tolist() == sorted(CHAIN.ids(["y", "c"]).tolist())  # the root has no ancestor
    for node, value in zip(part.nodes, part.average_precision, strict=True):
        assert value == whole.average_precision[whole.nodes == node]
    with pytest.raises(UsageError, match="nothing to rank"):
        reconstruction(related, lambda nodes: table[nodes], nodes=CHAIN.ids(["a"]))
    with pytest.raises(UsageError, match="finite"):
        reconstruction(related, lambda nodes: table[nodes] / 0)


def test_any_relation_can_be_ranked():
    ring = Rows(np.array([0, 1, 2, 3]), np.array([1, 2, 0]))
    distance = torch.tensor([[0.0, 1.0, 2.0], [2.0, 0.0, 1.0], [2.0, 1.0, 0.0]])
    found = reconstruction(ring, lambda nodes: distance[nodes])
    assert found.average_precision.tolist() == [1.0, 1.0, 0.5]
    assert found.mean_rank == pytest.approx(4 / 3)


def test_distortion_equals_definitions():
    rng = np.random.default_rng(0)
    graph = rng.integers(1, 9, 300).astype(float)
    embedded = graph * rng.uniform(0.5, 2.0, 300)
    found = distortion(embedded, graph)
    tried = np.linspace(0.1, 3.0, 20_001)
    squares = [((scale * embedded / graph - 1) ** 2).sum() for scale in tried]
    assert found.scale == pytest.approx(tried[int(np.argmin(squares))], abs=2e-4)
    assert found.mean == pytest.approx(
        np.mean([abs(found.scale * d / g - 1) for d, g in zip(embedded, graph, strict=True)])
    )
    ratios = [d / g for d, g in zip(embedded, graph, strict=True)]
    assert found.worst == pytest.approx(max(a / b for a, b in itertools.permutations(ratios, 2)))


def test_distortion_is_nothing_for_scaled_distances():
    graph = np.array([1.0, 2.0, 5.0])
    found = distortion(torch.from_numpy(3 * graph), graph)
    assert found.mean == pytest.approx(0, abs=1e-12)
    assert (found.scale, found.worst) == (pytest.approx(1 / 3), pytest.approx(1))
    assert math.isinf(distortion([0.0, 1.0], [1.0, 1.0]).worst)
    for bad in (([1.0], [1.0, 2.0]), ([], []), ([1.0], [0.0]), ([np.nan], [1.0]), ([-1.0], [1.0])):
        with pytest.raises(UsageError, match="embedded"):
            distortion(*bad)
