"""Metrics against their definitions by loops, on 1,000 random trees and DAGs, and against closed forms."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats

from leafward.errors import UsageError
from leafward.hierarchy import Taxonomy, metrics

from . import hierarchy_oracles as oracles

ZOO = Taxonomy.from_nested({"animal": {"dog": ["poodle", "corgi"], "cat": ["tabby", "manx"]}})


@pytest.mark.parametrize("dag", [False, True])
def test_evaluate_equals_definitions_on_random_graphs(dag):
    rng = np.random.default_rng(int(dag))
    for _ in range(500):
        tax = oracles.random_taxonomy(rng, int(rng.integers(2, 13)), dag)
        answers = rng.integers(0, len(tax), (6, int(rng.integers(1, 4))))
        truth = rng.integers(0, len(tax), 6)
        answers[0, 0] = truth[0]
        expected = oracles.Brute(tax).report(answers.tolist(), truth.tolist())
        found = metrics.evaluate(tax, answers, truth).to_dict()
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert found[key] == (pytest.approx(value) if value is not None else None), key


def test_a_sibling_error_is_not_perfect():
    """With ancestor lists that leave out the leaf, two siblings look alike and a wrong answer scores 1."""
    report = metrics.evaluate(ZOO, ["corgi"], ["poodle"])
    assert report.precision == report.recall == report.f1 == 0.5
    assert report.jaccard == pytest.approx(1 / 3)
    assert report.tree_induced_error == 2
    assert report.lca_height == report.mistake_severity == 1
    assert report.level_accuracy == {1: 1.0, 2: 0.0}


def test_a_right_answer_costs_nothing():
    report = metrics.evaluate(ZOO, ["corgi"], ["corgi"])
    assert report.lca_height == report.tree_induced_error == 0
    assert report.f1 == report.accuracy == 1
    assert math.isnan(report.mistake_severity)
    assert report.to_dict()["mistake_severity"] is None
    assert report.distance_at_k == {}


def test_answers_above_the_leaf_and_none():
    report = metrics.evaluate(ZOO, ZOO.ids(["dog", "animal", "cat"]), ZOO.ids(["corgi", "corgi", "corgi"]))
    assert report.precision == pytest.approx((1 + 1 + 0) / 3)
    assert report.recall == pytest.approx((0.5 + 0 + 0) / 3)
    silent = metrics.evaluate(ZOO, torch.tensor([-1, int(ZOO.ids("corgi"))]), ["manx", "corgi"])
    assert (silent.count, silent.coverage, silent.accuracy) == (2, 0.5, 1.0)
    with pytest.raises(UsageError, match="no answer"):
        metrics.evaluate(ZOO, [-1], ["manx"])


@pytest.mark.parametrize(
    ("predicted", "true", "message"),
    [
        (["corgi"], ["corgi", "manx"], "predicted must be .* B = 2"),
        (["corgy"], ["manx"], "predicted: 'corgy' is not a node"),
        (["corgi"], ["minx"], "true: 'minx' is not a node"),
        ([], [], "true must be one node for each sample"),
        ([[[0]]], [0], "predicted must be"),
    ],
)
def test_bad_answers_are_refused(predicted, true, message):
    with pytest.raises(UsageError, match=message):
        metrics.evaluate(ZOO, predicted, true)


def test_consistency_equals_definition():
    rng = np.random.default_rng(5)
    for dag in (False, True):
        tax = oracles.random_taxonomy(rng, 12, dag)
        brute = oracles.Brute(tax)
        paths = rng.integers(-1, 12, (400, 3))
        for row, way in enumerate(tax.paths()[:, :3]):
            paths[row, : len(way)] = way
        steps = [[i for i in row if i >= 0] for row in paths.tolist()]
        good = [all(a != b and a in brute.ancestors(b) for a, b in itertools.pairwise(row)) for row in steps]
        assert 0 < sum(good) < len(good)
        assert metrics.consistency(tax, paths) == pytest.approx(np.mean(good))
    assert metrics.consistency(ZOO, [["dog", "corgi"], ["dog", "manx"], ["dog", "dog"]]) == pytest.approx(1 / 3)
    with pytest.raises(UsageError, match=r"paths must be \(B, L\)"):
        metrics.consistency(ZOO, ["dog"])


def test_auc_and_ap_equal_definitions_with_ties():
    rng = np.random.default_rng(0)
    for _ in range(50):
        labels = np.append(rng.integers(0, 2, 30), [0, 1])
        scores = rng.integers(0, 6, 32).astype(float)
        positive, negative = scores[labels == 1], scores[labels == 0]
        wins = np.mean([(p > n) + 0.5 * (p == n) for p in positive for n in negative])
        area, before = 0.0, 0.0
        for threshold in sorted(set(scores), reverse=True):
            chosen = labels[scores >= threshold]
            recall = chosen.sum() / labels.sum()
            area, before = area + (recall - before) * chosen.mean(), recall
        assert metrics.entailment_auc(scores, labels) == pytest.approx(wins)
        assert metrics.entailment_ap(torch.from_numpy(scores), labels) == pytest.approx(area)
    with pytest.raises(UsageError, match="both true and false"):
        metrics.entailment_auc([0.1, 0.2], [1, 1])
    with pytest.raises(UsageError, match="1 of 2 are not finite"):
        metrics.entailment_ap([0.1, np.nan], [1, 0])
    with pytest.raises(UsageError, match="one length"):
        metrics.entailment_auc([0.1], [1, 0])
    with pytest.raises(UsageError, match="0 or 1"):
        metrics.entailment_auc([0.1, 0.2], [1, 2])


def test_radius_tau_equals_scipy_on_ranks():
    radii = np.random.default_rng(0).normal(size=(200, 4)).round(1)  # with ties
    ranks = np.argsort(radii, axis=1, kind="stable")
    expected = np.mean([stats.kendalltau(row, [1, 2, 3, 4]).statistic for row in ranks])
    assert metrics.radius_tau(radii) == pytest.approx(expected)
    assert metrics.radius_tau(torch.tensor([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]])) == 0
    assert metrics.radius_tau([[1.0, 2.0, np.nan], [1.0, 3.0, 2.0]]) == pytest.approx((1 + 1 / 3) / 2)
    for bad in ([[1.0]], [[1.0, np.nan]], []):
        with pytest.raises(UsageError, match="radii must be"):
            metrics.radius_tau(bad)


def test_taxonomy_tau():
    assert metrics.taxonomy_tau(ZOO, ZOO.depth) == 1
    assert metrics.taxonomy_tau(ZOO, -ZOO.depth) == -1
    radii = ZOO.depth.astype(float)
    radii[ZOO.ids("poodle")] = 0.5  # of the order animal, dog, poodle one pair of three is wrong
    assert metrics.taxonomy_tau(ZOO, radii) == pytest.approx((3 + 1 / 3) / 4)
    with pytest.raises(UsageError, match=r"\(7,\)"):
        metrics.taxonomy_tau(ZOO, [1.0])


def test_caption_paths():
    chains = [[["a", "b", "c", "d"]], [["a", "a", "c", "d"], ["x", "y", "c", "z"]]]
    precision, recall = metrics.path_precision_recall([["a", "q", "d", "q"], ["a", "y", "m"]], chains)
    assert precision == pytest.approx((2 / 3 + 2 / 3) / 2)
    assert recall == pytest.approx((2 / 4 + 2 / 4) / 2)  # second: "a" hits level 1, "a" or "y" level 2
    assert metrics.path_precision_recall([[]], [[["a"]]]) == (0.0, 0.0)
    with pytest.raises(UsageError, match="one length"):
        metrics.path_precision_recall([["a"]], [])
    with pytest.raises(UsageError, match="list of chains"):
        metrics.path_precision_recall([["a"]], [["a", "b"]])
