"""Hi-Mapper ("Improving Visual Recognition with Hyperbolical Visual Hierarchy Mapping", arXiv 2404.00974): a visual
hierarchy for any pretrained backbone of timm.

    mapped = HiMapper(timm.create_model("resnet50", pretrained=True), leaves=32, levels=4)
    logits = mapped(images)                                   # the backbone's classifier on v + v^L
    logits, losses = mapped(images, losses=True)              # and what teaches the hierarchy
    parts = mapped.hierarchy(images)                          # nodes, their attention maps and their points
    dense = HiMapper(timm.create_model("resnet50", features_only=True))     # maps for a dense head

Shapes: B images, T places of the feature map, C its channels, V the width of the global feature, N leaves, L levels,
M = N + N/2 + … nodes (leaves first), S samples, d the mapper's width. Sections are the paper's,
equation numbers those of docs/himapper.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from leafward._lazy import lazy

if TYPE_CHECKING:
    from leafward.systems.himapper.losses import HierarchyLosses
    from leafward.systems.himapper.mapper import HierarchyMapper
    from leafward.systems.himapper.model import Hierarchy, HiMapper
    from leafward.systems.himapper.tree import TreeShape

_HOME = {
    "losses": ("HierarchyLosses",),
    "mapper": ("HierarchyMapper",),
    "model": ("HiMapper", "Hierarchy"),
    "tree": ("TreeShape",),
}

__all__ = ["HiMapper", "Hierarchy", "HierarchyLosses", "HierarchyMapper", "TreeShape"]

__getattr__, __dir__ = lazy(__name__, _HOME)
