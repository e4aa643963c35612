"""LatHAdapter: a latent hierarchy of attributes on a frozen CLIP, for few-shot classification."""

from __future__ import annotations

from typing import TYPE_CHECKING

from leafward._lazy import lazy

if TYPE_CHECKING:
    from leafward.systems.lathadapter.attributes import LatentHierarchyConfig

_HOME = {
    "attributes": ("LatentHierarchyConfig",),
}

__all__ = ["LatentHierarchyConfig"]

__getattr__, __dir__ = lazy(__name__, _HOME)
