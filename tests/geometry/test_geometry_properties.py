"""What must hold in every space: inverse maps, metric axioms, isometries, invariances."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from leafward.geometry import SPACES, Curvature, Euclidean, Lorentz, PoincareBall, Product, SpaceForm, cones, space_of

CURVATURES = st.sampled_from([1e-3, 0.1, 1.0, 7.0, 100.0])
SEEDS = st.integers(0, 10_000)
DIMS = st.sampled_from([1, 2, 5, 64])
MANIFOLDS = {
    "lorentz": lambda c: Lorentz(c),
    "poincare": lambda c: PoincareBall(c),
    "euclidean": lambda c: Euclidean(),
}


def _tangents(count: int, n: int, seed: int, reach: float) -> torch.Tensor:
    """`count` float64 tangents at the origin with lengths up to `reach`, one set for each of 7 rows."""
    generator = torch.Generator().manual_seed(seed)
    v = torch.randn(count, 7, n, generator=generator, dtype=torch.float64)
    return reach * v / v.norm(dim=-1, keepdim=True) * torch.rand(count, 7, 1, generator=generator, dtype=torch.float64)


def _close(a: torch.Tensor, b: torch.Tensor, tol: float = 1e-8) -> None:
    torch.testing.assert_close(a, b, rtol=tol, atol=tol * float(1.0 + b.abs().max()))


@pytest.mark.parametrize("name", MANIFOLDS)
@given(c=CURVATURES, seed=SEEDS, n=DIMS)
def test_maps_are_inverse(name, c, seed, n):
    space = MANIFOLDS[name](c)
    u, v = _tangents(2, n, seed, 2.0 / c**0.5)
    x, y = space.expmap0(u), space.expmap0(v)
    _close(space.logmap0(x), u)
    _close(space.expmap(x, space.logmap(x, y)), y)
    w = space.transport0(x, v)
    _close(space.logmap(x, space.expmap(x, w)), w, 1e-7)
    _close(space.norm(x, space.logmap(x, y)), space.dist(x, y))
    _close(space.dist0(x), space.origin_scale * u.norm(dim=-1))
    _close(space.project(x), x)


@pytest.mark.parametrize("name", MANIFOLDS)
@given(c=CURVATURES, seed=SEEDS, n=DIMS)
def test_distance_is_a_metric(name, c, seed, n):
    space = MANIFOLDS[name](c)
    x, y, z = (space.expmap0(v) for v in _tangents(3, n, seed, 3.0 / c**0.5))
    assert torch.equal(space.dist(x, y), space.dist(y, x))  # to the last digit, so that mirrored pairs rank equal
    assert torch.equal(space.dist(x.float(), y.float()), space.dist(y.float(), x.float()))
    assert torch.equal(space.dist(x, x), torch.zeros(7, dtype=torch.float64))
    slack = 1e-9 * (1 + space.dist(x, z))
    assert bool((space.dist(x, z) <= space.dist(x, y) + space.dist(y, z) + slack).all())
    _close(space.cdist(x, y), space.dist(x[:, None], y[None]), 1e-6)


@pytest.mark.parametrize("name", MANIFOLDS)
@given(c=CURVATURES, seed=SEEDS, n=DIMS, fraction=st.floats(0.0, 1.0))
def test_geodesics(name, c, seed, n, fraction):
    space = MANIFOLDS[name](c)
    x, y = (space.expmap0(v) for v in _tangents(2, n, seed, 2.0 / c**0.5))
    middle = space.geodesic(x, y, fraction)
    _close(space.dist(x, middle), fraction * space.dist(x, y), 1e-7)
    _close(space.dist(middle, y), (1 - fraction) * space.dist(x, y), 1e-7)
    _close(space.geodesic(x, x, fraction), x)


@pytest.mark.parametrize("name", MANIFOLDS)
@given(c=CURVATURES, seed=SEEDS, n=DIMS)
def test_transport_keeps_inner_products_and_carries_geodesics(name, c, seed, n):
    space = MANIFOLDS[name](c)
    a, b, p, q = _tangents(4, n, seed, 2.0 / c**0.5)
    x, y = space.expmap0(a), space.expmap0(b)
    u, v = space.transport0(x, p), space.transport0(x, q)
    _close(space.inner(x, u, v), space.origin_scale**2 * (p * q).sum(dim=-1), 1e-7)
    _close(space.inner(y, space.transport(x, y, u), space.transport(x, y, v)), space.inner(x, u, v), 1e-7)
    _close(space.transport(x, y, space.logmap(x, y)), -space.logmap(y, x), 1e-7)
    _close(space.transport(y, x, space.transport(x, y, u)), u, 1e-7)


@given(c=CURVATURES, seed=SEEDS, n=DIMS)
def test_the_two_models_are_isometric(c, seed, n):
    hyperboloid, ball = Lorentz(c), PoincareBall(c)
    u, v = _tangents(2, n, seed, 2.0 / c**0.5)
    x, y = hyperboloid.expmap0(u), hyperboloid.expmap0(v)
    p, q = hyperboloid.to_poincare(x), hyperboloid.to_poincare(y)
    _close(ball.dist(p, q), hyperboloid.dist(x, y))
    _close(ball.dist0(p), hyperboloid.dist0(x))
    _close(hyperboloid.from_poincare(p), x)
    _close(ball.to_lorentz(p), x)
    _close(ball.expmap0(u / 2), p)
    _close(ball.exterior_angle(p, q), hyperboloid.exterior_angle(x, y), 1e-6)
    _close(ball.half_aperture(p), hyperboloid.half_aperture(x), 1e-6)
    weights = torch.rand(7, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    _close(hyperboloid.to_poincare(hyperboloid.centroid(x, weights)), ball.centroid(p, weights), 1e-7)
    _close(hyperboloid.to_poincare(hyperboloid.geodesic(x, y, 0.3)), ball.geodesic(p, q, 0.3), 1e-7)


def _boost(direction: torch.Tensor, rapidity: float) -> torch.Tensor:
    """The Lorentz boost along a unit direction (n,) as an (n+1, n+1) matrix."""
    n = direction.numel()
    matrix = torch.eye(n + 1, dtype=torch.float64)
    cosh, sinh = torch.cosh(torch.tensor(rapidity)).item(), torch.sinh(torch.tensor(rapidity)).item()
    matrix[0, 0] = cosh
    matrix[0, 1:] = matrix[1:, 0] = sinh * direction
    matrix[1:, 1:] += (cosh - 1) * torch.outer(direction, direction)
    return matrix


@given(c=CURVATURES, seed=SEEDS, n=st.sampled_from([2, 5, 16]), rapidity=st.floats(-2.0, 2.0))
def test_lorentz_maps_commute_with_rotations_and_boosts(c, seed, n, rapidity):
    space = Lorentz(c)
    generator = torch.Generator().manual_seed(seed)
    x = space.expmap0(_tangents(1, n, seed, 2.0 / c**0.5)[0])
    weights = torch.rand(7, generator=generator, dtype=torch.float64)
    rotation, _ = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))
    turn = torch.block_diag(torch.ones(1, 1, dtype=torch.float64), rotation)
    ray = torch.randn(n, generator=generator, dtype=torch.float64)
    move = _boost(ray / ray.norm(), rapidity) @ turn
    moved = x @ move.T
    _close(space.dist(moved[:3], moved[3:6]), space.dist(x[:3], x[3:6]), 1e-7)
    _close(space.centroid(moved, weights), space.centroid(x, weights) @ move.T, 1e-7)
    _close(space.residual(moved[:3], moved[3:6], 0.7), space.residual(x[:3], x[3:6], 0.7) @ move.T, 1e-7)


@given(c=CURVATURES, seed=SEEDS, n=DIMS)
def test_lorentz_points_satisfy_their_equation(c, seed, n):
    space = Lorentz(c)
    u, v = _tangents(2, n, seed, 3.0 / c**0.5)
    x, y = space.expmap0(u), space.expmap0(v)
    for point in (x, space.lift(u), space.centroid(x), space.residual(x, y, 2.0), space.geodesic(x, y, 0.4)):
        _close(c * space.minkowski(point, point), -torch.ones_like(point[..., 0]))
    tangent = space.logmap(x, y)
    _close(space.minkowski(x, tangent), torch.zeros(7, dtype=torch.float64), 1e-7)
    _close(space.inner(x, tangent, tangent), space.minkowski(tangent, tangent), 1e-6)


@given(c=CURVATURES, seed=SEEDS, weight=st.floats(0.0, 5.0))
def test_residual_is_a_two_point_centroid(c, seed, weight):
    space = Lorentz(c)
    x, y = (space.expmap0(v) for v in _tangents(2, 4, seed, 2.0 / c**0.5))
    weights = torch.tensor([1.0, weight], dtype=torch.float64)
    _close(space.residual(x, y, weight), space.centroid(torch.stack([x, y], dim=-2), weights))


@given(c=CURVATURES, new=CURVATURES, seed=SEEDS)
def test_rescale_is_a_homothety(c, new, seed):
    old_space, new_space = Lorentz(c), Lorentz(new)
    x, y = (old_space.expmap0(v) for v in _tangents(2, 4, seed, 2.0 / c**0.5))
    p, q = old_space.rescale(x, new), old_space.rescale(y, new)
    _close(new_space.dist(p, q), (c / new) ** 0.5 * old_space.dist(x, y), 1e-7)
    ball = PoincareBall(c)
    _close(ball.rescale(old_space.to_poincare(x), new), new_space.to_poincare(p), 1e-7)


@given(c=CURVATURES, seed=SEEDS, n=DIMS, r=st.floats(-2.0, 2.0))
def test_mobius_operations(c, seed, n, r):
    ball = PoincareBall(c)
    x, y = (ball.expmap0(v) for v in _tangents(2, n, seed, 1.0 / c**0.5))
    zero = torch.zeros_like(x)
    _close(ball.mobius_add(zero, x), x)
    _close(ball.mobius_add(-x, ball.mobius_add(x, y)), y, 1e-7)  # left cancellation
    _close(ball.dist(x, y), ball.dist0(ball.mobius_add(-x, y)), 1e-7)
    _close(ball.mobius_scale(2.0, x), ball.mobius_add(x, x), 1e-7)
    _close(ball.dist0(ball.mobius_scale(r, x)), abs(r) * ball.dist0(x), 1e-7)
    matrix = torch.randn(3, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) / n
    scaled = ball.mobius_matvec(matrix, x)
    _close(ball.logmap0(scaled), ball.logmap0(x) @ matrix.T, 1e-7)
    _close(ball.conformal(x).squeeze(-1), 2 / (1 - c * (x * x).sum(dim=-1)))


@given(seed=SEEDS, n=st.sampled_from([2, 3, 16]))
def test_exterior_angle_about_a_root(seed, n):
    x, y, root = _tangents(3, n, seed, 5.0)
    got = cones.flat_exterior_angle(x, y, root)
    ray, step = x - root, y - x
    cosine = (ray * step).sum(dim=-1) / (ray.norm(dim=-1) * step.norm(dim=-1))
    _close(torch.cos(got), cosine, 1e-6)
    _close(cones.flat_exterior_angle(x, x + 2 * (x - root), root), torch.zeros(7, dtype=torch.float64), 1e-6)


@pytest.mark.parametrize("name", MANIFOLDS)
def test_points_behind_one_another_have_exterior_angle_zero(name):
    space = MANIFOLDS[name](1.0)
    v = _tangents(1, 5, 0, 1.0)[0]
    x, behind, before = space.expmap0(v), space.expmap0(1.5 * v), space.expmap0(0.5 * v)
    _close(space.exterior_angle(x, behind), torch.zeros(7, dtype=torch.float64), 1e-6)
    _close(space.exterior_angle(x, before), torch.full((7,), torch.pi, dtype=torch.float64), 1e-6)


def test_entailment_cone_contains_its_axis_and_shrinks_outward():
    for space in (Lorentz(1.0), PoincareBall(1.0)):
        v = torch.linspace(0.5, 4.0, 8, dtype=torch.float64)[:, None] * torch.tensor([[0.6, 0.8]], dtype=torch.float64)
        apertures = space.half_aperture(space.expmap0(v))
        assert bool((apertures.diff() < 0).all())
        near_origin = space.half_aperture(space.expmap0(v[:1] * 1e-9))
        assert float(near_origin) == pytest.approx(torch.pi / 2, abs=1e-6)


def test_centroid_takes_any_leading_dimensions_and_ignores_weightless_points():
    generator = torch.Generator().manual_seed(0)
    for space in (Lorentz(0.5), PoincareBall(0.5), Euclidean()):
        x = space.expmap0(torch.randn(2, 3, 4, 5, generator=generator, dtype=torch.float64) * 0.3)
        weights = torch.rand(2, 3, 4, generator=generator, dtype=torch.float64)
        full = space.centroid(x, weights)
        assert full.shape == (2, 3, x.shape[-1])
        _close(full[1, 2], space.centroid(x[1, 2], weights[1, 2]))
        weights[..., 3] = 0.0
        _close(space.centroid(x, weights), space.centroid(x[..., :3, :], weights[..., :3]))
        _close(space.centroid(x), space.centroid(x, torch.full((2, 3, 4), 0.37, dtype=torch.float64)))


def test_random_points_follow_their_law():
    generator = torch.Generator().manual_seed(0)
    for c in (0.25, 4.0):
        for n in (1, 2, 3):
            for space in (Lorentz(c), PoincareBall(c)):
                radius = 1.5
                r = space.dist0(space.random_uniform(40_000, n, radius=radius, generator=generator)).double()
                assert float(r.max()) <= radius * (1 + 1e-5)
                half = _ball_volume(n, c, 0.7 * radius) / _ball_volume(n, c, radius)
                assert float((r < 0.7 * radius).double().mean()) == pytest.approx(half, abs=0.01)
    flat = Euclidean().random_uniform(40_000, 3, radius=2.0, generator=generator).norm(dim=-1)
    assert float((flat < 1.0).double().mean()) == pytest.approx(1 / 8, abs=0.01)
    for space in (Lorentz(2.0), PoincareBall(2.0), Euclidean()):
        mean = space.expmap0(torch.tensor([0.3, -0.2]))
        x = space.random_normal(40_000, 2, mean=mean, std=0.2, generator=generator)
        spread = space.logmap(mean, x)
        assert float(space.inner(mean, spread, spread).mean()) == pytest.approx(2 * 0.2**2, rel=0.05)


def _ball_volume(n: int, c: float, radius: float) -> float:
    """Volume of a hyperbolic ball up to a constant, by fine quadrature."""
    r = torch.linspace(0, radius, 20_001, dtype=torch.float64)
    return float(torch.trapezoid(torch.sinh(c**0.5 * r) ** (n - 1), r))


def test_uniform_points_concentrate_at_the_rim_in_high_dimension():
    r = Lorentz(1.0).dist0(Lorentz(1.0).random_uniform(2000, 512, radius=6.0))
    assert 5.98 < float(r.median()) < 6.0001


def test_product_adds_squares():
    generator = torch.Generator().manual_seed(1)
    parts = [(Lorentz(0.5), 3), (Euclidean(), 2), (PoincareBall(2.0), 4)]
    space = Product(*parts)
    u, v = torch.randn(2, 6, 9, generator=generator, dtype=torch.float64) * 0.3
    x, y = space.expmap0(u), space.expmap0(v)
    assert x.shape == (6, 4 + 2 + 4)
    each = [m.dist(a, b) for (m, _), a, b in zip(parts, space.split(x), space.split(y), strict=True)]
    _close(space.dist(x, y), torch.stack(each).square().sum(dim=0).sqrt())
    _close(space.logmap0(x), u)
    _close(space.expmap(x, space.logmap(x, y)), y)
    _close(space.norm(x, space.logmap(x, y)), space.dist(x, y))
    _close(space.cdist(x, y).diagonal(), space.dist(x, y), 1e-6)
    _close(space.dist(x, space.geodesic(x, y, 0.25)), 0.25 * space.dist(x, y))
    sample = space.random_normal(40_000, 9, std=0.2, generator=generator)
    spread = torch.stack([m.dist0(a) for (m, _), a in zip(parts, space.split(sample), strict=True)], dim=-1)
    for (_, n), squared in zip(parts, spread.square().mean(dim=0), strict=True):
        assert float(squared) == pytest.approx(n * 0.2**2, rel=0.05)
    # no point of the interface that a product cannot keep
    assert not any(hasattr(space, name) for name in ("random_uniform", "half_aperture", "exterior_angle"))
    with pytest.raises(ValueError, match=r"last dimension must be 10 .* got 7"):
        space.dist(x[:, :7], y[:, :7])


def test_spaces_are_chosen_by_name():
    assert set(SPACES) == set(MANIFOLDS)
    for name, kind in SPACES.items():
        found = space_of(name, 0.3)
        assert type(found) is kind
        assert isinstance(found, SpaceForm)
        assert found.c == (None if name == "euclidean" else 0.3)
    learned = Curvature(2.0)
    assert next(space_of("lorentz", learned).parameters()) is learned.theta
    with pytest.raises(ValueError, match="geometry must be one of lorentz, poincare, euclidean, got 'sphere'"):
        space_of("sphere")
