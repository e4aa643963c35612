"""float32 against mpmath at 50 digits, end to end from float32 tangent vectors."""

from __future__ import annotations

import pytest
import torch

import hyperbolic_reference as reference
from leafward.geometry import Lorentz, PoincareBall, cones, lorentz


def _distances(u: torch.Tensor, v: torch.Tensor, c: float) -> torch.Tensor:
    space = Lorentz(c)
    return space.dist(space.expmap0(u), space.expmap0(v))


@pytest.mark.parametrize("n", [2, 16, 300])
@pytest.mark.parametrize("radius", [1e-4, 1e-3, 1e-2, 0.1, 1.0, 3.0, 8.0, 14.0, 20.0])
def test_random_pairs_at_one_radius(radius, n):
    u, v = reference.directions(12, n, 1) * radius, reference.directions(12, n, 2) * radius
    assert reference.worst(_distances(u, v, 1.0), reference.distance(u, v)) <= 1e-5


@pytest.mark.parametrize("c", [0.1, 1.0, 4.0])
def test_random_pairs_of_mixed_radius(c):
    generator = torch.Generator().manual_seed(3)
    scale = 20.0 / c**0.5
    radii = scale * 10 ** (-5.3 * torch.rand(2, 100, 1, generator=generator))
    u, v = reference.directions(100, 8, 4) * radii[0], reference.directions(100, 8, 5) * radii[1]
    assert reference.worst(_distances(u, v, c), reference.distance(u, v, c)) <= 1e-5


@pytest.mark.parametrize("radius", [1e-4, 1e-2, 0.5, 2.0, 5.0, 8.0, 9.0])
def test_points_on_one_ray(radius):
    u = reference.directions(20, 16, 6) * radius
    v = u * (10.0 / 9.0)  # up to radius 10
    assert reference.worst(_distances(u, v, 1.0), reference.distance(u, v)) <= 1e-4


@pytest.mark.parametrize("n", [2, 16, 512])
def test_near_pairs(n):
    u = reference.directions(20, n, 7)
    v = u + 1e-3 * reference.directions(20, n, 8)
    assert reference.worst(_distances(u, v, 1.0), reference.distance(u, v)) <= 1e-3


def test_cdist_is_as_good_as_dist_where_plain_float32_fails():
    u = reference.directions(6, 16, 9)
    v = u + 1e-3 * reference.directions(6, 16, 10)
    space = Lorentz(1.0)
    x, y = space.expmap0(u), space.expmap0(v)
    expected = reference.distance(u, v)
    assert reference.worst(space.cdist(x, y).diagonal(), expected) <= 1e-3
    assert reference.worst(space.cdist(x, y, precise=False).diagonal(), expected) > 1e-3


def test_textbook_arcosh_fails_where_ours_holds():
    """acosh(-⟨x,y⟩) with clamp(1 + 1e-8), as published code has it: a no-op clamp and a useless distance."""
    u = reference.directions(10, 16, 11) * 1e-3
    v = reference.directions(10, 16, 12) * 1e-3
    space = Lorentz(1.0)
    x, y = space.expmap0(u), space.expmap0(v)
    textbook = torch.acosh((-space.minkowski(x, y)).clamp(min=1 + 1e-8))
    expected = reference.distance(u, v)
    assert reference.worst(textbook, expected) > 1e-2
    assert reference.worst(space.dist(x, y), expected) < 1e-6


@pytest.mark.parametrize("radius", [1e-3, 1.0, 6.0, 12.0])
@pytest.mark.parametrize("c", [0.25, 1.0])
def test_centroid(radius, c):
    tangents = reference.directions(5, 6, 13) * radius
    tangents[3] = tangents[2] * 0.9  # two points on one ray, where the naive norm cancels
    weights = torch.tensor([0.1, 0.7, 1.0, 2.0, 0.0])
    got = lorentz.centroid(lorentz.expmap0(tangents, c), weights, c)
    expected = torch.tensor([float(value) for value in reference.centroid(tangents, weights, c)])
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=1e-6 * float(expected.abs().max()))


def test_centroid_of_one_ray_at_large_radius_where_the_naive_norm_cancels():
    """o_t² − |o_s|² in float32 is noise at radius 10; the sum of non-negative terms is not."""
    ray = reference.directions(1, 16, 14)
    tangents = torch.cat([ray * 10.0, ray * 9.5])
    x = lorentz.expmap0(tangents, 1.0)
    total, time = x.mean(dim=0), lorentz.time(x, 1.0).mean()
    naive = total / (time**2 - total @ total).clamp_min(1.0).sqrt()
    expected = torch.tensor([float(value) for value in reference.centroid(tangents, torch.ones(2), 1.0)])
    assert (naive - expected).norm() / expected.norm() > 0.02
    assert (lorentz.centroid(x, None, 1.0) - expected).norm() / expected.norm() < 1e-5


@pytest.mark.parametrize("radius", [0.01, 1.0, 7.0])
def test_exterior_angle(radius):
    u, v = reference.directions(10, 4, 15) * radius, reference.directions(10, 4, 16) * radius * 1.3
    got = cones.exterior_angle(lorentz.expmap0(u, 0.7), lorentz.expmap0(v, 0.7), 0.7)
    expected = [reference.exterior_angle(a, b, 0.7) for a, b in zip(u, v, strict=True)]
    assert reference.worst(got, expected) < 1e-5


@pytest.mark.parametrize("radius", [1e-4, 1e-2, 1.0, 5.0])
def test_poincare_within_its_trust_radius(radius):
    u, v = reference.directions(12, 8, 17) * radius, reference.directions(12, 8, 18) * radius
    ball = PoincareBall(1.0)
    got = ball.dist(ball.expmap0(u / 2), ball.expmap0(v / 2))  # a unit coordinate vector at the origin has length 2
    assert reference.worst(got, reference.distance(u, v)) < 1e-5
