"""Superposition: fleets of toy models and the laws of their features."""

from __future__ import annotations

from typing import TYPE_CHECKING

from leafward._lazy import lazy

if TYPE_CHECKING:
    from leafward.systems.superposition.fleet import Fleet, FleetOptions, ModelSpec, log_steps, width_scaled_rates
    from leafward.systems.superposition.laws import frequencies
    from leafward.systems.superposition.theory import weak_loss, weak_loss_leading

_HOME = {
    "fleet": (
        "Fleet",
        "FleetOptions",
        "ModelSpec",
        "log_steps",
        "width_scaled_rates",
    ),
    "laws": ("frequencies",),
    "theory": ("weak_loss", "weak_loss_leading"),
}

__all__ = [
    "Fleet",
    "FleetOptions",
    "ModelSpec",
    "frequencies",
    "log_steps",
    "weak_loss",
    "weak_loss_leading",
    "width_scaled_rates",
]

__getattr__, __dir__ = lazy(__name__, _HOME)
