"""What is done to training images, as a configuration. Imports nothing heavy: recipes show it in `--help`."""

from __future__ import annotations

from dataclasses import dataclass

from leafward.errors import UsageError


@dataclass(frozen=True)
class Augment:
    """What is done to a training image; the words are those of timm, which does it."""

    auto: str | None = None
    """Policy of automatic augmentation, such as rand-m9-mstd0.5-inc1."""
    scale: tuple[float, float] = (0.35, 1.0)
    """Smallest and largest part of the image that a crop keeps."""
    hflip: float = 0.5
    """Chance of a mirror image."""
    jitter: float = 0.0
    """Strength of colour jitter (without `auto`)."""
    erase: float = 0.0
    """Chance that a rectangle of the image is replaced by noise."""
    mixup: float = 0.0
    """α of mixup; 0: none."""
    cutmix: float = 0.0
    """α of cutmix; 0: none."""
    smoothing: float = 0.0
    """Label smoothing."""

    def __post_init__(self) -> None:
        for name in ("hflip", "erase", "smoothing"):
            value = getattr(self, name)
            if not 0.0 <= value <= 1.0:
                raise UsageError(f"{name} must be in [0, 1], got {value!r}")
        for name in ("jitter", "mixup", "cutmix"):
            value = getattr(self, name)
            if not 0.0 <= value < float("inf"):
                raise UsageError(f"{name} must be a number ≥ 0, got {value!r}")
        if not 0.0 < self.scale[0] <= self.scale[1] <= 1.0:
            raise UsageError(f"scale must be two parts with 0 < low ≤ high ≤ 1, got {self.scale!r}")
