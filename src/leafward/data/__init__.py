"""What users hand in: arrays, images, scenes, captions, features, text, taxonomies; and the samples that come along."""

from __future__ import annotations

from typing import TYPE_CHECKING

from leafward._lazy import lazy

if TYPE_CHECKING:
    from leafward.data.boxes import load_objects
    from leafward.data.captions import read_captions
    from leafward.data.counts import read_counts
    from leafward.data.images import load_images
    from leafward.data.scenes import load_scenes

_HOME = {
    "boxes": ("load_objects",),
    "captions": ("read_captions",),
    "counts": ("read_counts",),
    "images": ("load_images",),
    "scenes": ("load_scenes",),
}

__all__ = ["load_images", "load_objects", "load_scenes", "read_captions", "read_counts"]

__getattr__, __dir__ = lazy(__name__, _HOME)
