"""Layouts against closed forms: what is two-dimensional comes back, distances of trees, gradients of t-SNE."""

import numpy as np
import pytest
import torch

from leafward.explorer import tsne as tsne_module
from leafward.explorer.layout import (
    PAIRS,
    Layout,
    bent,
    flat_pca,
    hyperbolic_pca,
    hyperbolic_tsne,
    principal_axes,
    some_pairs,
)
from leafward.explorer.neighbours import Neighbours
from leafward.explorer.tree import LONGEST_EDGE, REACH, tree_layout
from leafward.explorer.tsne import _pull, _push, _radial, _with_perplexity, affinities, tsne
from leafward.geometry import Euclidean, Lorentz, PoincareBall
from leafward.hierarchy import Taxonomy

DISK = PoincareBall(1.0)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_tree(size: int, seed: int) -> Taxonomy:
    rng = np.random.default_rng(seed)
    return Taxonomy.from_edges([("0", None)] + [(str(i), str(rng.integers(0, i))) for i in range(1, size)])


def full_tree(branching: int, depth: int) -> Taxonomy:
    rows, last = [("r", None)], ["r"]
    for _ in range(depth):
        fresh = [(f"{name}.{i}", name) for name in last for i in range(branching)]
        rows += fresh
        last = [child for child, _ in fresh]
    return Taxonomy.from_edges(rows)


# PCA


@pytest.mark.parametrize("c", [1.0, 0.3])
@pytest.mark.parametrize("dim", [2, 12])
def test_points_of_a_plane_come_back_up_to_an_isometry(c: float, dim: int) -> None:
    manifold = Lorentz(c)
    flat = manifold.logmap0(manifold.random_uniform(200, 2, radius=4.0, generator=seeded(0)).double())
    turned = torch.linalg.qr(torch.randn(dim, dim, generator=seeded(1), dtype=torch.float64))[0][:, :2]
    points = manifold.expmap0(flat @ turned.T)
    layout = hyperbolic_pca(manifold, points)
    z = torch.from_numpy(layout.coordinates)
    assert layout.disk
    torch.testing.assert_close(DISK.cdist(z, z) / c**0.5, manifold.cdist(points, points), atol=1e-6, rtol=1e-6)
    first, second = some_pairs(200)
    found = bent(layout, manifold.dist(points[first], points[second]).numpy(), first, second)
    assert found is not None
    assert found[0].mean < 1e-6
    assert found[0].worst < 1 + 1e-5


def test_about_another_centre_it_is_the_same_up_to_an_isometry() -> None:
    manifold = Lorentz(0.7)
    points = manifold.random_uniform(100, 2, radius=5.0, generator=seeded(13))
    centre = manifold.expmap0(torch.tensor([2.0, -1.0]))
    z = torch.from_numpy(hyperbolic_pca(manifold, points, centre).coordinates)
    wanted = manifold.cdist(points.double(), points.double())
    torch.testing.assert_close(DISK.cdist(z, z) / 0.7**0.5, wanted, atol=1e-3, rtol=1e-3)
    radius = manifold.dist(points, centre.expand_as(points)).double()
    torch.testing.assert_close(DISK.dist0(z) / 0.7**0.5, radius, atol=1e-4, rtol=1e-4)


def test_the_radius_is_kept_in_many_dimensions() -> None:
    manifold = Lorentz(0.5)
    points = manifold.random_normal(300, 40, std=0.4, generator=seeded(2)).double()
    z = torch.from_numpy(hyperbolic_pca(manifold, points).coordinates)
    torch.testing.assert_close(DISK.dist0(z), 0.5**0.5 * manifold.dist0(points), atol=1e-7, rtol=1e-6)


def test_axes_are_those_of_the_singular_value_decomposition() -> None:
    x = torch.randn(100, 7, generator=seeded(3), dtype=torch.float64) * torch.linspace(3, 1, 7)
    wanted = torch.linalg.svd(x, full_matrices=False).Vh[:2].T
    found = principal_axes(x)
    torch.testing.assert_close((found * wanted).sum(dim=0).abs(), torch.ones(2, dtype=torch.float64))
    assert torch.equal(found, principal_axes(x))


def test_flat_pca_keeps_the_plane_and_scales_it() -> None:
    x = torch.randn(400, 2, generator=seeded(4)) * torch.tensor([3.0, 1.0]) + 5.0
    layout = flat_pca(x)
    z = torch.from_numpy(layout.coordinates)
    ratio = torch.pdist(z) / torch.pdist((x).double())
    assert float(ratio.max() / ratio.min()) == pytest.approx(1.0, abs=1e-4)
    assert not layout.disk
    assert float(torch.quantile(z.norm(dim=1), 0.99)) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("points", [torch.zeros(5, 3), torch.ones(5, 1), torch.eye(3)[[0, 0, 1, 1, 2]] * 30])
def test_degenerate_points_stay_finite_and_inside(points: torch.Tensor) -> None:
    manifold = Lorentz(1.0)
    curved = hyperbolic_pca(manifold, manifold.expmap0(points)).coordinates
    assert np.isfinite(curved).all()
    assert (np.linalg.norm(curved, axis=1) < 1).all()
    assert np.isfinite(flat_pca(points).coordinates).all()


def test_distortion_leaves_out_coinciding_pairs() -> None:
    layout = Layout(np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 3.0]]), False, "")
    first, second = np.array([0, 0, 1]), np.array([1, 2, 2])
    found = bent(layout, np.array([0.0, 6.0, 2 * 10**0.5]), first, second)
    assert found is not None
    assert found[1] == 2
    assert found[0].mean == pytest.approx(0.0, abs=1e-7)
    assert bent(layout, np.zeros(3), first, second) is None


def test_pairs_are_all_or_a_sample_of_different_points() -> None:
    first, second = some_pairs(20)
    assert len({tuple(sorted(pair)) for pair in zip(first, second, strict=True)}) == 190
    first, second = some_pairs(10_000)
    assert len(first) == PAIRS
    assert (first != second).all()


# Trees


@pytest.mark.parametrize("tax", [random_tree(60, 0), full_tree(3, 4), full_tree(40, 1)], ids=["random", "full", "star"])
def test_edges_are_of_one_length_and_do_not_cross(tax: Taxonomy) -> None:
    layout = tree_layout(tax)
    z = torch.from_numpy(layout.coordinates)
    child = np.flatnonzero(tax.first_parent >= 0)
    parent = tax.first_parent[child]
    step = min(LONGEST_EDGE, REACH / int(tax.depth.max()))
    assert DISK.dist(z[child], z[parent]).numpy() == pytest.approx(step, abs=1e-5)
    assert np.allclose(layout.coordinates[tax.root], 0.0)
    # In Klein's model geodesics are straight, so crossings are those of segments.
    klein = layout.coordinates * 2.0 / (1.0 + (layout.coordinates**2).sum(axis=1, keepdims=True))
    ends = np.stack([klein[parent], klein[child]], axis=1)
    for i in range(len(child)):
        for j in range(i):
            if len({child[i], parent[i], child[j], parent[j]}) == 4:
                assert not _cross(*ends[i], *ends[j])


def _cross(a: np.ndarray, b: np.ndarray, c: np.ndarray, d: np.ndarray) -> bool:
    def side(p: np.ndarray, q: np.ndarray, r: np.ndarray) -> float:
        return float((q[0] - p[0]) * (r[1] - p[1]) - (q[1] - p[1]) * (r[0] - p[0]))

    return side(a, b, c) * side(a, b, d) < 0 and side(c, d, a) * side(c, d, b) < 0


def test_distances_in_a_binary_tree_are_nearly_those_of_the_graph() -> None:
    tax = full_tree(2, 7)
    first, second = some_pairs(len(tax))
    found = bent(tree_layout(tax), tax.distance(first, second), first, second)
    assert found is not None
    assert found[0].mean < 0.05
    assert found[0].worst < 1.6


def test_points_that_coincide_but_for_rounding_are_no_stretched_pair() -> None:
    points = Lorentz(1.0).expmap0(torch.randn(40, 2, generator=seeded(0)))
    points = torch.cat([points, points[:1] + 3e-7])
    first, second = some_pairs(len(points))
    true = Lorentz(1.0).dist(points[first].double(), points[second].double()).numpy()
    found = bent(hyperbolic_pca(Lorentz(1.0), points), true, first, second)
    assert found is not None
    assert (found[0].worst < 1.001, found[1]) == (True, len(first) - 1)


def test_large_subtrees_get_more_room() -> None:
    names = [("r", None), ("big", "r"), ("small", "r"), ("other", "r")] + [(f"b{i}", "big") for i in range(50)]
    tax = Taxonomy.from_edges(names)
    place = tree_layout(tax).coordinates @ [1, 1j]
    small, other, first, last = (place[tax.names.index(name)] for name in ("small", "other", "b0", "b49"))
    # Arcs go by the square root of the leaves, so two single ones stand 2π / (√50 + 2) apart.
    assert abs(np.angle(small / other)) == pytest.approx(2 * np.pi / (50**0.5 + 2))
    assert abs(np.angle(first / last)) > abs(np.angle(small / other))


@pytest.mark.parametrize("length", [2, 400])
def test_a_chain_stays_inside_the_disk(length: int) -> None:
    tax = Taxonomy.from_edges([("0", None)] + [(str(i), str(i - 1)) for i in range(1, length)])
    radius = DISK.dist0(torch.from_numpy(tree_layout(tax).coordinates)).numpy()
    assert radius == pytest.approx(np.linspace(0, min(REACH, LONGEST_EDGE * (length - 1)), length), abs=1e-6)


def test_a_graph_is_drawn_by_first_parents() -> None:
    tax = Taxonomy.from_edges([("r", None), ("a", "r"), ("b", "r"), ("x", "a"), ("x", "b"), ("y", "x")])
    z = torch.from_numpy(tree_layout(tax).coordinates)
    up = tax.first_parent
    gaps = [float(DISK.dist(z[i], z[up[i]])) for i in range(len(tax)) if up[i] >= 0]
    assert gaps == pytest.approx([LONGEST_EDGE] * 4, abs=1e-6)


# t-SNE


def test_rows_have_the_wanted_perplexity() -> None:
    squared = torch.rand(20, 60, generator=seeded(5), dtype=torch.float64) * 9
    share = _with_perplexity(squared, 12.0)
    assert torch.exp(torch.special.entr(share).sum(dim=1)).numpy() == pytest.approx(12.0, abs=1e-6)
    assert (share.argmax(dim=1) == squared.argmin(dim=1)).all()


def test_affinities_are_symmetric_shares() -> None:
    manifold = Lorentz(1.0)
    near = Neighbours(manifold, manifold.random_normal(80, 5, generator=seeded(6)))
    first, second, p = affinities(near, perplexity=5.0)
    dense = torch.zeros(80, 80, dtype=p.dtype)
    dense[first, second] = p
    torch.testing.assert_close(dense, dense.T)
    assert float(dense.sum()) == pytest.approx(1.0)
    assert float(dense.diagonal().abs().max()) == 0.0


@pytest.mark.parametrize("space", [Lorentz(1.0), Euclidean()], ids=["lorentz", "euclidean"])
def test_the_gradient_is_that_of_the_loss(space: Lorentz | Euclidean, monkeypatch: pytest.MonkeyPatch) -> None:
    """Along random geodesics: d/ds KL(exp_y(s u)) and d/ds Σ(radius − r)² by central differences."""
    monkeypatch.setattr(tsne_module, "PARTNERS", 10**6)  # all partners: nothing is estimated
    near = Neighbours(Lorentz(1.0), Lorentz(1.0).random_normal(30, 6, generator=seeded(7)))
    first, second, p = affinities(near, perplexity=4.0)
    points = space.expmap0(torch.randn(30, 2, generator=seeded(8), dtype=torch.float64))
    target = torch.rand(30, generator=seeded(9), dtype=torch.float64) * 3

    def kl(y: torch.Tensor) -> torch.Tensor:
        kernel = 1.0 / (1.0 + space.dist(y[:, None], y[None]).square())
        q = kernel / (kernel.sum() - len(y))
        return (p * torch.log(p / q[first, second])).sum()

    def radial(y: torch.Tensor) -> torch.Tensor:
        return (space.dist0(y) - target).square().sum()

    slope = -4.0 * (_pull(space, points, first, second, p) - _push(space, points, seeded(0)))
    for seed, (loss, gradient) in enumerate([(kl, slope), (radial, _radial(space, points, target))] * 2):
        u = space.transport0(points, torch.randn(30, 2, generator=seeded(20 + seed), dtype=torch.float64))
        step = 1e-5
        difference = (loss(space.expmap(points, step * u)) - loss(space.expmap(points, -step * u))) / (2 * step)
        assert float(space.inner(points, gradient, u).sum()) == pytest.approx(float(difference), rel=1e-5)


def test_tsne_keeps_neighbours_better_than_pca_and_about_the_radius() -> None:
    manifold = Lorentz(1.0)
    centre = 2.0 * torch.nn.functional.normalize(torch.randn(8, 16, generator=seeded(10)), dim=1)
    tangent = centre.repeat_interleave(20, 0) + 0.15 * torch.randn(160, 16, generator=seeded(11))
    points = manifold.expmap0(tangent)
    near = Neighbours(manifold, points)
    start = hyperbolic_pca(manifold, points)
    layout = hyperbolic_tsne(near, start, lambda share: None)

    def kept(coordinates: np.ndarray) -> float:
        picture = Neighbours(manifold, manifold.from_poincare(torch.from_numpy(coordinates)).float())
        rows = torch.arange(160)
        a, b = near.of(rows, 10)[0], picture.of(rows, 10)[0]
        return float((a[:, :, None] == b[:, None]).any(dim=2).float().mean())

    assert kept(layout.coordinates) > 1.2 * kept(start.coordinates)
    radius = DISK.dist0(torch.from_numpy(layout.coordinates))
    assert float((radius - manifold.dist0(points)).abs().mean()) < 0.5


def test_tsne_tells_how_far_it_is_and_takes_very_few_points() -> None:
    manifold, told = Lorentz(1.0), []
    points = manifold.random_normal(3, 2, generator=seeded(12))
    found = tsne(Neighbours(manifold, points), points, manifold, None, steps=4, progress=told.append)
    assert told == [0.25, 0.5, 0.75, 1.0]
    assert torch.equal(found, tsne(Neighbours(manifold, points), points, manifold, None, steps=4))
    assert torch.isfinite(found).all()
