"""A scene: everything that the page shows, as numbers, and as the named parts that it loads."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from leafward.errors import UsageError
from leafward.explorer import tsne
from leafward.explorer.layout import (
    Layout,
    bent,
    distances,
    flat_pca,
    flat_tsne,
    hyperbolic_pca,
    hyperbolic_tsne,
    some_pairs,
)
from leafward.explorer.neighbours import Neighbours
from leafward.explorer.nodes import with_nodes
from leafward.explorer.sources import Source, Space
from leafward.explorer.thumbnails import read_thumbnails
from leafward.files import finite
from leafward.geometry import Lorentz
from leafward.hierarchy.reconstruction import Distortion

Method = Literal["pca", "tsne"]
#: Points that a page can hold.
MOST_POINTS = 500_000
#: Neighbours shown for a point.
NEIGHBOURS = 12


@dataclass(frozen=True)
class View:
    """A space with its layout, the search for neighbours in it, and the layout's distortion on some number of pairs."""

    space: Space
    layout: Layout
    neighbours: Neighbours
    bent: tuple[Distortion, int] | None

    @property
    def key(self) -> str:
        return self.space.key

    def radius(self) -> np.ndarray:
        """Distance of each point to the origin of its own space: (N), float32."""
        return self.space.manifold.dist0(self.space.points).float().numpy()

    def describe(self) -> dict[str, Any]:
        """The view as scene.json has it."""
        manifold, points = self.space.manifold, self.space.points
        curved = isinstance(manifold, Lorentz)
        method = "; ".join(filter(None, [self.layout.method, self.space.note]))
        found = None
        if self.bent is not None:
            found = {"mean": self.bent[0].mean, "worst": self.bent[0].worst, "pairs": self.bent[1]}
        return {
            "key": self.key,
            "label": self.space.label,
            "space": "disk" if self.layout.disk else "plane",
            "dim": points.shape[1] - curved,
            "curvature": float(manifold.c) if curved else None,
            "method": method,
            "distortion": found,
            "radius_label": "distance to the origin" if curved else "norm",
        }


@dataclass(frozen=True)
class Scene:
    """N points with their views, the class and level of each (N; −1: unknown), edges parent -> child (E, 2), the root's
    row, JPEG thumbnails by row, and what to tell the user."""

    title: str
    labels: list[str]
    views: tuple[View, ...]
    classes: list[str]
    class_of: np.ndarray
    level: np.ndarray
    edges: np.ndarray
    root: int | None
    thumbnails: dict[int, bytes] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def k(self) -> int:
        return min(NEIGHBOURS, len(self) - 1)

    def describe(self, neighbours: Literal["server", "table"], k: int | None = None) -> dict[str, Any]:
        """What scene.json holds."""
        return {
            "version": 1,
            "title": self.title,
            "count": len(self),
            "views": [view.describe() for view in self.views],
            "classes": self.classes,
            "levels": len(np.unique(self.level[self.level >= 0])),
            "edges": len(self.edges),
            "root": self.root,
            "thumbnails": sorted(self.thumbnails),  # the page asks for these alone
            "neighbours": neighbours,
            "k": self.k if k is None else k,
        }

    def parts(self) -> dict[str, bytes]:
        """Name -> content of everything that the page loads but for scene.json, neighbours and thumbnails."""
        attributes = np.stack([self.level, self.class_of], axis=1)
        parts = {
            "labels.json": to_json(self.labels),
            "attributes.bin": little(attributes, "<i4"),
            "edges.bin": little(self.edges, "<i4"),
        }
        for view in self.views:
            parts[f"view/{view.key}.bin"] = little(view.layout.coordinates, "<f8")
            parts[f"radius/{view.key}.bin"] = little(view.radius(), "<f4")
        return parts


def to_json(value: Any) -> bytes:
    """UTF-8 JSON without NaN."""
    text = json.dumps(finite(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")  # halves of characters, which file names and JSON can hold


def little(values: np.ndarray, kind: str) -> bytes:
    """Numbers as bytes of a little-endian type, row by row."""
    return np.ascontiguousarray(values, np.dtype(kind)).tobytes()


def build_scene(
    source: Source,
    layout: Method = "pca",
    images: Path | None = None,
    progress: Callable[[float], None] = lambda share: None,
) -> Scene:
    """Lay out every space of a source and put everything together; `progress` is told the share that is done."""
    _check_count(source)
    source, level, edges = with_nodes(source)
    _check_count(source)
    notes = list(source.notes)
    if layout == "tsne" and len(source) > tsne.MOST_POINTS:
        layout = "pca"
        notes.append(f"laid out by PCA: t-SNE is for at most {tsne.MOST_POINTS:,} points, these are {len(source):,}")
    thumbnails: dict[int, bytes] = {}
    if images is not None:
        thumbnails, more = read_thumbnails(images, source.names, source.classes)
        notes += more
    share = 1.0 / len(source.spaces)
    views = tuple(
        _view(space, source, layout, lambda done, first=number * share: progress(first + share * done))
        for number, space in enumerate(source.spaces)
    )
    classes, class_of = _classes(source.classes, len(source))
    top = np.flatnonzero(level == 0)
    root = int(top[0]) if len(top) == 1 else None
    title, labels = source.title, source.names
    return Scene(title, labels, views, classes, class_of, level, edges, root, thumbnails, tuple(notes))


def _check_count(source: Source) -> None:
    if len(source) > MOST_POINTS:
        raise UsageError(
            f"{source.title}: {len(source):,} points; at most {MOST_POINTS:,} can be shown: take fewer with --limit"
        )
    if len(source) < 2:
        raise UsageError(f"{source.title}: {len(source)} points; at least two are needed")


def _view(space: Space, source: Source, method: Method, progress: Callable[[float], None]) -> View:
    near = Neighbours(space.manifold, space.points)
    first, second = some_pairs(len(source))
    if space.drawn is not None and source.taxonomy is not None and source.nodes is not None:
        true = source.taxonomy.distance(source.nodes[first], source.nodes[second])
    else:
        true = distances(space.manifold, space.points, first, second)

    def measured(layout: Layout) -> View:
        return View(space, layout, near, bent(layout, true, first, second))

    view = measured(space.drawn or _principal(space))
    if space.drawn is None:
        if isinstance(space.manifold, Lorentz) and source.taxonomy is None:
            # Without a root nothing says that the origin is the middle; features often lie all to one side of it.
            centre = space.manifold.centroid(space.points)
            view = min(view, measured(hyperbolic_pca(space.manifold, space.points, centre)), key=_bend)
        if method == "tsne":
            lay_out = hyperbolic_tsne if isinstance(space.manifold, Lorentz) else flat_tsne
            view = measured(lay_out(near, view.layout, progress))
    progress(1.0)
    return view


def _principal(space: Space) -> Layout:
    if isinstance(space.manifold, Lorentz):
        return hyperbolic_pca(space.manifold, space.points)
    return flat_pca(space.points)


def _bend(view: View) -> float:
    """Mean distortion of a view; none where all points coincide."""
    return 0.0 if view.bent is None else view.bent[0].mean


def _classes(classes: list[str] | None, count: int) -> tuple[list[str], np.ndarray]:
    """The different classes, sorted, and the place of each point's class among them (N); −1 where there is none."""
    if classes is None:
        return [], np.full(count, -1)
    names = sorted(set(classes))
    place = {name: number for number, name in enumerate(names)}
    return names, np.array([place[name] for name in classes])
