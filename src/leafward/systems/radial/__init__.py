"""Radial Embedding: a text encoder whose radius follows the hierarchy of what texts say, with HierarCaps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from leafward._lazy import lazy

if TYPE_CHECKING:
    from leafward.systems.radial.objective import RadialConfig

_HOME = {
    "objective": ("RadialConfig",),
}

__all__ = ["RadialConfig"]

__getattr__, __dir__ = lazy(__name__, _HOME)
