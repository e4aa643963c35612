"""``leafward data index EMBEDDINGS --taxonomy FILE --out INDEX``: an index to be searched by ``--task search``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from leafward.errors import DataError, UsageError, named

if TYPE_CHECKING:
    from rich.console import Console

    from leafward.hierarchy import LorentzIndex

SUMMARY = "Build a search index over a file or folder of embeddings, with the taxonomy that their labels belong to."
VERSION = 1
#: √c · radius to which Lorentz distances can be trusted in float32 (docs/conventions.md)
LARGEST_RADIUS = 13.75


@dataclass
class Args:
    embeddings: Annotated[Path, tyro.conf.Positional]
    """Matrix (.npy, .npz, .safetensors); folder with embeddings, names and labels; or folder LABEL/ITEM.npy."""
    out: Path
    """The folder of the index."""
    taxonomy: str | None = None
    """Taxonomy (.csv of child,parent; .json; .txt; wordnet; wordnet:NODE), to search by node."""
    labels: Path | None = None
    """The node of each vector: .txt, .json or .csv (column label). Default: what the folder says, else the names."""
    vectors: Literal["tangent", "space", "points"] = "tangent"
    """What a row is: a tangent vector at the origin (also any Euclidean embedding), the space part of a Lorentz point,
    or a whole Lorentz point, time first."""
    radius: float | None = None
    """Scale tangent vectors so that the longest has this length; None: leave them as they are."""
    c: float | None = None
    """Curvature constant c > 0 of the space (sectional curvature −c); None: that of the run that made them, else 1."""
    kind: Literal["flat", "ivf"] = "flat"
    """Compare with every point, or with those in the nearest cells (for a million points)."""
    storage: Literal["float32", "float16"] = "float32"
    """Precision of the stored points."""
    array: str | None = None
    """Name of the matrix, where a file holds several."""
    root: str | None = None
    """Name of a root to put above a taxonomy that has several."""
    overwrite: bool = False
    """Replace an index that is there."""


def run(args: Args, console: Console) -> dict[str, Any]:
    from leafward.data.items import read_items
    from leafward.data.taxonomy import read_taxonomy
    from leafward.files import write_json
    from leafward.geometry import Lorentz
    from leafward.hierarchy import LorentzIndex

    _check(args)
    tax = None if args.taxonomy is None else read_taxonomy(args.taxonomy, args.root)
    items = read_items(args.embeddings, args.labels, args.array)
    labels = None
    if tax is not None:
        labels = items.names if items.labels is None else items.labels
        where = args.labels or args.embeddings
        with named(f"{where} (labels, in {args.taxonomy})"):
            labels = tax.ids(labels, "label")
    c = _curvature(args)
    scale = _scale(items.vectors, args, c)
    with named(args.embeddings):
        points = to_points(items.vectors, args.vectors, scale, c)
        index = LorentzIndex(Lorentz(c), points, kind=args.kind, storage=args.storage, taxonomy=tax, nodes=labels)
    index.save(args.out / "index.safetensors")
    # The settings come last: a folder with them is a whole index.
    settings = {"version": VERSION, "vectors": args.vectors, "scale": scale, "names": items.names}
    write_json(args.out / "items.json", settings)
    console.print(f"{index!r} in {args.out}", markup=False)
    return {"out": str(args.out), "points": len(index), "kind": args.kind, "scale": scale}


def load(folder: Path) -> tuple[LorentzIndex, dict[str, Any]]:
    """The index and its settings, as `run` wrote them."""
    from leafward.files import read_record
    from leafward.hierarchy import LorentzIndex

    try:
        settings = read_record(folder / "items.json")
        version, names, vectors = settings["version"], list(settings["names"]), settings["vectors"]
        scale = float(settings["scale"])
    except (DataError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder} is not an index that 'leafward data index' wrote: {error}") from error
    if version != VERSION:
        raise DataError(f"{folder}: this index is of version {version}; version {VERSION} can be read")
    index = LorentzIndex.load(folder / "index.safetensors")
    if len(names) != len(index):
        raise DataError(f"{folder}: {len(names)} names for {len(index)} points; build the index anew")
    return index, {"names": names, "scale": scale, "vectors": vectors}


def to_points(vectors: Any, kind: str, scale: float, c: float) -> Any:
    """Rows of any of the three kinds as Lorentz points: (N, n) or (N, n+1) -> (N, n+1)."""
    import torch

    from leafward.geometry import Lorentz

    rows = torch.from_numpy(vectors)
    if kind == "points":
        return rows
    manifold = Lorentz(c)
    return manifold.expmap0(scale * rows) if kind == "tangent" else manifold.lift(rows)


def _curvature(args: Args) -> float:
    from leafward.engine import RunDirectory, is_run

    if args.c is not None:
        return args.c
    if is_run(args.embeddings):
        return float(RunDirectory.open(args.embeddings).config.get("c", 1.0))
    return 1.0


def _scale(vectors: Any, args: Args, c: float) -> float:
    """The factor on tangent vectors; those too long for float32 are refused."""
    import numpy as np

    if args.vectors != "tangent":
        return 1.0
    longest = float(np.linalg.norm(vectors, axis=1).max())
    if args.radius is not None:
        if not longest:
            raise DataError(f"{args.embeddings}: every vector is zero")
        return args.radius / longest
    if longest * c**0.5 > LARGEST_RADIUS:
        raise DataError(
            f"{args.embeddings}: the longest vector has length {longest:.3g}, and float32 cannot tell points apart "
            f"beyond radius {LARGEST_RADIUS / c**0.5:.3g}; scale them with --radius, for example --radius 1"
        )
    return 1.0


def _check(args: Args) -> None:
    if args.c is not None and not args.c > 0:
        raise UsageError(f"c must be positive, got {args.c}")
    if args.radius is not None and (args.vectors != "tangent" or not args.radius > 0):
        raise UsageError(f"radius must be positive and belongs to --vectors tangent, got {args.radius}")
    if args.taxonomy is None and args.labels is not None:
        raise UsageError("labels need --taxonomy, which says what they are")
    if (args.out / "items.json").exists() and not args.overwrite:
        raise UsageError(f"{args.out} holds an index; use --overwrite to replace it")
