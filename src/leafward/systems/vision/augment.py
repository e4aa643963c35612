"""What is done to training images, as a configuration. Imports nothing heavy: recipes show it in `--help`."""

from __future__ import annotations

from leafward.config import NonNegative, Settings, Share
from leafward.errors import need


class Augment(Settings, frozen=True):
    """What is done to a training image; the words are those of timm, which does it."""

    auto: str | None = None
    """Policy of automatic augmentation, such as rand-m9-mstd0.5-inc1."""
    scale: tuple[Share, Share] = (0.35, 1.0)
    """Smallest and largest part of the image that a crop keeps."""
    hflip: Share = 0.5
    """Chance of a mirror image."""
    jitter: NonNegative = 0.0
    """Strength of colour jitter (without `auto`)."""
    photometric: bool = False
    """Segment: change brightness, contrast, saturation and hue, each with a chance of one half."""
    erase: Share = 0.0
    """Chance that a rectangle of the image is replaced by noise."""
    mixup: NonNegative = 0.0
    """α of mixup; 0: none."""
    cutmix: NonNegative = 0.0
    """α of cutmix; 0: none."""
    smoothing: Share = 0.0
    """Label smoothing."""

    def conditions(self) -> None:
        low, high = self.scale
        need(0.0 < low <= high, "scale", "two parts with 0 < low ≤ high ≤ 1", self.scale)
