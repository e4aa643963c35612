"""``leafward explore TARGET``: a local page that shows embeddings, a taxonomy or a run in the Poincaré disk."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from leafward.errors import UsageError, need, require

if TYPE_CHECKING:
    from rich.console import Console

    from leafward.explorer import Scene


@dataclass
class Args:
    target: Annotated[Path, tyro.conf.Positional]
    """Matrix or feature file (.npy, .npz, .safetensors), folder of embeddings, taxonomy (.csv, .json, .txt, wordnet,
    wordnet:NODE), run of recipe taxonomy or helm, or index of `leafward data index`."""
    labels: Path | None = None
    """The class of each vector: .txt, .json or .csv (column label). Default: what a folder says."""
    taxonomy: str | None = None
    """Taxonomy that the labels (else the names) belong to: .csv, .json, .txt, wordnet or wordnet:NODE."""
    root: str | None = None
    """Name of a root to put above a taxonomy that has several."""
    images: Path | None = None
    """Folder of images, called like the points or their classes, for thumbnails."""
    beside: tuple[Path, ...] = ()
    """More targets with the same names, shown as further views."""
    limit: int | None = None
    """Show at most so many points: the top of a taxonomy, else a random sample."""
    layout: Literal["pca", "tsne"] = "pca"
    """How points of many dimensions are laid out: principal axes with the radius kept, or t-SNE in the disk."""
    vectors: Literal["tangent", "space", "points"] = "tangent"
    """What a row is: a tangent vector at the origin (also any Euclidean embedding), the space part of a Lorentz point,
    or a whole Lorentz point, time first."""
    c: float | None = None
    """Curvature constant c > 0 of the space of the vectors (sectional curvature −c); None: 1."""
    radius: float | None = None
    """Scale tangent vectors so that the longest has this length; None: only if they are too long to be told apart."""
    centre: bool = False
    """Remove the mean of the tangent vectors first."""
    array: str | None = None
    """Name of the matrix, where a file holds several."""
    export: Path | None = None
    """Write the page as this one .html file, which needs no server, and exit."""
    host: str = "127.0.0.1"
    """Address to listen on: this machine's own, unless --allow-remote."""
    allow_remote: bool = False
    """Let other machines reach the page at --host. Whoever has the address sees the data, and so does the network."""
    port: int = 0
    """Port to listen on; 0 takes a free one."""
    no_open: bool = False
    """Do not open a browser."""


def run(args: Args, console: Console) -> dict[str, Any]:
    from leafward.explorer.browser import open_page, redirect
    from leafward.explorer.export import write_page
    from leafward.explorer.server import check_host, serve
    from leafward.files import finite

    _check(args)
    check_host(args.host, args.allow_remote)
    if args.export is None:  # said before the points are laid out, which may take long
        require("fastapi", "serve")
        require("uvicorn", "serve")
    scene = _scene(args)
    result = _show(scene, console)
    if args.export is not None:
        with _shares("write") as told:
            write_page(scene, args.export, told)
        console.print(f"wrote {args.export} ({args.export.stat().st_size / 2**20:.1f} MiB)", markup=False)
        return {**result, "export": str(args.export)}

    def ready(url: str) -> None:
        result["url"] = url
        console.print(f"{url}   (Ctrl-C ends it)", markup=False, soft_wrap=True)
        if console.stderr:  # --json: whoever reads stdout needs the address now, not at the end
            print(json.dumps(finite(result)), flush=True)
        if not args.no_open:
            open_page(opened.enter_context(redirect(url)))

    with ExitStack() as opened:
        try:
            serve(scene, ready, args.host, args.port)
        except KeyboardInterrupt:
            console.print("ended")
    return result


def _check(args: Args) -> None:
    need(0 <= args.port <= 65535, "port", "a number from 0 to 65535", args.port)
    need(args.limit is None or args.limit >= 2, "limit", "a whole number ≥ 2", args.limit)
    if args.export is not None and args.export.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"--export {args.export}: the page is one file that ends in .html")


def _scene(args: Args) -> Scene:
    from leafward.explorer.scene import build_scene
    from leafward.explorer.sources import Options, read_source

    names = ("labels", "taxonomy", "root", "array", "vectors", "c", "radius", "centre")
    options = Options(**{name: getattr(args, name) for name in names})
    source = read_source(args.target, options)
    for other in args.beside:
        source = source.beside(read_source(other, options))
    if args.limit is not None:
        source = source.limited(args.limit)
    with _shares("lay out") as told:
        return build_scene(source, args.layout, args.images, told)


def _show(scene: Scene, console: Console) -> dict[str, Any]:
    """Print what the scene is; the same as a record."""
    from leafward.report import show_rows

    described = scene.describe("server")
    rows = []
    for view in described["views"]:
        bent = view["distortion"]
        shown = "–" if bent is None else f"{bent['mean']:.3g}"
        rows.append((view["label"], str(view["dim"]), view["method"], shown))
    show_rows(console, ["view", "dim", "laid out by", "mean distortion"], rows, f"{scene.title}: {len(scene):,} points")
    for note in scene.notes:
        console.print(f"note: {note}", markup=False)
    return {"points": len(scene), "views": described["views"], "notes": list(scene.notes)}


@contextmanager
def _shares(what: str) -> Iterator[Callable[[float], None]]:
    """A progress bar that is told the share done, from 0 to 1."""
    from leafward.engine import Progress

    with Progress(100, what, unit="%") as progress:
        yield lambda share: progress.update(int(100 * share))
