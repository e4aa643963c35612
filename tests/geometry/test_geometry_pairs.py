"""Distances and angles of all pairs: against mpmath at 50 digits, against single pairs, and by finite differences."""

from __future__ import annotations

import math

import pytest
import torch

import hyperbolic_reference as reference
from leafward.geometry import Euclidean, Lorentz, PoincareBall, cones, lorentz, pairs, poincare

SPACES = {"lorentz": Lorentz, "poincare": PoincareBall, "euclidean": lambda c: Euclidean()}
RADII = [1e-4, 1e-2, 1.0, 5.0, 15.0]


def _points(u: torch.Tensor, v: torch.Tensor, c: float) -> torch.Tensor:
    return pairs.distances(lorentz.expmap0(u, c), lorentz.expmap0(v, c), c)


def _ball_points(u: torch.Tensor, v: torch.Tensor, c: float) -> torch.Tensor:
    return pairs.ball_distances(poincare.expmap0(u / 2, c), poincare.expmap0(v / 2, c), c)


FORMS = {"points": _points, "ball points": _ball_points, "tangents": pairs.tangent_distances}


def _worst(found: torch.Tensor, u: torch.Tensor, v: torch.Tensor, c: float) -> float:
    """The largest relative error over all pairs."""
    each = torch.cartesian_prod(torch.arange(len(u)), torch.arange(len(v)))
    return reference.worst(found.flatten(), reference.distance(u[each[:, 0]], v[each[:, 1]], c))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("c", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("radius", RADII)
def test_random_pairs_in_float64(form, c, radius):
    u = reference.directions(5, 6, 1).double() * radius / c**0.5
    v = reference.directions(4, 6, 2).double() * radius / c**0.5 * torch.tensor([[0.2], [0.9], [1.0], [1.1]])
    # a float64 coordinate of the ball is known to 1e-16 of 1, that is to 1e-16 · e^ρ
    bound = 1e-13 + (1e-15 * math.exp(1.1 * radius) if form == "ball points" else 0.0)
    assert _worst(FORMS[form](u, v, c), u, v, c) < bound


@pytest.mark.parametrize("c", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("radius", RADII)
def test_random_pairs_in_float32(c, radius):
    u, v = (reference.directions(5, 6, seed) * (radius / c**0.5) for seed in (3, 4))
    for found in (_points(u, v, c), pairs.tangent_distances(u, v, c), pairs.tangent_distances(u, v, c, precise=False)):
        assert found.dtype == torch.float32
        assert _worst(found, u, v, c) < 2e-6


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("radius", [1e-4, 1e-2, 1.0, 5.0])
def test_near_pairs(form, radius):
    """What cancels is a rounding of S by 1e-16 sinh² ρ, and dS = ½ sinh(d) dd."""
    u = reference.directions(6, 3, 5).double() * radius
    v = u + 1e-3 * radius * reference.directions(6, 3, 6).double()
    exact = torch.tensor([float(d) for d in reference.distance(u, v, 1.0)], dtype=torch.float64)
    for dtype, rounding in ((torch.float64, 1e-15), (torch.float32, 1e-6)):
        error = (FORMS[form](u.to(dtype), v.to(dtype), 1.0).diagonal().double() - exact).abs()
        coordinates = 2e-16 if dtype == torch.float64 else 2e-7
        bound = rounding * exact + 4e-16 * math.sinh(radius) ** 2 / exact.sinh() + 4.0 * coordinates * math.sinh(radius)
        assert bool((error <= bound).all())


def test_near_the_origin_the_product_in_float32_will_do():
    """cosh d − 1 as a difference loses all digits there: 1e-8 beside 1."""
    u, v = (1e-4 * reference.directions(5, 6, seed) for seed in (7, 8))
    x, y = lorentz.expmap0(u, 1.0), lorentz.expmap0(v, 1.0)
    assert _worst(pairs.distances(x, y, 1.0, precise=False), u, v, 1.0) < 1e-6


@pytest.mark.parametrize("name", SPACES)
@pytest.mark.parametrize("c", [0.3, 1.0])
def test_values_and_gradients_are_those_of_single_pairs(name, c):
    space = SPACES[name](c)
    v = torch.randn(2, 30, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    v[:, 0], v[:, 1] = 0.0, v[:, 2]  # the origin, and two points in one place
    v.requires_grad_()
    x = space.expmap0(v)
    weight = torch.randn(2, 20, 30, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found, expected = space.cdist(x[:, :20], x), space.dist(x[:, :20, None], x[:, None])
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-5)  # points in one place are 1e-6 apart
    weight = weight * (expected > 1e-3)
    slopes = [torch.autograd.grad((weight * d).sum(), v, retain_graph=True)[0] for d in (found, expected)]
    torch.testing.assert_close(*slopes, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("form", FORMS)
def test_points_in_one_place_have_finite_gradients(form):
    v = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))
    v[0], v[1] = 0.0, v[2]
    v.requires_grad_()
    distances = FORMS[form](v, v, 0.7)
    distances.sum().backward()
    assert distances.diagonal().max() < 1e-6
    assert torch.isfinite(v.grad).all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("length", [1e-12, 1e-6])
def test_gradients_near_the_origin_are_unit_vectors(form, length):
    """cosh d − 1 as a difference is zero there, and so was its gradient."""
    u = torch.tensor([[0.6, 0.8]], dtype=torch.float64) * length
    u.requires_grad_()
    (slope,) = torch.autograd.grad(FORMS[form](u, torch.zeros_like(u), 1.0).sum(), u)
    torch.testing.assert_close(slope, torch.tensor([[0.6, 0.8]], dtype=torch.float64))


def test_far_tangents_saturate_and_keep_finite_gradients():
    for precise in (True, False):
        u = torch.tensor([[1e3, 0.0], [1e30, 1e30], [0.0, 0.0]], requires_grad=True)
        distances = pairs.tangent_distances(u, u, 1.0, precise)
        distances.sum().backward()
        assert torch.isfinite(distances).all()
        assert torch.isfinite(u.grad).all()
    u = torch.tensor([[300.0, 0.0], [0.0, 300.0]])  # where sinh would overflow in float32
    torch.testing.assert_close(pairs.tangent_distances(u, u, 1.0)[0, 1], torch.tensor(600.0 - math.log(2.0)))


@pytest.mark.parametrize("form", FORMS)
def test_derivatives_by_finite_differences(form):
    """First and second ones, with respect to the curvature too, one for each of two sets."""
    generator = torch.Generator().manual_seed(2)
    u, v = (0.4 * torch.randn(2, n, 3, generator=generator, dtype=torch.float64) for n in (3, 4))
    c = torch.tensor([[[0.5]], [[2.0]]], dtype=torch.float64)
    inputs = [z.requires_grad_() for z in (u, v, c)]
    assert torch.autograd.gradcheck(FORMS[form], inputs)
    assert torch.autograd.gradgradcheck(FORMS[form], inputs, atol=1e-4)
    assert torch.autograd.gradcheck(FORMS[form], inputs, check_forward_ad=True, check_backward_ad=False)


@pytest.mark.parametrize("form", FORMS)
def test_each_of_a_batch_has_its_curvature(form):
    generator = torch.Generator().manual_seed(3)
    u, v = torch.randn(2, 3, 5, 4, generator=generator, dtype=torch.float64)
    values = (0.5, 1.0, 2.0)
    together = FORMS[form](u, v, torch.tensor(values, dtype=torch.float64).view(3, 1, 1))
    for i, value in enumerate(values):
        torch.testing.assert_close(together[i], FORMS[form](u[i], v[i], value))
    mapped = torch.func.vmap(lambda a, b: FORMS[form](a, b, 0.7))(u, v)
    torch.testing.assert_close(mapped, FORMS[form](u, v, 0.7))


@pytest.mark.parametrize("precise", [True, False])
def test_distances_of_tangents_in_flat_space(precise):
    generator = torch.Generator().manual_seed(4)
    u, v = (torch.randn(2, n, 3, generator=generator, dtype=torch.float64) for n in (5, 4))
    v[:, 0] = 0.0
    expected = (u[:, :, None] - v[:, None]).norm(dim=-1)
    torch.testing.assert_close(pairs.tangent_distances(u, v, None, precise), expected)
    torch.testing.assert_close(pairs.distances(u, v, None, precise), expected)
    near = pairs.tangent_distances(u, v, 1e-8, precise)  # which the curved ones tend to
    torch.testing.assert_close(near, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
@pytest.mark.parametrize("radius", [1e-3, 1.0, 2.5])
@pytest.mark.parametrize("c", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("precise", [True, False])
def test_distances_of_tangents_are_those_of_their_points(dtype, tolerance, radius, c, precise):
    """Against the exponential map and the distance of the geometry, in float64."""
    generator = torch.Generator().manual_seed(1)
    u, v = (radius * torch.randn(2, n, 3, generator=generator, dtype=dtype) for n in (5, 4))
    v[:, 0] = u[:, 0]  # equal points are at distance zero
    v[:, 1] = -2.0 * u[:, 1]
    points = [lorentz.expmap0(z.double(), c) for z in (u, v)]
    expected = lorentz.dist(points[0].unsqueeze(2), points[1].unsqueeze(1), c)
    found = pairs.tangent_distances(u, v, c, precise)
    assert found.dtype == dtype
    # Between equal points a rounding of the angle by 1e-16 counts as its root, times the sinh of their radius.
    farthest = math.cosh(c**0.5 * float(u.norm(dim=-1).max()))
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance * radius + 2e-8 * farthest)


@pytest.mark.parametrize("precise", [True, False])
def test_of_all_pairs_one_tensor_is_kept_for_the_backward_pass(precise):
    x = (0.3 * torch.randn(70, 3, generator=torch.Generator().manual_seed(5))).requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda z: kept.append(z.numel()) or z, lambda z: z):
        pairs.distances(x, x, 0.7, precise)
    assert kept.count(70 * 70) == 1


@pytest.mark.parametrize("name", SPACES)
@pytest.mark.parametrize("c", [1.0, 0.3])
def test_angles_of_all_pairs_are_those_of_single_ones(name, c):
    space = SPACES[name](c)
    v = torch.randn(40, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    v *= torch.logspace(-2, 0.4, 40)[:, None]
    v[1] = 1.5 * v[0]  # straight behind it
    v[2] = 0.0
    x = space.expmap0(v)
    expected = space.exterior_angle(x[None], x[:, None])
    found = space.exterior_angles(x, x)
    off = ~torch.eye(40, dtype=torch.bool)  # at x = y there is no angle
    off[:, 2] = False
    torch.testing.assert_close(found[off], expected[off], rtol=1e-5, atol=2e-6)
    assert (found[:, 2] == 0).all()


@pytest.mark.parametrize("radius", [1e-3, 1.0, 6.0])
def test_angles_of_all_pairs_against_mpmath(radius):
    u = reference.directions(4, 3, 9).double() * radius
    v = reference.directions(3, 3, 10).double() * radius * 1.3
    found = pairs.exterior_angles(lorentz.expmap0(u, 0.7), lorentz.expmap0(v, 0.7), 0.7)
    expected = [reference.exterior_angle(b, a, 0.7) for a in u for b in v]
    assert reference.worst(found, expected) < 1e-7


def test_an_angle_in_the_plane_is_that_of_complex_numbers():
    x, y = torch.randn(2, 6, 2, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    z, w = torch.view_as_complex(x), torch.view_as_complex(y)
    expected = ((z[:, None] - w) / w).angle().abs()
    torch.testing.assert_close(pairs.exterior_angles(x, y, None), expected)
    torch.testing.assert_close(cones.exterior_angle(y[None], x[:, None], None), expected)


@pytest.mark.parametrize("c", [0.3, 1.0, 4.0])
def test_the_aperture_of_a_flat_cone_and_of_a_curved_one(c):
    radius, k = 1.7, 0.2
    x = torch.tensor([[0.6, 0.8]], dtype=torch.float64) * radius
    curved = cones.half_aperture(lorentz.expmap0(x, c), c, k)
    assert float(curved) == pytest.approx(math.asin(2 * k / math.sinh(c**0.5 * radius)), rel=1e-12)
    assert float(cones.half_aperture(x, None, k)) == pytest.approx(math.asin(k / radius), rel=1e-12)
    ball = PoincareBall(c)
    torch.testing.assert_close(ball.half_aperture(ball.expmap0(x / 2), k), curved)
