"""Formulas of published geometry code that are wrong, each beside what is right and what we have."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from leafward.geometry import cones, lorentz, poincare

CURVED = pytest.mark.parametrize("c", [0.25, 4.0])


def points(c: float = 1.0, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Two sets of 20 points within two radii of curvature, as space parts (20, 5)."""
    generator = torch.Generator().manual_seed(seed)
    u, v = torch.randn(2, 20, 5, generator=generator, dtype=torch.float64) / c**0.5
    return lorentz.expmap0(0.7 * u, c), lorentz.expmap0(0.7 * v, c)


def minkowski(x: Tensor, y: Tensor, c: float) -> Tensor:
    return (x * y).sum(dim=-1) - (lorentz.time(x, c) * lorentz.time(y, c)).squeeze(-1)


def test_a_distance_without_its_minus_is_one_number_for_all_pairs() -> None:
    """HyperCore's induced_distance: acosh(⟨x,y⟩) is always below the clamp, because ⟨x,y⟩ ≤ −1."""
    x, y = points()
    published = torch.acosh(minkowski(x, y, 1.0).clamp(min=1 + 1e-6))
    assert published.unique().numel() == 1
    torch.testing.assert_close(lorentz.dist(x, y, 1.0), torch.acosh(-minkowski(x, y, 1.0)))
    assert lorentz.dist(x, y, 1.0).std() > 0.1


@CURVED
def test_the_map_to_the_ball_needs_the_curvature(c: float) -> None:
    """HyperCore's maps between the models hold at c = 1 alone; √c belongs before the time."""
    x, y = points(c)
    p, q = (lorentz.to_poincare(z, c) for z in (x, y))
    unit_p, unit_q = (z / (1 + lorentz.time(z, c)) for z in (x, y))
    expected = lorentz.dist(x, y, c)
    torch.testing.assert_close(poincare.dist(p, q, c), expected, rtol=1e-6, atol=0)
    assert ((poincare.dist(unit_p, unit_q, c) / expected - 1).abs() > 0.1).double().mean() > 0.9
    torch.testing.assert_close(poincare.to_lorentz(p, c), x)


@CURVED
def test_the_aperture_of_a_cone_needs_the_curvature(c: float) -> None:
    """Against Ganea et al. on the ball, asin(k (1 − c|p|²)/(√c|p|)); HyperCore leaves √c out of 2k/(√c|x|)."""
    x = points(c)[0]
    p = lorentz.to_poincare(x, c)
    norm, length = p.norm(dim=-1), x.norm(dim=-1)
    exact = torch.asin(0.1 * (1 - c * norm**2) / (c**0.5 * norm))
    torch.testing.assert_close(cones.half_aperture(x, c), exact, rtol=1e-6, atol=0)
    assert ((torch.asin((0.2 / length).clamp(max=1)) / exact - 1).abs() > 0.3).all()


def test_an_angle_needs_every_coordinate() -> None:
    """HyperCore's oxy_angle takes the space part of what is a space part already, and so drops its first coordinate."""

    def oxy_angle(x: Tensor, y: Tensor) -> Tensor:  # of space parts, as MERU defines it
        time_x, time_y = ((1 + z.square().sum(dim=-1)).sqrt() for z in (x, y))
        product = (x * y).sum(dim=-1) - time_x * time_y
        return torch.acos((time_y + time_x * product) / (x.norm(dim=-1) * (product**2 - 1).sqrt()))

    x, y = points()
    torch.testing.assert_close(cones.exterior_angle(x, y, 1.0), oxy_angle(x, y), rtol=1e-6, atol=1e-6)
    twice_cut = oxy_angle(x[:, 1:], y[:, 1:])
    assert (twice_cut - oxy_angle(x, y)).abs().mean() > 0.05
    flipped = y * torch.tensor([-1.0, 1.0, 1.0, 1.0, 1.0], dtype=y.dtype)
    assert torch.equal(oxy_angle(x[:, 1:], flipped[:, 1:]), twice_cut)
    assert (cones.exterior_angle(x, flipped, 1.0) - cones.exterior_angle(x, y, 1.0)).abs().min() > 1e-4


def test_an_addition_with_swapped_arguments_is_none() -> None:
    """x ⊕ y = exp_x(PT(log₀ y)); HyperCore calls expmap with the tangent vector as the point."""
    x, y = points()
    tangent = lorentz.transport0(x, lorentz.logmap0(y, 1.0), 1.0)
    p, q = (lorentz.to_poincare(z, 1.0) for z in (x, y))
    total = poincare.mobius_add(p, q, 1.0)
    torch.testing.assert_close(lorentz.to_poincare(lorentz.expmap(x, tangent, 1.0), 1.0), total)
    torch.testing.assert_close(poincare.mobius_add(-p, total, 1.0), q)
    swapped = lorentz.to_poincare(lorentz.expmap(tangent, x, 1.0), 1.0)
    assert (poincare.mobius_add(-p, swapped, 1.0) - q).norm(dim=-1).min() > 0.01


def test_a_clamp_below_the_spacing_of_floats_is_none() -> None:
    """MERU, Hi-Mapper: clamp(min=1 + 1e-8) is clamp(1) in float32, where acosh has an infinite slope."""
    clamped = torch.ones(1).clamp(min=1 + 1e-8).requires_grad_()
    torch.acosh(clamped).sum().backward()
    assert clamped.grad is not None
    assert clamped.grad.item() == math.inf

    x = torch.randn(500, 16, generator=torch.Generator().manual_seed(0))
    published = torch.acosh((-minkowski(x, x, 1.0)).clamp(min=1 + 1e-8))
    assert published.max() > 5e-4  # of a point from itself
    assert (lorentz.dist(x, x, 1.0) == 0).all()
