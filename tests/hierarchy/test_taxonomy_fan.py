"""The start of embeddings in the plane: subtrees side by side, and what training makes of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from leafward.config import replace
from leafward.engine import RunDirectory
from leafward.errors import UsageError
from leafward.hierarchy import Taxonomy
from leafward.hierarchy.embedding import TaxonomyEmbedding
from leafward.hierarchy.fan import NOISE, REACH, angles, fan, leaves_below
from leafward.systems.taxonomy import embed as training
from leafward.systems.taxonomy.config import Config

EDGES = [("r", None), ("a", "r"), ("b", "r"), ("a1", "a"), ("a2", "a"), ("a3", "a"), ("b1", "b"), ("c", "b1")]


def test_leaves_and_angles_by_hand():
    tax = Taxonomy.from_edges(EDGES)
    count = dict(zip(tax.names, leaves_below(tax).tolist(), strict=True))
    assert count == {"r": 4, "a": 3, "b": 1, "a1": 1, "a2": 1, "a3": 1, "b1": 1, "c": 1}
    at = dict(zip(tax.names, angles(tax) / (2 * np.pi), strict=True))
    assert at["r"] == pytest.approx(0.5)
    assert at["b"] == at["b1"] == at["c"]  # an only child stands behind its parent
    assert sorted(at[name] for name in ("a1", "a2", "a3", "c")) == pytest.approx([1 / 8, 3 / 8, 5 / 8, 7 / 8])
    assert at["a"] == pytest.approx(np.mean([at["a1"], at["a2"], at["a3"]]))


def test_subtrees_own_parts_of_the_circle_that_do_not_overlap():
    rng = np.random.default_rng(0)
    tax = Taxonomy.from_edges([("0", None), *((str(i), str(rng.integers(0, i))) for i in range(1, 300))])
    at, count = angles(tax), leaves_below(tax)
    half = np.pi * count / count[tax.root]
    for node in range(len(tax)):
        parent = tax.first_parent[node]
        if parent >= 0:
            assert abs(at[node] - at[parent]) + half[node] <= half[parent] + 1e-9
    leaves = np.sort(at[count == 1][np.isin(np.flatnonzero(count == 1), tax.leaves)])
    assert np.diff(leaves).min() == pytest.approx(2 * np.pi / len(tax.leaves))


def test_a_fan_is_as_long_as_the_depth_says_and_follows_the_seed():
    tax = Taxonomy.from_edges(EDGES)
    start = fan(tax, 3)
    assert torch.equal(start, fan(tax, 3))
    assert not torch.equal(start, fan(tax, 4))
    expected = torch.from_numpy(REACH * tax.depth / tax.depth.max()).float()
    assert (start.norm(dim=1) - expected).abs().max() < 5 * NOISE


@pytest.mark.parametrize("objective", ["distance", "cones"])
def test_a_small_tree_in_the_plane_is_disentangled_by_every_seed(tmp_path, objective):
    """From a random start three of four seeds ended at .944 (distance), all below 1 (cones)."""
    edges = [("r", None), ("a", "r"), ("b", "r"), ("a1", "a"), ("a2", "a"), ("b1", "b"), ("b2", "b")]
    tax = Taxonomy.from_edges(edges)
    for seed in range(4):
        config = replace(Config(dim=2), data="tree", seed=seed, objective=objective, device="cpu")
        run = RunDirectory.create(tmp_path / f"{seed}", config)
        scores = training.measure(config, tax, training.train(config, tax, run))
        assert scores["mean_average_precision"] == 1.0
        assert scores["radius_tau"] == 1.0


def test_a_start_of_another_shape_is_refused():
    with pytest.raises(UsageError, match=r"start must be \(5, 3\), got \(5, 2\)"):
        TaxonomyEmbedding(5, 3, start=torch.zeros(5, 2))
