"""Cluster maps over an image: which tokens of each stage went together, composed from fine to coarse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from leafward.systems.hcformer.layout import Layout
    from leafward.systems.hcformer.model import Assignment

Labels = np.ndarray
"""(H, W) integers: the region of every pixel."""
BORDER = np.array([255, 255, 255], dtype=np.uint8)


def patch_regions(assignment: Assignment, image: int = 0, head: int | None = None) -> Labels:
    """(H, W) of the stage's tokens: the centre that each token belongs to most, over the heads or for one.

    Centres are numbered window by window.
    """
    weights = _chosen(assignment.weights[image], 1, head)  # (G, N, M)
    first = np.arange(weights.shape[0])[:, None] * weights.shape[2]
    return _on_map(first + weights.argmax(axis=2), assignment.layout)


def window_regions(assignment: Assignment, image: int = 0, head: int | None = None) -> Labels:
    """(H, W) of the stage's tokens: the global centre that the window of each token belongs to most."""
    weights = _chosen(assignment.weights[image], 0, head)  # (G, K)
    return _on_windows(weights.argmax(axis=1), assignment.layout)


def confidence(assignment: Assignment, image: int = 0, head: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """How sure the drawn regions are, (H, W) each: the weight of the centre that is drawn (the heads' mean, or that of
    one), and the share of all heads whose own first centre it is."""
    patches = assignment.level == "patch"
    weights = assignment.weights[image].float().cpu().numpy()
    weights = weights if patches else weights[None]  # (G, h, N, M), or of all windows (1, h, G, K)
    merged = weights.mean(axis=1) if head is None else weights[:, head]
    drawn = merged.argmax(axis=-1)  # (G, N)
    agree = (weights.argmax(axis=-1) == drawn[:, None]).mean(axis=1)
    place = _on_map if patches else lambda values, layout: _on_windows(values[0], layout)
    return place(merged.max(axis=-1), assignment.layout), place(agree, assignment.layout)


def _on_map(values: np.ndarray, layout: Layout) -> np.ndarray:
    """What stands at every place of the windows (G, N), at the tokens of the map (H, W)."""
    if layout.tokens is not None:
        return values.ravel()[layout.tokens.cpu().numpy()].reshape(layout.size)
    (n, m), (p, q) = layout.grid, layout.side
    return values.reshape(n, m, p, q).transpose(0, 2, 1, 3).reshape(n * p, m * q)


def _on_windows(values: np.ndarray, layout: Layout) -> np.ndarray:
    """What windows have (G), at their tokens (H, W)."""
    return _on_map(np.repeat(values[:, None], layout.side[0] * layout.side[1], axis=1), layout)


def _chosen(weights, axis: int, head: int | None) -> np.ndarray:
    array = weights.float().cpu().numpy()
    return array.mean(axis=axis) if head is None else array.take(head, axis=axis)


def enlarge(labels: Labels, height: int, width: int) -> Labels:
    """Nearest-neighbour resizing to the pixels of the image."""
    rows = (np.arange(height) + 0.5) * labels.shape[0] / height
    columns = (np.arange(width) + 0.5) * labels.shape[1] / width
    return labels[rows.astype(int)[:, None], columns.astype(int)[None, :]]


def compose(stages: Sequence[Labels]) -> list[Labels]:
    """Regions of every stage as unions of those of the stage before: (H, W) each, from fine to coarse.

    The maps must have one size. A region goes, whole, to the coarser region that most of its pixels lie in, so that
    borders keep the resolution of the finest stage and regions are nested.
    """
    composed = [_numbered(stages[0])]
    for coarse in map(_numbered, stages[1:]):
        fine = composed[-1]
        counts = np.zeros((fine.max() + 1, coarse.max() + 1), dtype=np.int64)
        np.add.at(counts, (fine, coarse), 1)
        composed.append(_numbered(counts.argmax(axis=1)[fine]))
    return composed


def _numbered(labels: Labels) -> Labels:
    """The same regions, numbered 0, 1, 2 … without gaps."""
    return np.unique(labels, return_inverse=True)[1].reshape(labels.shape)


def paint(image: np.ndarray, labels: Labels) -> np.ndarray:
    """(H, W, 3) uint8: every region in the mean colour of its pixels, with borders."""
    flat = _numbered(labels).ravel()
    sizes = np.bincount(flat)[:, None]
    means = np.stack([np.bincount(flat, image[..., c].ravel()) for c in range(3)], axis=1) / sizes
    return outline(means[flat].reshape(image.shape).round().astype(np.uint8), labels)


def tint(image: np.ndarray, labels: Labels, count: int) -> np.ndarray:
    """(H, W, 3) uint8: the image under one colour for each of `count` labels, with borders."""
    import matplotlib

    colours = matplotlib.colormaps["hsv"](np.arange(count) / count)[:, :3] * 255
    mixed = 0.55 * image + 0.45 * colours[labels]
    return outline(mixed.round().astype(np.uint8), labels)


def shade(image: np.ndarray, strength: np.ndarray, labels: Labels) -> np.ndarray:
    """(H, W, 3) uint8: the grey image, as bright as `strength` (H, W) in [0, 1] says, with borders."""
    grey = image.mean(axis=2) / 255.0
    lit = (0.25 + 0.75 * grey) * strength * 255.0
    return outline(np.repeat(lit[..., None], 3, axis=2).round().astype(np.uint8), labels)


def outline(picture: np.ndarray, labels: Labels) -> np.ndarray:
    """`picture` with a line where the label changes."""
    drawn = picture.copy()
    drawn[:, 1:][labels[:, 1:] != labels[:, :-1]] = BORDER
    drawn[1:][labels[1:] != labels[:-1]] = BORDER
    return drawn


def sheet(pictures: Sequence[np.ndarray], gap: int = 6) -> np.ndarray:
    """Pictures of one size side by side on white."""
    height = pictures[0].shape[0]
    space = np.full((height, gap, 3), 255, dtype=np.uint8)
    parts = [part for picture in pictures for part in (picture, space)]
    return np.concatenate(parts[:-1], axis=1)
