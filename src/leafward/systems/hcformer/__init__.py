"""HCFormer: a vision backbone whose blocks cluster their tokens, with Lorentz distances, and its Euclidean twin."""

from __future__ import annotations

from typing import TYPE_CHECKING

from leafward._lazy import lazy

if TYPE_CHECKING:
    from leafward.systems.hcformer.model import HCFormer

_HOME = {
    "model": ("HCFormer",),
}

__all__ = ["HCFormer"]

__getattr__, __dir__ = lazy(__name__, _HOME)
