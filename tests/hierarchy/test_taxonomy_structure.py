"""Structure of taxonomies against walks over their edges, on random trees and DAGs."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leafward.errors import LeafwardError, UsageError
from leafward.hierarchy import Taxonomy, taxonomy

from . import hierarchy_oracles as oracles

ZOO = {"animal": {"dog": {"poodle": None, "corgi": None}, "cat": ["tabby"]}}


@given(st.integers(1, 14), st.booleans(), st.integers(0, 10_000))
def test_structure_equals_walks(size, dag, seed):
    rng = np.random.default_rng(seed)
    tax = oracles.random_taxonomy(rng, size, dag)
    brute = oracles.Brute(tax)
    nodes = range(size)
    assert tax.root == brute.root
    assert tax.leaves.tolist() == [i for i in nodes if not brute.down[i]]
    assert tax.depth.tolist() == [brute.depth(i) for i in nodes]
    assert tax.height.tolist() == [brute.height(i) for i in nodes]
    for i in nodes:
        assert set(np.flatnonzero(tax.ancestors[[i]].toarray())) == brute.ancestors(i)
        assert set(tax.under(i)) == {j for j in nodes if i in brute.ancestors(j)}
    a, b = np.meshgrid(nodes, nodes)
    assert tax.distance(a, b).tolist() == [
        [brute.distance(i, j) for i, j in zip(*rows, strict=True)] for rows in zip(a, b, strict=True)
    ]
    assert tax.height[tax.lca(a, b)].tolist() == [
        [brute.lca_height(i, j) for i, j in zip(*r, strict=True)] for r in zip(a, b, strict=True)
    ]
    assert tax.entails(a, b).tolist() == [
        [i in brute.ancestors(j) for i, j in zip(*r, strict=True)] for r in zip(a, b, strict=True)
    ]


@given(st.integers(2, 14), st.booleans(), st.integers(0, 10_000))
def test_lca_is_the_lowest_and_order_is_topological(size, dag, seed):
    tax = oracles.random_taxonomy(np.random.default_rng(seed), size, dag)
    brute = oracles.Brute(tax)
    for i, j in np.random.default_rng(seed).integers(0, size, (8, 2)):
        low = int(tax.lca(i, j))
        shared = brute.ancestors(i) & brute.ancestors(j)
        assert low in shared
        assert not any(low in brute.ancestors(u) and u != low for u in shared)  # nothing common lies below it
    place = np.argsort(tax.order)
    assert all(place[j] < place[i] for i in range(size) for j in tax.parents.of(i))


@given(st.integers(1, 14), st.booleans(), st.integers(0, 10_000))
def test_paths_are_shortest_ways_from_the_root(size, dag, seed):
    tax = oracles.random_taxonomy(np.random.default_rng(seed), size, dag)
    for leaf, row in zip(tax.leaves, tax.paths(), strict=True):
        way = row[row >= 0]
        assert len(way) == tax.depth[leaf] + 1
        assert way[0] == tax.root
        assert way[-1] == leaf
        assert all(parent in tax.parents.of(child) for parent, child in itertools.pairwise(way))


def test_many_paths_do_not_overflow():
    """A ladder of diamonds has 2^40 paths from end to end; counts of paths must not leak into the closure."""
    pairs = [("j0", None)]
    for i in range(40):
        pairs += [(f"l{i}", f"j{i}"), (f"r{i}", f"j{i}"), (f"j{i + 1}", f"l{i}"), (f"j{i + 1}", f"r{i}")]
    tax = Taxonomy.from_edges(pairs)
    assert (tax.ancestors.data == 1).all()
    assert tax.ancestor_counts[tax.ids("j40")] == 121
    assert tax.distance("j0", "j40") == 80


def test_a_hundred_thousand_nodes():
    rng = np.random.default_rng(0)
    parent = (rng.random(100_000) * np.arange(100_000)).astype(int)
    tax = Taxonomy.from_edges([(str(i), str(parent[i]) if i else None) for i in range(100_000)])
    a, b = rng.integers(0, 100_000, (2, 2000))

    def ancestors(i):
        return {i} | (ancestors(parent[i]) if i else set())

    expected = [len(ancestors(i) ^ ancestors(j)) for i, j in zip(a, b, strict=True)]
    assert tax.distance([str(i) for i in a], [str(i) for i in b]).tolist() == expected


def test_a_chain_too_deep_for_the_closure_is_refused(monkeypatch):
    chain = Taxonomy.from_edges([(str(i), str(i - 1) if i else None) for i in range(5000)])
    assert chain.depth[-1] == 4999
    monkeypatch.setattr(taxonomy, "LARGEST_CLOSURE", 1000)
    with pytest.raises(LeafwardError, match="5,000 nodes"):
        _ = chain.ancestors


def test_names_and_numbers():
    tax = Taxonomy.from_nested(ZOO)
    assert tax.ids(["cat", "dog"]).tolist() == [tax.ids("cat"), tax.ids("dog")]
    assert tax.leaf_names == ["poodle", "corgi", "tabby"]
    assert "dog" in tax
    assert len(tax) == 6
    with pytest.raises(UsageError, match=r"'poodel' is not a node.*did you mean 'poodle'"):
        tax.ids(["dog", "poodel"])
    with pytest.raises(UsageError, match="node 6 is out of range"):
        tax.ids([0, 6])
    with pytest.raises(UsageError, match="float64"):
        tax.ids([0.5])
    with pytest.raises(UsageError, match="'dog' is not a leaf"):
        tax.leaf_ids(["dog"])
    with pytest.raises(UsageError, match="'tabby' is named 2 times"):
        tax.leaf_ids(["tabby", "tabby"])


def test_parts():
    tax = Taxonomy.from_nested(ZOO)
    assert set(tax.subtree("dog").names) == {"dog", "poodle", "corgi"}
    part = tax.restrict(["dog", "tabby"])
    assert set(part.names) == {"animal", "dog", "cat", "tabby"}
    assert set(part.leaf_names) == {"dog", "tabby"}
    diamond = Taxonomy.from_edges([("r", None), ("a", "r"), ("b", "r"), ("x", "a"), ("x", "b")])
    assert set(diamond.subtree("a").names) == {"a", "x"}
