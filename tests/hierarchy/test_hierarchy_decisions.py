"""Decisions against loops over their definitions."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from leafward.errors import UsageError
from leafward.hierarchy import Taxonomy, decide, decisions, metrics

from . import hierarchy_oracles as oracles

ZOO = Taxonomy.from_nested({"animal": {"dog": ["poodle", "corgi"], "cat": ["tabby", "manx"]}})


def random_case(size: int, dag: bool, seed: int):
    rng = np.random.default_rng(seed)
    tax = oracles.random_taxonomy(rng, size, dag)
    p = rng.dirichlet(np.full(len(tax.leaves), 0.5), 7)
    return tax, oracles.Brute(tax), p


def node_sums(tax: Taxonomy, brute: oracles.Brute, p: np.ndarray) -> np.ndarray:
    return np.array(
        [
            [sum(x for x, i in zip(row, tax.leaves, strict=True) if u in brute.ancestors(i)) for u in brute.up]
            for row in p
        ]
    )


cases = given(st.integers(2, 14), st.booleans(), st.integers(0, 10_000))


@cases
def test_node_probabilities_count_each_leaf_once(size, dag, seed):
    tax, brute, p = random_case(size, dag, seed)
    np.testing.assert_allclose(decide.node_probabilities(tax, p), node_sums(tax, brute, p), atol=1e-12)


@cases
def test_path_takes_the_best_child_each_time(size, dag, seed):
    tax, brute, p = random_case(size, dag, seed)
    sums = decide.node_probabilities(tax, p)
    for row, way in zip(sums, decide.path(tax, p), strict=True):
        node, expected = brute.root, [brute.root]
        while brute.down[node]:
            node = max(tax.children.of(node).tolist(), key=lambda i, row=row: row[i])
            expected.append(node)
        assert way[way >= 0].tolist() == expected
        assert (way[len(expected) :] == -1).all()
    assert metrics.consistency(tax, decide.path(tax, p)) == 1


@cases
def test_back_off_is_the_deepest_sure_node(size, dag, seed):
    tax, brute, p = random_case(size, dag, seed)
    sums = node_sums(tax, brute, p)

    def longest(i):
        return 1 + max(longest(j) for j in brute.up[i]) if brute.up[i] else 0

    for threshold in (0.2, 0.6, 0.9, 1.0):
        for row, answer in zip(sums, decide.back_off(tax, p, threshold), strict=True):
            sure = [i for i in brute.up if row[i] >= threshold or i == brute.root]
            best = max(longest(i) for i in sure)
            assert longest(answer) == best
            assert row[answer] == pytest.approx(max(row[i] for i in sure if longest(i) == best))


@cases
def test_expected_cost_is_the_least(size, dag, seed):
    tax, brute, p = random_case(size, dag, seed)
    for cost, price in (("distance", brute.distance), ("lca_height", brute.lca_height)):
        for answers in (None, np.arange(size)):
            allowed = tax.leaves if answers is None else answers
            table = np.array([[price(i, j) for j in allowed] for i in tax.leaves], float)
            chosen = decide.expected_cost(tax, p, cost, answers=answers)
            expected = p @ table
            paid = expected[np.arange(len(p)), [allowed.tolist().index(i) for i in chosen]]
            np.testing.assert_allclose(paid, expected.min(axis=1), atol=1e-9)
            assert (decide.expected_cost(tax, p, table, answers=answers) == chosen).mean() > 0.5  # but for ties


def test_large_taxonomies_use_sparse_masks(monkeypatch):
    tax, _, p = random_case(14, False, 1)
    answers = [decide.node_probabilities(tax, p), decide.expected_cost(tax, p, answers=np.arange(14))]
    monkeypatch.setattr(decisions, "DENSE_ENTRIES", 0)
    again = [decide.node_probabilities(tax, p), decide.expected_cost(tax, p, answers=np.arange(14))]
    for one, other in zip(answers, again, strict=True):
        np.testing.assert_allclose(one, other)


def test_better_mistakes():
    """Mass split between two dogs beats a single cat by cost and by path, though the cat is the likeliest leaf."""
    p = np.array([[0.33, 0.27, 0.4, 0.0]])
    names = lambda ids: [ZOO.names[i] for i in np.ravel(ids)]  # noqa: E731
    assert names(decide.leaf(ZOO, p)) == ["tabby"]
    assert names(decide.expected_cost(ZOO, p)) == ["poodle"]
    assert names(decide.path(ZOO, p)) == ["animal", "dog", "poodle"]
    assert names(decide.back_off(ZOO, p, 0.5)) == ["dog"]
    assert names(decide.back_off(ZOO, p, 0.9)) == ["animal"]
    assert decide.abstain(ZOO, p, 0.5).tolist() == [-1]
    assert names(decide.abstain(ZOO, p, 0.4)) == ["tabby"]
    assert names(decide.leaf(ZOO, p, classes=["manx", "tabby", "corgi", "poodle"])) == ["corgi"]
    assert names(decide.expected_cost(ZOO, p[:, [0, 2]] / 0.73, classes=["poodle", "tabby"])) == ["tabby"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_tensors_give_tensors(dtype):
    p = torch.tensor([[0.25, 0.25, 0.5, 0.0], [0.0, 0.0, 0.0, 1.0]]).to(dtype)
    for answer in (
        decide.leaf(ZOO, p),
        decide.back_off(ZOO, p, 0.4),
        decide.path(ZOO, p),
        decide.expected_cost(ZOO, p),
    ):
        assert isinstance(answer, torch.Tensor)
        assert answer.dtype == torch.int64
    assert decide.leaf(ZOO, p).tolist() == ZOO.ids(["tabby", "manx"]).tolist()
    assert decide.leaf(ZOO, p[:0]).shape == (0,)
    assert len(decide.path(ZOO, p[:0])) == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: decide.leaf(ZOO, np.full((2, 3), 1 / 3)), r"probabilities must be \(B, 4\)"),
        (lambda: decide.leaf(ZOO, np.array([[2.0, -1.0, 0.0, 0.0]])), "logits need a softmax"),
        (lambda: decide.leaf(ZOO, np.array([[np.nan, 1.0, 0.0, 0.0]])), "add up to 1"),
        (lambda: decide.leaf(ZOO, np.array([[1, 0, 0, 0]])), "floating point"),
        (lambda: decide.leaf(ZOO, np.full((1, 2), 0.5), classes=["dog", "manx"]), "'dog' is not a leaf"),
        (lambda: decide.leaf(ZOO, np.full((1, 2), 0.5), classes=["puma", "manx"]), "classes: 'puma' is not a node"),
        (lambda: decide.back_off(ZOO, np.full((1, 4), 0.25), 1.5), "threshold must lie between 0 and 1, got 1.5"),
        (lambda: decide.abstain(ZOO, np.full((1, 4), 0.25), -1), "threshold"),
        (lambda: decide.expected_cost(ZOO, np.full((1, 4), 0.25), "price"), "cost must be .* got 'price'"),
        (lambda: decide.expected_cost(ZOO, np.full((1, 4), 0.25), np.eye(3)), r"\(4, 4\), got \(3, 3\)"),
        (lambda: decide.expected_cost(ZOO, np.full((1, 4), 0.25), answers=[]), "at least one"),
        (lambda: decide.risk_coverage([0.5], [1.0, 2.0]), "one shape"),
        (lambda: decide.risk_coverage([np.nan], [1.0]), "finite"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(UsageError, match=message):
        call()


def test_risk_coverage_equals_definition():
    rng = np.random.default_rng(0)
    confidence, loss = rng.integers(0, 8, 60) / 8, rng.random(60)
    curve = decide.risk_coverage(torch.from_numpy(confidence), loss)
    assert curve.threshold.tolist() == sorted(set(confidence), reverse=True)
    for threshold, coverage, risk in zip(curve.threshold, curve.coverage, curve.risk, strict=True):
        answered = confidence >= threshold
        assert coverage == pytest.approx(answered.mean())
        assert risk == pytest.approx(loss[answered].mean())
    perfect = decide.risk_coverage([0.9, 0.8, 0.7, 0.1], [0, 0, 0, 1])
    assert perfect.at_risk(0.0) == 0.75
    assert perfect.area == pytest.approx(0.25 * 0.25)
    assert decide.risk_coverage([0.9], [1.0]).at_risk(0.5) == 0
