"""Where a stream of activations lives: a hyperboloid, or flat space for the Euclidean twin."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from leafward.errors import UsageError, nearest
from leafward.geometry.lorentz import time_of_norm
from leafward.geometry.scalars import norm, wide

GEOMETRIES = ("lorentz", "euclidean")


@dataclass(frozen=True)
class Space:
    """The space every layer is given: ``Space()`` is the hyperboloid ⟨x,x⟩_L = -1/c, curvature -c.

    Layers carry the space part ``s (..., n)`` of a point alone, so widths stay aligned and a point cannot leave the
    manifold; the time coordinate is derived where it is needed. ``Space("euclidean")`` turns every layer into its
    Euclidean twin: the same code without a time coordinate.
    """

    geometry: str = "lorentz"
    c: float = 1.0

    def __post_init__(self) -> None:
        if self.geometry not in GEOMETRIES:
            raise UsageError(f"geometry is {self.geometry!r}; {nearest(self.geometry, GEOMETRIES)}")
        if not 0.0 < self.c < math.inf:
            raise UsageError(f"c must be a positive finite number, got {self.c!r}")

    @classmethod
    def of_squared_radius(cls, radius: float) -> Space:
        """The hyperboloid ⟨x,x⟩_L = -radius: HELM's own code calls this number c. Ours is its reciprocal."""
        return cls("lorentz", 1.0 / radius)

    @property
    def curved(self) -> bool:
        return self.geometry == "lorentz"

    def time(self, s: Tensor) -> Tensor:
        """Time coordinate √(1/c + |s|²) in float32 or better: (..., n) -> (..., 1).

        `leafward.geometry.lorentz.time` without the pass that tames rows beyond 1e10: activations are kept
        in range by the norms between them, and this runs before every matrix product.
        """
        return time_of_norm(norm(wide(s)), self.c)


LORENTZ = Space()


def working_dtype(x: Tensor) -> torch.dtype:
    """The type matrix products are taken in: autocast's, else that of x."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def positive(**sizes: int) -> None:
    """Refuse sizes that are not positive whole numbers, by name."""
    for name, value in sizes.items():
        if not isinstance(value, int) or value < 1:
            raise UsageError(f"{name} must be a positive whole number, got {value!r}")
