"""``leafward explain RUN PHOTO... --words WORD...``: the predicted segmentation of a photo for any list of words."""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from leafward.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    from rich.console import Console

SUMMARY = "Segmentation of photos into any list of words, drawn over them, as PNG and one HTML page."


@dataclass
class Args:
    target: Annotated[Path, tyro.conf.Positional]
    """A finished run of leafward train segmenter."""
    images: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Photos."""
    words: tuple[str, ...] = ()
    """What to look for."""
    background: float = 0.0
    """Pixels in which no word reaches this probability are left as they are."""
    out: Path = Path("explained")
    """Folder for the pictures and index.html."""


def run(args: Args, console: Console) -> dict[str, Any]:
    from leafward.adapters.encoders import open_image
    from leafward.files import replacing
    from leafward.recipes._segmenter import open_run
    from leafward.report import Page
    from leafward.tasks.open_vocabulary import as_bytes, segment

    if not args.images or not args.words:
        raise UsageError("give at least one photo and --words")
    config, model = open_run(args.target)
    page = Page("What is where", subtitle=f"{args.target}: {', '.join(args.words)}")
    drawn = []
    for path in args.images:
        image = as_bytes(open_image(path))
        places = segment(model, image, args.words, config.size, args.background)
        data = png(overlay(image.permute(1, 2, 0).numpy(), places.numpy(), len(args.words)))
        file = args.out / f"{path.stem}-segments.png"
        with replacing(file) as temporary:
            temporary.write_bytes(data)
        shares = {word: float((places == place).float().mean()) for place, word in enumerate(args.words)}
        page.section(path.name)
        page.image(data, alt=f"{path.name}, segmented", caption=path.name)
        colours = palette(len(args.words))
        page.table(
            ["word", "colour", "share of the pixels"],
            [[word, "#{:02x}{:02x}{:02x}".format(*colours[i]), shares[word]] for i, word in enumerate(args.words)],
        )
        drawn.append({"image": str(path), "picture": str(file), "shares": shares})
    page.write(args.out / "index.html")
    console.print(f"wrote {len(drawn)} pictures and {args.out / 'index.html'}", markup=False)
    return {"out": str(args.out), "images": drawn}


def palette(count: int) -> np.ndarray:
    """Colours (count, 3) of bytes, far apart in hue."""
    import colorsys

    import numpy as np

    golden = 0.61803398875
    return np.array(
        [[round(255 * x) for x in colorsys.hsv_to_rgb(i * golden % 1.0, 0.75, 0.95)] for i in range(count)], np.uint8
    )


def overlay(image: np.ndarray, places: np.ndarray, count: int) -> np.ndarray:
    """An image (H, W, 3) half covered by the colours of its places (H, W); −1 stays as it is."""
    import numpy as np

    colours = palette(count)[np.maximum(places, 0)]
    mixed = (image.astype(np.uint16) + colours) // 2
    return np.where(places[..., None] >= 0, mixed, image).astype(np.uint8)


def png(image: np.ndarray) -> bytes:
    from leafward.errors import require

    buffer = BytesIO()
    require("PIL.Image", "vision").fromarray(image).save(buffer, "PNG")
    return buffer.getvalue()
