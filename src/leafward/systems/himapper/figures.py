"""Pictures of a hierarchy found by Hi-Mapper: its tree over the photo, every node as a spotlight, its points."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from leafward.report import SERIES, literal, new_figure, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from leafward.systems.himapper import Hierarchy, TreeShape

DARK = 0.2
"""Brightness of a photo where a node does not look."""
PIXELS_PER_INCH = 110
ACROSS, GAP = 12.0, 0.28
"""Inches: the width of a tree of spotlights, and between its levels."""


def branches(shape: TreeShape) -> Tensor:
    """For every node the number of the top node above it: (M)."""
    counts = [size // shape.sizes[-1] for size in shape.sizes]
    return torch.cat([torch.arange(shape.sizes[-1]).repeat_interleave(count) for count in counts])


def upsampled(maps: Tensor, height: int, width: int) -> Tensor:
    """Maps (M, h, w) at the size of the photo, smooth: (M, H, W)."""
    return F.interpolate(maps[None], (height, width), mode="bicubic", align_corners=False)[0].clamp_min(0.0)


def centres(shape: TreeShape, attention: Tensor) -> Tensor:
    """Where each node looks more than its level does on average: (M, h, w) -> x and y as shares of the photo (M, 2)."""
    _, height, width = attention.shape
    levels = [attention[shape.level(level)] for level in range(shape.levels)]
    excess = torch.cat([(maps - maps.mean(dim=0)).clamp_min(0.0) for maps in levels])
    excess = excess + torch.finfo(excess.dtype).tiny  # a node that is like all others stands in the middle
    excess = excess / excess.sum(dim=(1, 2), keepdim=True)
    x = (torch.arange(width) + 0.5) / width
    y = (torch.arange(height) + 0.5) / height
    return torch.stack([excess.sum(dim=1) @ x, excess.sum(dim=2) @ y], dim=-1)


def over_photo(photo: np.ndarray, found: Hierarchy, title: str) -> Figure:
    """The tree over a photo (H, W, 3) of whole numbers to 255; `found` holds one image.

    Every node stands where it looks, larger at higher levels, in the colour of the top node above it; places are
    tinted by the top node that looks at them most.
    """
    height, width = photo.shape[:2]
    shape, attention = found.shape, found.attention[0].float().cpu()
    top = upsampled(attention[shape.level(shape.levels - 1)], height, width)
    share = (top / top.sum(dim=0).clamp_min(1e-12)).numpy()
    colours = _colours(shape)
    tint = np.stack([_rgb(colour) for colour in colours])[share.argmax(axis=0)]
    blend = 0.55 * photo / 255.0 + 0.45 * tint * (0.35 + 0.65 * photo.mean(axis=-1, keepdims=True) / 255.0)
    position = (centres(shape, attention) * torch.tensor([width, height])).numpy()
    figure, axes = new_figure(5.2, 5.2 * height / width + 0.3)
    with style():
        axes.imshow(np.clip(blend, 0.0, 1.0))
        parents, branch = shape.parents().tolist(), branches(shape).tolist()
        for child, parent in enumerate(parents):
            (x0, y0), (x1, y1) = position[child], position[parent]
            axes.plot([x0, x1], [y0, y1], color="white", linewidth=2.6, zorder=2)
            axes.plot([x0, x1], [y0, y1], color=colours[branch[child]], linewidth=1.4, zorder=3)
        for level in range(shape.levels):
            rows = shape.level(level)
            axes.scatter(
                *position[rows].T,
                s=14 * 2.4**level,
                c=[colours[b] for b in branch[rows]],
                edgecolors="white",
                linewidths=0.9,
                zorder=4 + level,
            )
        axes.set(xticks=[], yticks=[], xlim=(0, width), ylim=(height, 0), title=literal(title))
        axes.spines[:].set_visible(False)
    return figure


def spotlights(photo: np.ndarray, found: Hierarchy) -> Figure:
    """Every node as the photo lit where the node looks, the top level above and children under their parent."""
    from matplotlib.figure import Figure

    height, width = photo.shape[:2]
    shape, colours, branch = found.shape, _colours(found.shape), branches(found.shape).tolist()
    lit = _brightness(found.attention[0].float().cpu(), height, width)
    highs = [ACROSS * height / width / size for size in shape.sizes]  # inches of a level's tiles
    tall = sum(highs) + GAP * (shape.levels - 1)
    with style():
        figure = Figure(figsize=(ACROSS, tall))
        low = tall
        for level in reversed(range(shape.levels)):
            size, start, high = shape.sizes[level], shape.level(level).start, highs[level] / tall
            low -= highs[level]
            for k in range(size):
                axes = figure.add_axes(((k + 0.02) / size, low / tall + 0.02 * high, 0.96 / size, 0.96 * high))
                axes.imshow(photo / 255.0 * lit[start + k][..., None])
                axes.set(xticks=[], yticks=[])
                for spine in axes.spines.values():
                    spine.set(visible=True, color=colours[branch[start + k]], linewidth=1.6)
            if level:
                low -= GAP
                _joints(figure, shape.sizes[level - 1], low / tall, GAP / tall, branch[shape.level(level - 1)], colours)
    return figure


def _brightness(attention: Tensor, height: int, width: int) -> np.ndarray:
    """From `DARK` where a node looks least to one where it looks most: (M, h, w) -> (M, H, W)."""
    heat = upsampled(attention, height, width)
    least, most = heat.amin(dim=(1, 2), keepdim=True), heat.amax(dim=(1, 2), keepdim=True)
    # The root, because one bright place would leave all others in the dark.
    return (DARK + (1.0 - DARK) * ((heat - least) / (most - least).clamp_min(1e-12)).sqrt()).numpy()


def _joints(figure: Figure, size: int, low: float, gap: float, branch: list[int], colours: list[str]) -> None:
    """Lines from each of `size` tiles, whose upper edge is at `low`, to the parent above."""
    from matplotlib.lines import Line2D

    for k in range(size):
        x, parent = (k + 0.5) / size, (k // 2 + 0.5) / (size // 2)
        middle = low + gap / 2
        way = [x, x, parent, parent], [low, middle, middle, low + gap]
        figure.add_artist(Line2D(*way, color=colours[branch[k]], linewidth=1.2))


def disk(found: Hierarchy) -> Figure:
    """The points of one image on the Poincaré disk: their tangent vectors at the origin, along the two directions in
    which these differ most. Radii are kept, so that the distance from the rim can be read."""
    from leafward.geometry import Lorentz, PoincareBall

    points = found.points[0].double().cpu()
    tangent = Lorentz(found.curvature).logmap0(points) if found.curvature else points
    radius = tangent.norm(dim=-1, keepdim=True)
    _, _, axes_of_spread = torch.linalg.svd(tangent - tangent.mean(dim=0), full_matrices=False)
    flat = tangent @ axes_of_spread[:2].mT
    flat = flat * radius / flat.norm(dim=-1, keepdim=True).clamp_min(1e-12)
    if found.curvature:
        flat = PoincareBall(found.curvature).expmap0(flat / 2.0) * found.curvature**0.5
    flat = flat.numpy()
    shape, colours, branch = found.shape, _colours(found.shape), branches(found.shape).tolist()
    figure, axes = new_figure(4.6, 4.6)
    with style():
        axes.grid(visible=False)
        for child, parent in enumerate(shape.parents().tolist()):
            axes.plot(*flat[[child, parent]].T, color=colours[branch[child]], linewidth=0.9)
        for level in range(shape.levels):
            rows = shape.level(level)
            axes.scatter(*flat[rows].T, s=16 * 2.0**level, c=[colours[b] for b in branch[rows]], zorder=3)
        if found.curvature:
            angle = np.linspace(0.0, 2.0 * np.pi, 200)
            axes.plot(np.cos(angle), np.sin(angle), color="black", linewidth=0.8)
        axes.set(aspect="equal", xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
    return figure


def png(figure: Figure, pixels: int = 0) -> bytes:
    """A figure as PNG data, at least so many pixels wide."""
    buffer = io.BytesIO()
    dpi = max(PIXELS_PER_INCH, pixels / figure.get_figwidth())
    figure.savefig(buffer, format="png", dpi=dpi, facecolor="white")
    return buffer.getvalue()


def _colours(shape: TreeShape) -> list[str]:
    """One for each top node."""
    return [SERIES[k % len(SERIES)] for k in range(shape.sizes[-1])]


def _rgb(colour: str) -> np.ndarray:
    return np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255.0
