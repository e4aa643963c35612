"""What a user hands to the explorer, read into points with names, classes and a hierarchy.

A source holds N points in one or several spaces (a Lorentz model, its Euclidean twin), all rows in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from leafward.config import checked
from leafward.data.arrays import ARRAYS, array_names, read_matrix
from leafward.data.items import read_items
from leafward.data.tables import TEXTS, read_names
from leafward.data.taxonomy import of_wordnet, read_taxonomy
from leafward.engine.layout import is_run, members_of
from leafward.engine.run import RunDirectory
from leafward.errors import DataError, LeafwardError, UsageError, named, need
from leafward.explorer.layout import Layout
from leafward.explorer.tokens import read_tokens
from leafward.explorer.tree import tree_layout
from leafward.files import check_size
from leafward.geometry import Euclidean, Lorentz
from leafward.hierarchy import Taxonomy
from leafward.systems.taxonomy.config import Config

Vectors = Literal["tangent", "space", "points"]
#: Bytes of a file that is read into memory.
LARGEST_FILE = 8 << 30
#: Longest tangent vector, times √c, that is taken as it is (docs/conventions.md), and to what a longer one is scaled.
LARGEST_RADIUS, SCALED_RADIUS = 13.75, 3.0
#: Its square is still far from the end of float32.
LARGEST_NUMBER = 1e12
#: Beyond this median radius, times √c, nearly everything is drawn at the rim.
RIM_RADIUS = 6.0
INDEX = ("index.safetensors", "items.json")
FEATURES = {"image_features", "text_features", "labels"}


@dataclass(frozen=True)
class Space:
    """Points (N, m) of a manifold under a key; `drawn` where the points are themselves a drawing in the disk."""

    key: str
    label: str
    manifold: Lorentz | Euclidean
    points: Tensor
    note: str = ""
    drawn: Layout | None = None

    def take(self, rows: np.ndarray) -> Space:
        """Some of the points."""
        drawn = self.drawn and replace(self.drawn, coordinates=self.drawn.coordinates[rows])
        return replace(self, points=self.points[torch.from_numpy(rows)], drawn=drawn)


@dataclass(frozen=True)
class Source:
    """N points: names, spaces, the class of each (or None), and where they stand in a taxonomy.

    nodes (N): the node that each point belongs to; own: whether the points are the nodes themselves. notes: what a
    user should know about the reading.
    """

    title: str
    names: list[str]
    spaces: tuple[Space, ...]
    classes: list[str] | None = None
    taxonomy: Taxonomy | None = None
    nodes: np.ndarray | None = None
    own: bool = False
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.names)

    def take(self, rows: np.ndarray) -> Source:
        """Some of the points, in the given order."""
        return replace(
            self,
            names=[self.names[row] for row in rows],
            spaces=tuple(space.take(rows) for space in self.spaces),
            classes=None if self.classes is None else [self.classes[row] for row in rows],
            nodes=None if self.nodes is None else self.nodes[rows],
        )

    def limited(self, limit: int, seed: int = 0) -> Source:
        """At most `limit` points: of a taxonomy its top, so that it stays in one piece; else a random sample."""
        need(limit >= 2, "limit", "a whole number ≥ 2", limit)
        if len(self) <= limit:
            return self
        if self.own and self.taxonomy is not None and self.nodes is not None:
            rows, what = np.argsort(self.taxonomy.depth[self.nodes], kind="stable")[:limit], "the top"
        else:
            rows, what = np.random.default_rng(seed).permutation(len(self))[:limit], "a random sample"
        note = f"{limit:,} of {len(self):,} points are shown, {what}"
        return replace(self.take(np.sort(rows)), notes=(*self.notes, note))

    def beside(self, other: Source) -> Source:
        """This source with the spaces of another one of the same names, as further views."""
        matched = other
        if other.names != self.names:
            place = {name: row for row, name in enumerate(other.names)}
            gone = [name for name in self.names if name not in place]
            if gone:
                raise DataError(f"{other.title} has no point {gone[0]!r}, which {self.title} has ({len(gone)} such)")
            matched = other.take(np.array([place[name] for name in self.names]))
        taken = {space.key for space in self.spaces}
        more = []
        for space in matched.spaces:
            key = next(key for key in _numbered(space.key) if key not in taken)
            taken.add(key)
            more.append(replace(space, key=key, label=f"{space.label} · {other.title}"))
        return replace(self, spaces=(*self.spaces, *more), notes=(*self.notes, *other.notes))


def _numbered(key: str) -> Iterator[str]:
    yield key
    number = 2
    while True:
        yield f"{key}-{number}"
        number += 1


@dataclass(frozen=True)
class Options:
    """How a target is read; the command's flags of the same names say more."""

    labels: Path | None = None
    taxonomy: str | None = None
    root: str | None = None
    array: str | None = None
    vectors: Vectors = "tangent"
    c: float | None = None
    radius: float | None = None
    centre: bool = False

    def __post_init__(self) -> None:
        need(self.c is None or 1e-6 <= self.c <= 1e6, "c", "a number from 1e-6 to 1e6", self.c)
        most = LARGEST_RADIUS / (self.c or 1.0) ** 0.5
        need(self.radius is None or 0 < self.radius <= most, "radius", f"above 0, at most {most:.4g}", self.radius)
        for name in ("radius", "centre"):
            given = getattr(self, name)
            need(not given or self.vectors == "tangent", name, "left out but for --vectors tangent", given)


def read_source(target: str | Path, options: Options | None = None) -> Source:
    """The points of a matrix or feature file, a folder of embeddings, a taxonomy, a run directory or an index."""
    path, options = Path(target), options or Options()
    if of_wordnet(target):
        return _from_taxonomy(path, options)
    if not path.exists():
        raise DataError(f"no such file or folder: {path}")
    if path.is_file():
        if path.suffix not in ARRAYS + TEXTS:
            raise UsageError(f"{path}: expected a file that ends in {', '.join(ARRAYS + TEXTS)}, or a folder")
        check_size(path, LARGEST_FILE)
        if path.suffix in TEXTS:
            return _from_taxonomy(path, options)
        return _from_features(path, options) if _holds_features(path) else _from_items(path, options)
    if all((path / name).is_file() for name in INDEX):
        return _from_index(path)
    if is_run(path):
        return _from_run(path, options)
    for file in path.glob("embeddings.*"):
        check_size(file, LARGEST_FILE)
    return _from_items(path, options)


def _title(path: Path) -> str:
    """A file's name as text, whatever bytes it has."""
    return path.resolve().name.encode("utf-8", "replace").decode()


def _from_taxonomy(path: Path, options: Options) -> Source:
    """A taxonomy drawn as a tree: the drawing is the space."""
    tax = read_taxonomy(path, options.root)
    drawn = tree_layout(tax)
    manifold = Lorentz(1.0)
    points = manifold.from_poincare(torch.from_numpy(drawn.coordinates))
    space = Space("poincare", "Poincaré disk", manifold, points, drawn=drawn)
    return _with_taxonomy(Source(_title(path), list(tax.names), (space,)), tax, np.arange(len(tax)))


def _from_items(path: Path, options: Options) -> Source:
    items = read_items(path, options.labels, options.array)
    with named(path):
        spaces = vector_spaces(torch.from_numpy(items.vectors), options)
    source = Source(_title(path), items.names, spaces, items.labels, notes=_hints(spaces[0], options))
    if options.taxonomy is None:
        return source
    tax = read_taxonomy(options.taxonomy, options.root)
    with named(f"{options.labels or path} (labels, in {options.taxonomy})"):
        nodes = tax.ids(items.names if items.labels is None else items.labels, "label")
    return _with_taxonomy(source, tax, nodes)


def _with_taxonomy(source: Source, tax: Taxonomy, nodes: np.ndarray) -> Source:
    """A source whose points belong to nodes (N), or are the nodes where all are different."""
    own = len(np.unique(nodes)) == len(nodes)
    classes = source.classes
    if classes is None or own:
        branch = branches(tax)
        classes = None if branch is None else [branch[node] for node in nodes]
    return replace(source, taxonomy=tax, nodes=nodes, own=own, classes=classes)


def vector_spaces(rows: Tensor, options: Options) -> tuple[Space, ...]:
    """Rows (N, n) as points of the Lorentz model, and as points of flat space."""
    manifold, notes = Lorentz(options.c or 1.0), []
    if (largest := float(rows.abs().max())) > LARGEST_NUMBER:
        raise UsageError(f"the vectors hold numbers as large as {largest:.3g}; at most {LARGEST_NUMBER:g} can be shown")
    if options.vectors == "points":
        if rows.shape[1] < 2:
            raise UsageError(f"Lorentz points have at least two coordinates, time first; got {rows.shape[1]}")
        points = manifold.project(rows)
    elif options.vectors == "space":
        points = manifold.lift(rows)
    else:
        if options.centre:
            rows = rows - rows.mean(dim=0)
            notes.append("mean removed")
        scale = _scale(rows, options)
        if scale != 1.0:
            notes.append(f"vectors scaled by {scale:.3g} and taken as tangent at the origin")
        points = manifold.expmap0(scale * rows)
    flat = rows if options.vectors == "tangent" else manifold.logmap0(points)
    return (
        Space("lorentz", "Lorentz", manifold, points, "; ".join(notes)),
        Space("euclidean", "Euclidean twin", Euclidean(), flat, "mean removed" if options.centre else ""),
    )


def _hints(space: Space, options: Options) -> tuple[str, ...]:
    """What would show more of vectors that lie far out."""
    middle, root = float(space.manifold.dist0(space.points).median()), (options.c or 1.0) ** 0.5
    if root * middle <= RIM_RADIUS or options.vectors != "tangent":
        return ()
    advice = f"--radius {SCALED_RADIUS / root:.2g} spreads them"
    return (f"half of the points lie beyond radius {middle:.2g}, at the rim of the disk; {advice}",)


def _scale(rows: Tensor, options: Options) -> float:
    longest, radius, root = float(rows.norm(dim=1).max()), options.radius, (options.c or 1.0) ** 0.5
    if radius is None and root * longest > LARGEST_RADIUS:
        radius = SCALED_RADIUS / root
    return 1.0 if radius is None or not longest else radius / longest


def _holds_features(path: Path) -> bool:
    """Whether a file is a feature file of images and classes, by the names of its arrays."""
    try:
        return set(array_names(path)) >= FEATURES
    except DataError:  # its reader says what is wrong with it
        return False


def _from_features(path: Path, options: Options) -> Source:
    """Images and the texts of their classes, as `leafward data features` writes them."""
    from leafward.data.fewshot import read_feature_set

    data = read_feature_set(path)
    with named(path):
        spaces = vector_spaces(torch.cat([data.images, data.texts]).float(), options)
    classes = [data.class_names[label] for label in data.labels.tolist()] + list(data.class_names)
    names = [f"{name} {row}" for row, name in enumerate(classes[: len(data.images)])] + list(data.class_names)
    source = Source(_title(path), names, spaces, classes, notes=_hints(spaces[0], options))
    if options.taxonomy is None:
        return source
    tax = read_taxonomy(options.taxonomy, options.root)
    with named(f"{path} (class names, in {options.taxonomy})"):
        return _with_taxonomy(source, tax, tax.ids(classes, "class"))


def _from_index(path: Path) -> Source:
    """An index that `leafward data index` wrote, with its taxonomy."""
    from leafward.systems.taxonomy.index import load

    check_size(path / INDEX[0], LARGEST_FILE)
    index, settings = load(path)
    points = index.points(index.ids)
    source = Source(_title(path), settings["names"], (Space("lorentz", "Lorentz", Lorentz(index.c), points),))
    if index.taxonomy is None:
        return source
    nodes = index.nodes(index.ids)
    source = replace(source, classes=[index.taxonomy.names[node] for node in nodes])
    return _with_taxonomy(source, index.taxonomy, nodes)


def _from_run(path: Path, options: Options) -> Source:
    """A taxonomy embedding or the tokens of a language model, with the Euclidean twin where there is one."""
    run = RunDirectory.open(path)
    if run.recipe == "helm":
        return _from_language_run(run, options)
    if not (path / "embeddings.safetensors").is_file():
        data = run.config.get("data")
        features = (data if isinstance(data, dict) else run.config).get("features")  # of earlier versions: in no group
        hint = f"; its feature file can be shown: leafward explore {features}" if isinstance(features, str) else ""
        raise DataError(
            f"{path}: this {run.recipe or 'unknown'} run holds no embeddings (those of taxonomy and helm do){hint}"
        )
    names = read_names(path / "names.json", "name")
    twin = _flat_twin(run)
    spaces = [_run_space(run, "Euclidean"), *([] if twin is None else [_run_space(twin, "Euclidean twin")])]
    for space in spaces:
        if len(space.points) != len(names):
            raise DataError(f"{path}: {len(names)} names for {len(space.points)} points of the {space.label} space")
    source = Source(_title(path), names, tuple(spaces))
    try:
        data = checked(Config, run.config).data
        tax = read_taxonomy(options.taxonomy or data.source, options.root or data.root)
    except LeafwardError as error:
        if options.taxonomy is not None:
            raise
        note = f"shown without its taxonomy, which cannot be read: {error}; name it with --taxonomy"
        return replace(source, notes=(note,))
    with named(f"{path} (names, in the taxonomy)"):
        return _with_taxonomy(source, tax, tax.ids(names, "name"))


def _flat_twin(run: RunDirectory) -> RunDirectory | None:
    """The first Euclidean member of a run in a curved space."""
    if run.config.get("geometry") == "euclidean":
        return None
    return next((each for each in members_of(run.path) if each.config.get("geometry") == "euclidean"), None)


def _from_language_run(run: RunDirectory, options: Options) -> Source:
    """The tokens of a trained HELM, in its space and in that of its twin."""
    path = run.path
    need(options.taxonomy is None, "taxonomy", f"left out: the points of {path} are tokens", options.taxonomy)
    if not (path / "model").is_dir():
        raise DataError(f"{path} holds no model yet: its training has not finished")
    names, manifold, points = read_tokens(path / "model")
    flat = isinstance(manifold, Euclidean)
    spaces = [Space(*(("euclidean", "Euclidean") if flat else ("lorentz", "Lorentz")), manifold, points)]
    twin = _flat_twin(run)
    if twin is not None and (twin.path / "model").is_dir():
        others, manifold, points = read_tokens(twin.path / "model")
        if others != names:
            raise DataError(f"{twin.path / 'model'} has other tokens than {path / 'model'}")
        spaces.append(Space("euclidean", "Euclidean twin", manifold, points))
    return Source(_title(path), names, tuple(spaces))


def _run_space(run: RunDirectory, flat: str) -> Space:
    """The points of one trained embedding: rows are tangent vectors as long as the radius, in every geometry. `flat`:
    what a Euclidean one is called."""
    geometry = run.config.get("geometry")
    rows = torch.from_numpy(read_matrix(run.path / "embeddings.safetensors", "tangent"))
    if geometry == "euclidean":
        return Space("euclidean", flat, Euclidean(), rows)
    if geometry not in ("lorentz", "poincare"):
        raise DataError(f"{run.path}: geometry must be lorentz, poincare or euclidean, got {geometry!r}")
    manifold = Lorentz(float(run.config.get("c", 1.0)))
    return Space(geometry, "Lorentz" if geometry == "lorentz" else "Poincaré", manifold, manifold.expmap0(rows))


def branches(tax: Taxonomy) -> list[str] | None:
    """The class of each node of a taxonomy: its ancestor at the first depth with several nodes; None in a chain."""
    counts = np.bincount(tax.depth)
    if counts.max() < 2:
        return None
    ways = tax.paths(np.arange(len(tax)))[:, int(np.argmax(counts > 1))]
    return [tax.names[node] for node in np.where(ways >= 0, ways, tax.root)]
