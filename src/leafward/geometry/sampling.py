"""Random directions and radii."""

from __future__ import annotations

import torch
from torch import Tensor

from leafward.geometry.scalars import unit

_GRID = 8192


def directions(
    shape: tuple[int, ...],
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Uniform unit vectors of the given shape (..., n)."""
    return unit(torch.randn(shape, generator=generator, dtype=dtype, device=device))


def ball_radius(
    shape: tuple[int, ...],
    n: int,
    radius: float,
    sqrt_c: float,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Radii (*shape, 1) of points uniform in volume in an n-ball of given radius and curvature -sqrt_c².

    The density is ∝ sinh^(n−1)(√c r), in flat space ∝ r^(n−1). Flat space has the closed form R·U^(1/n). Curved
    space inverts the distribution function on a float64 grid that is even in s = (r/R)^n: the substitution takes
    the power of r out of the integrand and puts the grid's points where the volume is.
    """
    uniform = torch.rand((*shape, 1), generator=generator, dtype=torch.float64, device=device)
    if sqrt_c == 0.0:
        return (radius * uniform ** (1.0 / n)).to(dtype)
    s = torch.linspace(0.0, 1.0, _GRID + 1, dtype=torch.float64, device=device)[1:]
    grid = radius * s ** (1.0 / n)
    rho = sqrt_c * grid
    # what is left of the integrand: (sinh ρ / ρ)^(n-1), in logarithms
    excess = (n - 1) * (rho + torch.log(-torch.expm1(-2.0 * rho) / (2.0 * rho)))
    density = torch.exp(excess - excess.max())
    first = torch.exp(-excess.max()).reshape(1)  # the integrand at s = 0
    padded = torch.cat([first, density])
    mass = torch.cat([first.new_zeros(1), torch.cumulative_trapezoid(padded)])
    target = uniform * mass[-1]
    right = torch.searchsorted(mass, target.flatten()).clamp(1, _GRID).view_as(target)
    knots = torch.cat([s.new_zeros(1), s])
    lower, upper = mass[right - 1], mass[right]
    within = (target - lower) / (upper - lower).clamp_min(torch.finfo(torch.float64).tiny)
    return (radius * (knots[right - 1] + within * (knots[right] - knots[right - 1])) ** (1.0 / n)).to(dtype)
