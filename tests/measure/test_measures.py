"""Hyperbolicity, curvature, Ricci curvature, dimension, spectra, duplicates and nulls against independent oracles."""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from scipy.sparse.csgraph import shortest_path

from leafward.errors import UsageError
from leafward.geometry import pairs
from leafward.measure import distances as dist
from leafward.measure.curvature import best_curvature, fit_curvature
from leafward.measure.dimension import gride, scales, two_nn
from leafward.measure.duplicates import called, clusters_of
from leafward.measure.hyperbolicity import (
    exact_delta,
    literature_curvature,
    mean_delta,
    quadruple_deltas,
    relative_delta,
)
from leafward.measure.measured import Measured, over_groups
from leafward.measure.nulls import NULLS, null_sample
from leafward.measure.ricci import Graph, edge_curvatures, neighbour_curvatures, neighbour_ricci
from leafward.measure.spectrum import effective_rank, fit_tail, goodness, participation_ratio, stable_rank


def steps(nodes: int, edges: np.ndarray) -> np.ndarray:
    adjacency = np.zeros((nodes, nodes))
    adjacency[edges[:, 0], edges[:, 1]] = 1
    return shortest_path(adjacency, directed=False, unweighted=True)


def random_tree(nodes: int, rng: np.random.Generator) -> np.ndarray:
    return np.array([(child, rng.integers(0, child)) for child in range(1, nodes)])


def cycle(nodes: int) -> np.ndarray:
    return np.array([(i, (i + 1) % nodes) for i in range(nodes)])


def grid(rows: int, columns: int) -> np.ndarray:
    at = np.arange(rows * columns).reshape(rows, columns)
    across = np.stack([at[:, :-1].ravel(), at[:, 1:].ravel()], 1)
    return np.concatenate([across, np.stack([at[:-1].ravel(), at[1:].ravel()], 1)])


# δ


def brute_delta(d: np.ndarray) -> np.ndarray:
    found = []
    for x, y, z, w in itertools.combinations(range(len(d)), 4):
        sums = sorted([d[x, y] + d[z, w], d[x, z] + d[y, w], d[x, w] + d[y, z]])
        found.append((sums[2] - sums[1]) / 2)
    return np.array(found)


def test_delta_of_trees_cycles_and_grids() -> None:
    rng = np.random.default_rng(0)
    assert exact_delta(steps(60, random_tree(60, rng))) == 0
    for quarter in (1, 2, 5):
        assert exact_delta(steps(4 * quarter, cycle(4 * quarter))) == quarter
    for rows, columns in ((3, 3), (3, 6), (5, 4)):
        assert exact_delta(steps(rows * columns, grid(rows, columns))) == min(rows, columns) - 1


def test_delta_is_the_brute_force_maximum_and_mean() -> None:
    points = np.random.default_rng(1).normal(size=(24, 3))
    d = np.linalg.norm(points[:, None] - points[None], axis=-1)
    brute = brute_delta(d)
    assert exact_delta(d) == pytest.approx(brute.max(), rel=1e-12)
    all_four = np.array(list(itertools.combinations(range(24), 4)))
    np.testing.assert_allclose(quadruple_deltas(d, all_four), brute, rtol=1e-12)


def test_sampled_delta_has_an_interval_that_holds_the_mean_over_all_quadruples() -> None:
    points = np.random.default_rng(2).normal(size=(640, 3))
    d = dist.euclidean(points)
    rng = np.random.default_rng(3)
    drawn = rng.integers(0, 640, (400_000, 4))
    mean = d.sum() / (640 * 639)
    truth = 2 * quadruple_deltas(d, drawn[[len(set(q)) == 4 for q in drawn.tolist()]]).mean() / mean
    low, high = mean_delta(d, seed=4).interval()  # pyright: ignore[reportGeneralTypeIssues]
    assert low < truth < high


def test_trees_are_told_from_noise_and_from_their_nulls() -> None:
    rng = np.random.default_rng(4)
    order = rng.permutation(600)
    tree = steps(600, random_tree(600, rng))[np.ix_(order, order)]
    assert mean_delta(tree).value == 0
    assert relative_delta(tree).value == 0
    assert not np.isfinite(literature_curvature(relative_delta(tree)).value)
    assert relative_delta(dist.euclidean(rng.normal(size=(600, 30)))).value > 0.05


def test_hyperbolic_points_keep_delta_below_ln_two() -> None:
    space = torch.randn(150, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 40
    d = pairs.distances(space, space, 1.0).numpy()
    assert 0.3 < exact_delta(d) <= np.log(2) + 1e-6


def test_a_published_delta_gives_the_published_curvature() -> None:
    assert literature_curvature(Measured(0.144, 0.01, 5)).value == pytest.approx(1)
    found = literature_curvature(Measured(0.288, 0.01, 5))
    assert found.value == pytest.approx(0.25)
    assert found.error == pytest.approx(0.01 * 2 * 0.144**2 / 0.288**3, rel=1e-3)


# curvature of best fit


@pytest.mark.parametrize("c", [0.2, 1.0, 3.0])
def test_points_of_a_hyperbolic_space_give_its_curvature(c: float) -> None:
    tangent = torch.randn(90, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    space = tangent / tangent.norm(dim=1, keepdim=True) * torch.sinh(tangent.norm(dim=1, keepdim=True)) / c**0.5
    d = pairs.distances(space, space, c).numpy()
    np.fill_diagonal(d, 0)
    mean = d.sum() / (90 * 89)
    found = fit_curvature(d, dimension=3)
    assert found.curvature / mean**2 == pytest.approx(-c, rel=0.05)
    assert found.stress < 0.02 < found.flat_stress


def test_points_of_a_sphere_and_of_flat_space_give_theirs() -> None:
    points = np.random.default_rng(5).normal(size=(80, 4))
    unit = points / np.linalg.norm(points, axis=1, keepdims=True)
    d = np.arccos(np.clip(unit @ unit.T, -1, 1))
    np.fill_diagonal(d, 0)
    assert fit_curvature(d, dimension=3).curvature / (d.sum() / (80 * 79)) ** 2 == pytest.approx(1, rel=0.05)
    flat = np.linalg.norm(points[:, None] - points[None], axis=-1)
    assert fit_curvature(flat, dimension=4).curvature == pytest.approx(0, abs=0.02)
    assert best_curvature(flat, dimension=4).value == pytest.approx(0, abs=0.05)
    with pytest.raises(UsageError, match="distances"):
        fit_curvature(np.zeros((6, 6)))


# Ollivier-Ricci curvature


def test_ricci_of_trees_cliques_cubes_and_the_torus() -> None:
    rng = np.random.default_rng(6)
    edges = random_tree(40, rng)
    graph = Graph.of_edges(40, edges)
    degree = np.bincount(edges.ravel())
    x, y = degree[edges].T
    np.testing.assert_allclose(edge_curvatures(graph, edges, 0.0), -2 * np.maximum(0, 1 - 1 / x - 1 / y), atol=1e-12)
    for n in (3, 5, 9):
        clique = np.array(list(itertools.combinations(range(n), 2)))
        found = edge_curvatures(Graph.of_edges(n, clique), clique, 0.0)
        np.testing.assert_allclose(found, (n - 2) / (n - 1), atol=1e-12)
    cube = np.array([(i, i ^ (1 << bit)) for i in range(16) for bit in range(4) if i < i ^ (1 << bit)])
    np.testing.assert_allclose(edge_curvatures(Graph.of_edges(16, cube), cube, 0.5), 1 / 4, atol=1e-12)
    at = np.arange(49).reshape(7, 7)
    torus = np.concatenate([np.stack([at.ravel(), np.roll(at, -1, axis).ravel()], 1) for axis in (0, 1)])
    np.testing.assert_allclose(edge_curvatures(Graph.of_edges(49, torus), torus, 0.5), 0, atol=1e-12)


@pytest.mark.parametrize("alpha", [0.0, 0.25, 0.5, 0.317])
def test_ricci_is_that_of_a_linear_program_with_all_distances(alpha: float) -> None:
    rng = np.random.default_rng(7)
    edges = np.array([pair for pair in itertools.combinations(range(25), 2) if rng.random() < 0.15])
    edges = np.concatenate([edges, cycle(25)])
    d, graph = steps(25, edges), Graph.of_edges(25, edges)
    chosen = edges[rng.permutation(len(edges))[:20]]
    truth = []
    for x, y in chosen:
        walks = []
        for node in (x, y):
            walk = np.where(d[node] == 1, (1 - alpha) / (d[node] == 1).sum(), 0.0)
            walk[node] = alpha
            walks.append(walk)
        margins = np.concatenate([np.kron(np.eye(25), np.ones((1, 25))), np.kron(np.ones((1, 25)), np.eye(25))])
        solved = linprog(d.ravel(), A_eq=margins, b_eq=np.concatenate(walks))
        truth.append(1 - solved.fun)
    np.testing.assert_allclose(edge_curvatures(graph, chosen, alpha), truth, atol=1e-7)


def test_the_walk_to_the_nearest_neighbours_agrees_with_the_graph_where_neighbours_are_mutual() -> None:
    ring = np.array([[(i - 2) % 30, (i - 1) % 30, (i + 1) % 30, (i + 2) % 30] for i in range(30)])
    edges = np.stack([np.repeat(np.arange(30), 4), ring.ravel()], 1)
    found = neighbour_curvatures(ring, edges)
    np.testing.assert_allclose(found, edge_curvatures(Graph.of_edges(30, edges), edges, 0.5), atol=1e-12)
    assert neighbour_ricci(ring) == pytest.approx(found.mean(), abs=1e-12)


def test_ricci_agrees_with_graph_ricci_curvature() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peer = pytest.importorskip("GraphRicciCurvature.OllivierRicci")
    networkx = pytest.importorskip("networkx")
    graph = networkx.random_partition_graph([12, 12, 12], 0.5, 0.1, seed=0)
    graph = graph.subgraph(max(networkx.connected_components(graph), key=len))
    graph = networkx.convert_node_labels_to_integers(graph)
    theirs = peer.OllivierRicci(graph, alpha=0.5, method="OTD", proc=1).compute_ricci_curvature_edges()
    edges = np.array(list(theirs))
    ours = edge_curvatures(Graph.of_edges(len(graph), edges), edges, 0.5)
    np.testing.assert_allclose(ours, list(theirs.values()), atol=1e-6)


# dimension


@pytest.mark.parametrize("dimension", [2, 5])
def test_dimension_of_a_cube_in_a_larger_space(dimension: int) -> None:
    rng = np.random.default_rng(8)
    turned = np.linalg.qr(rng.normal(size=(40, dimension)))[0]
    points = rng.random((3000, dimension)) @ turned.T
    _, nearest = dist.nearest(dist.euclidean(points), 32)
    assert two_nn(nearest).value == pytest.approx(dimension, rel=0.1)
    for found in scales(nearest).values():
        assert found.value == pytest.approx(dimension, rel=0.12)


@pytest.mark.parametrize("k", [1, 2, 8])
def test_the_multi_scale_estimate_recovers_the_dimension_of_its_own_law(k: int) -> None:
    # Given d, (r_k/r_2k)^d is the k-th smallest of 2k − 1 uniform numbers: Beta(k, k).
    rng = np.random.default_rng(9)
    nearest = np.ones((20_000, 2 * k))
    nearest[:, k - 1] = rng.beta(k, k, 20_000) ** (1 / 7)
    low, high = gride(nearest, k).interval(0.999)  # pyright: ignore[reportGeneralTypeIssues]
    assert low < 7 < high
    assert high - low < 0.6


def test_dimension_agrees_with_scikit_dimension() -> None:
    peer = pytest.importorskip("skdim")
    points = np.random.default_rng(10).normal(size=(1500, 6))
    _, nearest = dist.nearest(dist.euclidean(points).astype(np.float64), 2)
    theirs = peer.id.TwoNN(discard_fraction=0.1).fit(points).dimension_
    assert two_nn(nearest).value == pytest.approx(theirs, rel=0.05)


# spectrum


def test_ranks_are_those_of_a_singular_value_decomposition() -> None:
    x = np.random.default_rng(11).normal(size=(60, 20)) * np.geomspace(1, 0.01, 20)
    sigma = np.linalg.svd(x, compute_uv=False)
    assert stable_rank(sigma**2) == pytest.approx(np.linalg.norm(x) ** 2 / np.linalg.norm(x, 2) ** 2)
    share = sigma**2 / (sigma**2).sum()
    assert effective_rank(sigma**2) == pytest.approx(np.exp(-(share * np.log(share)).sum()))
    assert participation_ratio(sigma**2) == pytest.approx(1 / (share**2).sum())


def test_the_tail_of_a_power_law_is_found_and_not_ruled_out() -> None:
    rng = np.random.default_rng(12)
    values = np.concatenate([rng.random(500), 1 + rng.pareto(1.7, 1500)])
    found = fit_tail(values)
    assert abs(found.alpha - 2.7) < 4 * found.error
    assert goodness(values) > 0.1
    wrong = rng.gamma(8, size=3000)
    assert goodness(np.exp(-wrong)) < 0.1


def test_goodness_of_fit_rules_the_true_law_out_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(13)
    found = [goodness(1 + rng.pareto(1.5, 300), samples=50, seed=seed) for seed in range(40)]
    assert np.mean(np.array(found) < 0.1) < 0.25
    assert np.mean(found) > 0.3


def test_the_tail_agrees_with_the_powerlaw_package() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peer = pytest.importorskip("powerlaw")
        values = 1 + np.random.default_rng(14).pareto(1.7, 400)
        theirs = peer.Fit(values, verbose=False)
        ours = fit_tail(values)
        assert ours.start == pytest.approx(theirs.xmin, rel=1e-6)
        assert ours.alpha == pytest.approx(theirs.alpha, rel=1e-6)


# duplicates and nulls


def test_near_duplicates_are_found_by_name() -> None:
    rng = np.random.default_rng(15)
    x = rng.normal(size=(120, 30))
    x[7:40] = x[7] + 1e-3 * rng.normal(size=(33, 30))
    x[[50, 60]] = x[70]
    clusters = clusters_of(dist.euclidean(x))
    assert [each.tolist() for each in clusters] == [list(range(7, 40)), [50, 60, 70]]
    assert called(clusters[1], [f"t{i}" for i in range(120)]).title == "t50, t60, t70"
    assert called(clusters[0], None).title.startswith("row 7, row 8")
    assert not clusters_of(dist.euclidean(rng.normal(size=(200, 30))))


@pytest.mark.parametrize("shape", [(400, 40), (40, 90), (60, 50)])
def test_the_null_of_equal_spectrum_keeps_mean_and_singular_values(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(16)
    x = (rng.normal(size=shape) * np.geomspace(1, 0.05, shape[1]) + 0.3).astype(np.float32)
    null = null_sample("spectrum", x, 1)
    sigma, ours = (np.linalg.svd(each - each.mean(0), compute_uv=False) for each in (x, null))
    size = min(len(sigma), len(ours))
    np.testing.assert_allclose(ours[:size], sigma[:size], atol=2e-3 * sigma[0])
    if shape[0] > shape[1]:
        np.testing.assert_allclose(null.mean(0), x.mean(0), atol=1e-5)
        inner = (x - x.mean(0)).T @ (x - x.mean(0))
        np.testing.assert_allclose((null - null.mean(0)).T @ (null - null.mean(0)), inner, atol=1e-3 * inner.max())
    assert np.abs(null[:, :5] - x[:, :5]).max() > 0.1


def test_nulls_of_noise_give_the_figures_of_noise() -> None:
    x = np.random.default_rng(17).normal(size=(1024, 64)).astype(np.float32)
    d = dist.euclidean(x)
    own = mean_delta(d), relative_delta(d)
    for kind in NULLS:
        other = dist.euclidean(null_sample(kind, x, 2))
        for mine, theirs in zip(own, (mean_delta(other), relative_delta(other)), strict=True):
            error = (mine.error**2 + theirs.error**2) ** 0.5
            assert abs(mine.value - theirs.value) < 4 * error
    np.testing.assert_array_equal(np.sort(null_sample("shuffled", x, 2), axis=0), np.sort(x, axis=0))


def test_distances_and_neighbours_are_those_of_float64() -> None:
    y = np.random.default_rng(19).normal(size=(300, 12)) + 100
    truth = np.linalg.norm(y[:, None] - y[None], axis=-1)
    rms = np.sqrt((truth**2).sum() / (300 * 299))
    np.testing.assert_allclose(dist.euclidean(y), truth / rms, atol=2e-3)
    index, near = dist.nearest(truth, 5)
    np.fill_diagonal(truth, np.inf)
    np.testing.assert_array_equal(index, truth.argsort(1)[:, :5])
    np.testing.assert_allclose(near, np.sort(truth, 1)[:, :5])
    assert not dist.euclidean(np.full((5, 3), 2.0)).any()


def test_intervals_need_two_groups() -> None:
    assert over_groups([1.0]).interval() is None
    assert over_groups([]).interval() is None
    low, high = over_groups([1.0, 2.0, 3.0]).interval()  # pyright: ignore[reportGeneralTypeIssues]
    assert (low + high) / 2 == pytest.approx(2)
    assert high - low == pytest.approx(2 * 4.302653 / 3**0.5, rel=1e-5)
