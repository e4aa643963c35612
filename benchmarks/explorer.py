"""The explorer: seconds to build a scene and to answer for neighbours, and how much each layout bends the distances.

    python benchmarks/explorer.py --rows 100000 --width 64
    python benchmarks/explorer.py --rows 5000 --layout-rows 500          # seconds
    python benchmarks/explorer.py --rows 100000 --frames 60              # in Chromium as well (needs playwright)

Points are taxonomy-like, as in retrieval.py. Layouts are compared on fewer points: hyperbolic PCA as the explorer has
it (radius kept), the orthogonal projection to the same axes (the nearest point of their plane), t-SNE, and flat PCA of
the same vectors; and trees are drawn. `neighbours_kept` is the share of the 10 nearest that stay among the 10 nearest.
Times are CPU seconds; with OMP_NUM_THREADS=1 they are those of one core. Prints one JSON object.

`--frames N` draws a random tree of as many nodes in a headless browser, N frames of a pan, each finished before the
next begins: frames per second with everything drawn and at the steps of coarseness that a slow machine goes down while
the view moves, and the milliseconds of a frame that are the page's script. Best of three.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from leafward.explorer import Options, Source, build_scene
from leafward.explorer.export import static_parts, write_page
from leafward.explorer.layout import Layout, bent, flat_pca, hyperbolic_pca, hyperbolic_tsne, principal_axes, some_pairs
from leafward.explorer.neighbours import Neighbours
from leafward.explorer.sources import read_source, vector_spaces
from leafward.explorer.tree import tree_layout
from leafward.geometry import Euclidean, Lorentz
from leafward.hierarchy import Taxonomy
from retrieval import taxonomy_like

K = 10


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    began = time.process_time()
    found = call()
    return found, time.process_time() - began


def speed(rows: int, width: int, radius: float) -> dict[str, float]:
    """Seconds for a scene with its two views, for its bytes, and milliseconds for the neighbours of one point."""
    vectors = taxonomy_like(rows, width, radius)
    source, reading = timed(lambda: Source("bench", [str(i) for i in range(rows)], vector_spaces(vectors, Options())))
    scene, building = timed(lambda: build_scene(source))
    parts, packing = timed(scene.parts)
    near = scene.views[0].neighbours
    asked = torch.randint(rows, (20,), generator=torch.Generator().manual_seed(0))
    _, answering = timed(lambda: [near.of(row[None], scene.k) for row in asked])
    static, exporting = timed(lambda: static_parts(scene))
    return {
        "points_s": reading,
        "scene_s": building,
        "bytes_s": packing,
        "megabytes": sum(map(len, parts.values())) / 1e6,
        "neighbours_ms": 1e3 * answering / len(asked),
        "export_s": exporting,
        "export_megabytes": sum(map(len, static.values())) / 1e6,
    }


def orthogonal(manifold: Lorentz, points: torch.Tensor) -> Layout:
    """The nearest point of the plane of the principal axes: (t, Vᵀs) brought back to the hyperboloid."""
    axes = principal_axes(manifold.logmap0(points))
    flat = (points[:, 1:] @ axes).double()
    norm = (points[:, :1].double().square() - flat.square().sum(dim=1, keepdim=True)).sqrt()
    return Layout(manifold.to_poincare(manifold.lift(flat / norm)).numpy(), True, "orthogonal projection")


def layouts(rows: int, width: int, radius: float) -> dict[str, dict[str, float]]:
    """Mean distortion, neighbours kept and seconds of each layout of the same points."""
    manifold, tangent = Lorentz(1.0), taxonomy_like(rows, width, radius)
    points = manifold.expmap0(tangent)
    curved, flat = Neighbours(manifold, points), Neighbours(Euclidean(), tangent)
    first, second = some_pairs(rows)
    pca = hyperbolic_pca(manifold, points)
    calls = {
        "hyperbolic PCA": (curved, lambda: hyperbolic_pca(manifold, points)),
        "orthogonal projection": (curved, lambda: orthogonal(manifold, points)),
        "hyperbolic t-SNE": (curved, lambda: hyperbolic_tsne(curved, pca, lambda share: None)),
        "flat PCA": (flat, lambda: flat_pca(tangent)),
    }
    found = {}
    for name, (near, call) in calls.items():
        layout, seconds = timed(call)
        true = near.manifold.dist(near.points[first].double(), near.points[second].double()).numpy()
        stretched = bent(layout, true, first, second)
        assert stretched is not None
        found[name] = {"distortion": stretched[0].mean, "neighbours_kept": kept(near, layout), "seconds": seconds}
    return found


def kept(near: Neighbours, layout: Layout) -> float:
    """The share of the K nearest of each point that are among its K nearest in the picture."""
    shown = torch.from_numpy(layout.coordinates)
    plane = Lorentz(1.0) if layout.disk else Euclidean()
    picture = Neighbours(plane, plane.from_poincare(shown).float() if isinstance(plane, Lorentz) else shown.float())
    rows = torch.arange(len(shown))
    before, after = near.of(rows, K)[0], picture.of(rows, K)[0]
    return float((before[:, :, None] == after[:, None]).any(dim=2).float().mean())


def trees() -> dict[str, dict[str, float]]:
    """Distortion of drawn trees against the distances in the graph."""
    rng = np.random.default_rng(0)
    drawn = {
        "binary, 9 levels below the root": [(str(i), str((i - 1) // 2)) for i in range(1, 2**10 - 1)],
        "tenfold, 3 levels below the root": [(str(i), str((i - 1) // 10)) for i in range(1, 1111)],
        "random parents, 3,000 nodes": [(str(i), str(rng.integers(0, i))) for i in range(1, 3000)],
    }
    found = {}
    for name, edges in drawn.items():
        tax = Taxonomy.from_edges([("0", None), *edges])
        layout, seconds = timed(lambda tax=tax: tree_layout(tax))
        first, second = some_pairs(len(tax))
        stretched = bent(layout, tax.distance(first, second), first, second)
        assert stretched is not None
        found[name] = {"distortion": stretched[0].mean, "worst": stretched[0].worst, "seconds": seconds}
    return found


FRAMES = """([frames, coarse]) => { const found = [1, 2, 3].map(() => leafward.fps(frames, coarse));
  return [Math.max(...found.map((f) => f.rate)), Math.min(...found.map((f) => f.script))]; }"""
RENDERER = """() => { const { gl } = leafward.charts[0].renderer;
  const kind = gl.getExtension('WEBGL_debug_renderer_info')?.UNMASKED_RENDERER_WEBGL ?? gl.RENDERER;
  return gl.getParameter(kind); }"""


def browser(rows: int, frames: int) -> dict[str, Any]:
    """Frames per second of the page in Chromium, and milliseconds of script in each."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    rng = np.random.default_rng(0)
    edges = [(str(i), str(rng.integers(0, i))) for i in range(1, rows)]
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        tree, page_file = Path(folder) / "tree.csv", Path(folder) / "page.html"
        Taxonomy.from_edges([("0", None), *edges]).save(tree)
        write_page(build_scene(read_source(tree, Options())), page_file)
        started = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--ignore-gpu-blocklist"])
        page = started.new_page(viewport={"width": 1280, "height": 800})
        page.goto(page_file.as_uri())
        page.evaluate("async () => { await leafward.ready; leafward.fps(4); }")
        found = {coarse: page.evaluate(FRAMES, [frames, coarse]) for coarse in range(5)}
        renderer = page.evaluate(RENDERER)
        started.close()
    return {
        "renderer": renderer,
        "frames_per_second": {coarse: rate for coarse, (rate, _) in found.items()},
        "script_ms": {coarse: script for coarse, (_, script) in found.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000, help="points of the scene that is timed")
    parser.add_argument("--layout-rows", type=int, default=2_000, help="points on which layouts are compared")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--radius", type=float, default=6.0, help="of the farthest point")
    parser.add_argument("--frames", type=int, default=0, help="frames of a pan in a headless browser; 0: no browser")
    args = parser.parse_args()
    print(
        json.dumps(
            {
                "settings": vars(args) | {"threads": torch.get_num_threads(), "torch": torch.__version__},
                **({"browser": browser(args.rows, args.frames)} if args.frames else {}),
                "speed": speed(args.rows, args.width, args.radius),
                "layouts": layouts(args.layout_rows, args.width, args.radius),
                "trees": trees(),
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
