"""``leafward explain RUN PHOTO... --words WORD...``: the predicted segmentation of a photo for any list of words."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from leafward.errors import UsageError, need

if TYPE_CHECKING:
    from rich.console import Console

SUMMARY = "Segmentation of photos into any list of words, drawn over them, as PNG and one HTML page."


@dataclass
class Args:
    target: Annotated[Path, tyro.conf.Positional]
    """A finished run of leafward train hyperclip --task segment."""
    images: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Photos."""
    words: tuple[str, ...] = ()
    """What to look for."""
    background: float = 0.0
    """Pixels in which no word reaches this probability are left as they are."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute."""
    out: Path = Path("explained")
    """Folder for the pictures and index.html."""


def run(args: Args, console: Console) -> dict[str, Any]:
    import torch

    from leafward.data.image_files import read_image
    from leafward.engine.devices import device_of
    from leafward.report import Result
    from leafward.systems.hyperclip.segment.figures import bars, overlay, png
    from leafward.systems.hyperclip.segment.model import open_run
    from leafward.systems.hyperclip.segment.task import as_bytes, segment

    if not args.images or not args.words:
        raise UsageError("give at least one photo and --words")
    distinct = len(set(args.words)) == len(args.words) and all(word.strip() for word in args.words)
    need(distinct, "--words", "different words, none of them empty", args.words)
    need(0.0 <= args.background <= 1.0, "--background", "in 0…1", args.background)
    config, model = open_run(args.target)
    model.to(device_of(args.device))
    with torch.no_grad():
        text = model.text(args.words)
    page = Result("What is where", f"{args.target}: {', '.join(args.words)}")
    drawn = []
    for index, path in enumerate(args.images):  # photos of different folders may be called alike
        image = as_bytes(read_image(path))
        places = segment(model, image, text, config.data.size, args.background)
        data = png(overlay(image.permute(1, 2, 0).numpy(), places.numpy(), len(args.words)))
        file = args.out / f"{index:03d}-{path.stem}-segments.png"
        shares = {word: float((places == place).float().mean()) for place, word in enumerate(args.words)}
        page.section(path.name)
        page.picture(file, data, alt=f"{path.name}, segmented", caption=path.name)
        found = [shares[word] or None for word in args.words]
        if any(found):
            page.figure(
                bars(args.words, found, "share of the pixels, %"), "The words that were found, in their colours"
            )
        drawn.append({"image": str(path), "picture": str(file), "shares": shares})
    page.write(args.out / "index.html")
    console.print(f"wrote {len(drawn)} pictures and {args.out / 'index.html'}", markup=False)
    return {"out": str(args.out), "images": drawn}
