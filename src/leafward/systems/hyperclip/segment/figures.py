"""Pictures of a segmentation: class colours over a photo, and bars in those colours, which say what they mean."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from io import BytesIO
from typing import TYPE_CHECKING

import numpy as np

from leafward.errors import require
from leafward.report import new_figure
from leafward.report.figures import literal

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_BARS = 40


def palette(count: int) -> np.ndarray:
    """Colours (count, 3) of bytes, far apart in hue."""
    golden = 0.61803398875
    return np.array(
        [[round(255 * x) for x in colorsys.hsv_to_rgb(i * golden % 1.0, 0.75, 0.95)] for i in range(count)], np.uint8
    )


def overlay(image: np.ndarray, places: np.ndarray, count: int) -> np.ndarray:
    """An image (H, W, 3) half covered by the colours of its places (H, W); −1 stays as it is."""
    colours = palette(count)[np.maximum(places, 0)]
    mixed = (image.astype(np.uint16) + colours) // 2
    return np.where(places[..., None] >= 0, mixed, image).astype(np.uint8)


def png(image: np.ndarray) -> bytes:
    buffer = BytesIO()
    require("PIL.Image", "vision").fromarray(image).save(buffer, "PNG")
    return buffer.getvalue()


def bars(names: Sequence[str], values: Sequence[float | None], label: str) -> Figure:
    """A bar in its colour for each class that has a value, in percent, the largest first and at most `MOST_BARS`."""
    shown = [(value, place) for place, value in enumerate(values) if value is not None]
    shown = sorted(shown, key=lambda pair: (-pair[0], pair[1]))[:MOST_BARS]
    figure, axes = new_figure(height=0.8 + 0.24 * max(len(shown), 1))
    colours = palette(len(names)) / 255.0
    rows = range(len(shown))
    axes.barh(rows, [100.0 * value for value, _ in shown], color=[tuple(colours[place]) for _, place in shown])
    axes.set_yticks(rows, [literal(names[place]) for _, place in shown])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set(xlabel=label, xlim=(0, None))
    return figure
