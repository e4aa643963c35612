"""The test photos filed in the taxonomy where a model puts them, as points of hyperbolic space for the explorer."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from leafward.hierarchy import Taxonomy
    from leafward.report import Result

RADIUS = 3.0
"""Distance of every photo from the origin; the features that they are made of have no lengths of their own."""
TREE = "tree.csv"


def file(tax: Taxonomy, answers: np.ndarray, features: Tensor, out: Path) -> tuple[Taxonomy, Tensor]:
    """Hang every test photo under the node that `answers` (photos) has for it; write the tree and its points to `out`.

    features (photos, d) give a photo its direction from the origin. Nodes without photos are left out. Returns the
    tree and the tangent vectors of its nodes (N, d).
    """
    import numpy as np

    from leafward.data.samples import photos
    from leafward.files import replacing, write_text
    from leafward.hierarchy import Taxonomy
    from leafward.hierarchy.filing import filed

    names = [photo.name for photo in photos() if photo.split == "test"]
    placed = ((name, tax.names[node]) for name, node in zip(names, answers, strict=True))
    whole = Taxonomy.from_edges([*tax.edges(), *placed])
    tree = whole.restrict(names)
    tangent = filed(tree, names, features, RADIUS)
    tree.save(out / TREE)
    write_text(out / "names.txt", "".join(f"{name}\n" for name in tree.names))
    with replacing(out / "embeddings.npy") as temporary, open(temporary, "wb") as stream:
        np.save(stream, tangent.numpy())
    return tree, tangent


def command(out: Path, images: Path) -> str:
    """The command that opens the explorer on the catalogue, with thumbnails."""
    return shlex.join(["leafward", "explore", str(out), "--taxonomy", str(out / TREE), "--images", str(images)])


def draw(page: Result, tree: Taxonomy, tangent: Tensor) -> None:
    from leafward.systems.taxonomy.figures import disk

    page.section("The catalogue in the Poincaré disk")
    page.text(
        "Every test photo hangs under the node that the adapted model gives it, however general. A node lies at the "
        "centroid of its photos, so general ones come to lie nearer to the middle, by geometry alone."
    )
    page.figure(
        disk(tree, tangent),
        f"{len(tree)} photos and nodes, each at its own radius, in the direction of two principal axes; lines: "
        "geodesics to the parents; colours: the groups.",
    )


def summary(tree: Taxonomy, tangent: Tensor) -> list[dict[str, Any]]:
    """For every level of the tree how many nodes it has and their mean radius."""
    radius = tangent.norm(dim=1).numpy()
    return [
        {"level": level, "nodes": int((tree.depth == level).sum()), "radius": float(radius[tree.depth == level].mean())}
        for level in range(int(tree.depth.max()) + 1)
    ]
