"""Figures of an embedded taxonomy: the Poincaré disk, and the radii of its levels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from leafward.geometry import Lorentz
from leafward.report import SERIES, legend, line_with_band, literal, new_figure, whole_numbers
from leafward.report.figures import LIGHT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from leafward.hierarchy import Taxonomy
    from leafward.systems.taxonomy.config import Config
    from leafward.systems.taxonomy.embed import Embedded

MOST_DRAWN = 2500
MOST_NAMED = 40
FARTHEST = 3.5  # radius of the outermost node in the picture: tanh(3.5/2) = 0.94 of the disk's
ARC_POINTS = 17


def disk(tax: Taxonomy, tangent: torch.Tensor) -> Figure:
    """The nodes in the Poincaré disk, geodesics to their parents, coloured by the branch below the root.

    tangent (N, n): tangent vectors at the origin, as long as √c · radius.
    """
    from matplotlib.collections import LineCollection

    shown = np.sort(tax.order[:MOST_DRAWN])  # in topological order, so every ancestor of a shown node is shown
    H, points = Lorentz(1.0), _in_the_plane(tangent)
    place = H.to_poincare(points).numpy()
    figure, axes = new_figure(7.4, 5.6)
    child, parent = tax.parents.expand(shown)
    steps = torch.linspace(0, 1, ARC_POINTS, dtype=points.dtype)[:, None]
    arcs = H.to_poincare(H.geodesic(points[shown[child], None], points[parent, None], steps)).numpy()
    axes.add_collection(LineCollection(list(arcs), colors=LIGHT["muted"], linewidths=0.6, alpha=0.6, zorder=1))
    branch = _branches(tax)[shown]
    for number in range(-1, len(SERIES)):
        here = shown[branch == number]
        colour = LIGHT["muted"] if number < 0 else SERIES[number]
        axes.plot(*place[here].T, ".", color=colour, markersize=3 if len(shown) > 300 else 7, zorder=2)
    _label(axes, [literal(tax.names[node]) for node in tax.order[:MOST_DRAWN]], place[tax.order[:MOST_DRAWN]])
    angle = np.linspace(0, 2 * np.pi, 361)
    axes.plot(np.cos(angle), np.sin(angle), color=LIGHT["muted"], linewidth=0.8)
    axes.set(aspect="equal", xlim=(-1.4, 1.4), ylim=(-1.05, 1.05))
    axes.axis("off")
    return figure


def _label(axes: Axes, names: Sequence[str], place: np.ndarray) -> None:
    """Names beside their points, on the side away from the centre; one that would cover an earlier one is left out."""
    height, width = 0.055, 0.032  # of a letter, in units of the disk
    taken: list[tuple[float, float, float, float]] = []
    for name, (x, y) in zip(names, place, strict=True):
        side = 1 if x >= 0 else -1
        near, far = x + side * 0.025, x + side * (0.025 + width * len(name))
        box = (min(near, far), max(near, far), y - height / 2, y + height / 2)
        if any(box[0] < r and left < box[1] and box[2] < top and low < box[3] for left, r, low, top in taken):
            continue
        taken.append(box)
        axes.text(near, y, name, fontsize=9, ha="left" if side > 0 else "right", va="center", zorder=3)
        if len(taken) == MOST_NAMED:
            return


def _shrink(tangent: torch.Tensor) -> float:
    """By how much radii are multiplied in the picture, so that the outermost node does not merge with the rim."""
    return min(1.0, FARTHEST / float(tangent.norm(dim=1).max().clamp(min=1e-9)))


def _in_the_plane(tangent: torch.Tensor) -> torch.Tensor:
    """Tangent vectors (N, n) as Lorentz points (N, 3): at their own (shrunk) radius, in the direction that the two
    principal axes show."""
    v = tangent.double()
    if v.shape[1] == 1:
        v = torch.nn.functional.pad(v, (0, 1))
    radius = v.norm(dim=1, keepdim=True)
    if v.shape[1] > 2:
        v = v @ torch.linalg.svd(v, full_matrices=False).Vh[:2].T
    return Lorentz(1.0).expmap0(_shrink(tangent) * radius * torch.nn.functional.normalize(v))


def _branches(tax: Taxonomy) -> np.ndarray:
    """Which of the largest branches below the root each node belongs to: (N); −1 for the root and the rest."""
    ways = tax.paths(np.arange(len(tax)))
    top = ways[:, 1] if ways.shape[1] > 1 else np.full(len(tax), -1)
    sizes = np.bincount(top[top >= 0], minlength=len(tax))
    number = np.full(len(tax) + 1, -1)
    largest = np.argsort(-sizes, kind="stable")[: len(SERIES)]
    number[largest[sizes[largest] > 0]] = np.arange((sizes[largest] > 0).sum())
    return number[top]  # the entry at −1 is the last one, which stays −1


def disk_caption(tax: Taxonomy, config: Config, tangent: torch.Tensor) -> str:
    shrink = _shrink(tangent)
    how = "as it is" if config.dim <= 2 else "each node at its own radius, in the direction of two principal axes"
    which = "" if len(tax) <= MOST_DRAWN else f" The first {MOST_DRAWN:,} nodes from the root."
    scale = "" if shrink == 1 else f" Radii are drawn at {shrink:.2f} of their length, to keep nodes off the rim."
    return (
        f"The embedding in the Poincaré disk, {how}; lines: geodesics to the parents; colours: the largest branches "
        f"below the root.{scale}{which}"
    )


def radii(tax: Taxonomy, members: Sequence[Embedded]) -> Figure:
    """Radius by level, one line for each geometry (its first seed)."""
    figure, axes = new_figure()
    levels = np.arange(tax.depth.max() + 1)
    drawn = set()
    for member in members:
        if member.geometry in drawn:
            continue
        drawn.add(member.geometry)
        radius = member.tangent.norm(dim=1).numpy()
        groups = [radius[tax.depth == level] for level in levels]
        low, high = (np.array([np.quantile(group, share) for group in groups]) for share in (0.1, 0.9))
        line_with_band(axes, levels, [group.mean() for group in groups], low, high, label=member.geometry, marker="o")
    axes.set(xlabel="level (edges from the root)", ylabel="radius")
    whole_numbers(axes)
    legend(axes)
    return figure
