"""``leafward explain RUN IMAGE...``: the tree of parts that Hi-Mapper found in an image, drawn over it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from leafward.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure
    from rich.console import Console
    from torch import Tensor

    from leafward.systems.himapper import Hierarchy, HiMapper
    from leafward.systems.vision.build import Card

SUMMARY = "The tree of parts that Hi-Mapper found in images, drawn over them, as PNG and one HTML page."
LEGEND = (
    "Over the photo: every node of the tree stands where it looks more than the other nodes of its level do, larger at "
    "higher levels, joined to its parent; places have the colour of the top node that looks at them most.\n\n"
    "Beside it: the nodes as points of the space in which the hierarchy was learned, along the two directions in which "
    "they differ most, radii kept. Below: every node as the photo lit where the node looks, the top level above."
)

LARGEST, TILE = 1024, 256
"""Pixels of a photo's side: of the tree over it, and of each spotlight."""


@dataclass
class Args:
    target: Annotated[Path, tyro.conf.Positional]
    """A run directory, or a published model's folder."""
    images: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Image files."""
    out: Path = Path("explained")
    """Folder for the pictures and index.html."""
    size: int | None = None
    """Pixels of the image's shorter side; None: as the model was trained. More give a finer map, where the backbone
    takes any size."""

    def __post_init__(self) -> None:
        if not self.images:
            raise UsageError("give at least one image")
        if self.size is not None and self.size < 32:
            raise UsageError(f"size must be at least 32 pixels, got {self.size}")


def run(args: Args, console: Console) -> dict[str, Any]:
    """Draw every image; returns the files and the mean distances in each image's tree."""
    from leafward.report import Result
    from leafward.systems.himapper import figures as drawing
    from leafward.systems.himapper.build import mapper_of, open_model

    model, card = open_model(args.target)
    mapper = mapper_of(model)
    if mapper is None:
        raise UsageError(f"{args.target} is a plain backbone, without a hierarchy to draw")
    page = Result(f"What Hi-Mapper saw through {card.vision.model}", str(args.target))
    page.text(LEGEND)
    files: list[str] = []
    distances: dict[str, dict[str, float]] = {}
    for index, path in enumerate(args.images):
        photo, tensor = _prepare(path, args.size or card.vision.size, card.vision)
        found = _hierarchy(mapper, tensor, card.vision)
        distances[str(path)] = relatives(found)
        page.section(path.name)

        def show(
            name: str, figure: Figure, caption: str, pixels: int = 0, index: int = index, path: Path = path
        ) -> None:
            file, data = args.out / f"{index:03d}-{path.stem}-{name}.png", drawing.png(figure, pixels)
            files.append(page.picture(file, data, alt=f"{caption}: {path.name}", caption=caption))

        show("tree", drawing.over_photo(photo, found, path.name), "the tree over the photo", len(photo))
        show("points", drawing.disk(found), "the nodes in their space")
        skip = -(-len(photo) // TILE)  # there is one for each node
        page.table(["from a node to", "mean distance"], list(distances[str(path)].items()))
        # After a table it has a row to itself.
        show("nodes", drawing.spotlights(photo[::skip, ::skip], found), "where each node looks")
    page.write(args.out / "index.html")
    console.print(f"page: {args.out / 'index.html'}")
    return {"page": str(args.out / "index.html"), "pictures": files, "distances": distances}


def _hierarchy(mapper: HiMapper, image: Tensor, card: Card) -> Hierarchy:
    try:
        return mapper.hierarchy(image)
    except AssertionError as error:  # timm's word where a model takes images of one size alone
        if image.shape[-1] == card.size:
            raise
        raise UsageError(f"size must be {card.size} for {card.model}, as it was trained: {error}") from error


def relatives(found: Hierarchy) -> dict[str, float]:
    """Mean distances from the nodes below the top to their relatives, over all images."""
    import torch

    from leafward.geometry import Euclidean, Lorentz

    space = Lorentz(found.curvature) if found.curvature else Euclidean()
    points = found.points.double()
    distances = space.cdist(points, points).mean(dim=0)
    parents, level = found.shape.parents(), found.shape.level_of()
    child = torch.arange(len(parents))
    family = torch.arange(found.shape.nodes) // 2
    cousins = (level[child, None] == level) & (family[child, None] != family)
    named = {"its parent": distances[child, parents], "its sibling": distances[child, child ^ 1]}
    named |= {"the other nodes of its level": distances[child][cousins]} if cousins.any() else {}
    return {name: values.mean().item() for name, values in named.items()}


def _prepare(path: Path, size: int, card: Card) -> tuple[np.ndarray, Tensor]:
    """The centre square of the image as it is, up to `LARGEST` pixels, as (H, W, 3) uint8; and `size` pixels square as
    the model's input (1, 3, size, size)."""
    import numpy as np
    import torch
    from PIL import ImageOps

    from leafward.data.image_files import read_image

    image = read_image(path)
    side = min(*image.size, LARGEST)
    photo = np.array(ImageOps.fit(image, (side, side)))
    pixels = np.array(ImageOps.fit(image, (size, size)))
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (card.mean, card.std))
    return photo, (torch.from_numpy(pixels).permute(2, 0, 1)[None].float() / 255 - mean) / std
