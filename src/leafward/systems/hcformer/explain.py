"""``leafward explain RUN|MODEL IMAGE...``: the clusters that an HCFormer put an image into, stage by stage."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

if TYPE_CHECKING:
    import numpy as np
    from rich.console import Console

SUMMARY = "Cluster maps of an HCFormer over images, from fine to coarse, as PNG and one HTML page."
LEGEND = (
    "Left: the image as the model sees it. Then, for each stage, the regions whose tokens went to the same centre in "
    "the last block (the heads' weights averaged), in their mean colours. A region of a stage is a union of regions of "
    "the stage before: it goes, whole, to the coarser region that most of it lies in.\n\n"
    "The next row shows the window level: one colour for each global centre, over the windows that went to it.\n\n"
    "The last row and the table say how sure that is. A token is shared out over all centres of its window, by "
    "each head for itself; what is drawn is the largest share of the heads' mean. Bright: that share is near 1. Top "
    "weight is its mean over the image, beside what equal shares would be; heads that agree is how often a head's own "
    "first centre is the drawn one. Where both are low, the borders drawn above are one of many that the "
    "model could be said to have."
)

CONFIDENCE = ("stage", "level", "top_weight", "equal_shares", "heads_agree")


@dataclass
class Args:
    target: Annotated[str, tyro.conf.Positional]
    """A run directory, a published model's folder, a checkpoint (RUN/checkpoints/step-…), or the name of a timm model
    (untrained), such as hcformer_nano."""
    images: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Image files."""
    out: Path = Path("explained")
    """Folder for the pictures and index.html."""
    size: int | None = None
    """Pixels of the image's shorter side; None: as the model was trained."""
    heads: bool = False
    """Draw every head by itself as well."""


def run(args: Args, console: Console) -> dict[str, Any]:
    """Draw every image; returns the files and the number of regions of each stage."""
    from leafward.errors import UsageError
    from leafward.report import Result
    from leafward.systems.hcformer.open import open_backbone

    if not args.images:
        raise UsageError("give at least one image")
    if args.size is not None and args.size < 32:
        raise UsageError(f"size must be at least 32 pixels, got {args.size}")
    model, card = open_backbone(args.target)
    trained = Path(args.target).is_dir()
    page = Result(f"What {card.model} saw", str(args.target))
    if not trained:
        page.note("This model is untrained: the regions show what its structure alone brings.")
    page.text(LEGEND)
    files, counts, sure = [], {}, {}
    for index, path in enumerate(args.images):
        drawn = _draw(model, card, path, args.size, args.heads)
        page.section(path.name)
        for name, (data, caption) in drawn.pictures.items():
            file = args.out / f"{index:03d}-{path.stem}-{name}.png"
            files.append(page.picture(file, data, alt=f"{name} clusters of {path.name}", caption=caption))
        page.table(["stage", "regions at the patch level", "global centres used"], drawn.rows)
        page.table(["stage", "level", "top weight", "equal shares", "heads that agree"], drawn.confidence)
        sure[str(path)] = [dict(zip(CONFIDENCE, row, strict=True)) for row in drawn.confidence]
        counts[str(path)] = [row[1] for row in drawn.rows]
    page.write(args.out / "index.html")
    if not trained:
        console.print(f"{args.target} is untrained: its weights are random")
    console.print(f"page: {args.out / 'index.html'}")
    return {
        "page": str(args.out / "index.html"),
        "pictures": files,
        "regions": counts,
        "confidence": sure,
        "trained": trained,
    }


@dataclass
class _Drawn:
    pictures: dict[str, tuple[bytes, str]]
    """Name -> PNG data and caption."""
    rows: list[tuple[str, int, int | None]]
    confidence: list[tuple[str, str, float, float, float]]


def _draw(model: Any, card: Any, path: Path, size: int | None, heads: bool) -> _Drawn:
    from leafward.systems.hcformer import figures as drawing

    image, tensor = _prepare(path, size or card.size, card)
    last = {(a.stage, a.level): a for a in model.assignments(tensor)}  # later blocks replace earlier ones
    stages = sorted({stage for stage, _ in last})
    height, width = image.shape[:2]
    fine = [drawing.enlarge(drawing.patch_regions(last[stage, "patch"]), height, width) for stage in stages]
    composed = drawing.compose(fine)
    coarse = {
        stage: drawing.enlarge(drawing.window_regions(last[stage, "window"]), height, width)
        for stage in stages
        if (stage, "window") in last
    }
    rows = [
        (f"{stage + 1}", int(labels.max()) + 1, len(set(coarse[stage].ravel().tolist())) if stage in coarse else None)
        for stage, labels in zip(stages, composed, strict=True)
    ]
    patches = drawing.sheet([image, *(drawing.paint(image, labels) for labels in composed)])
    pictures = {"patches": (_png(patches), "image, then stages " + ", ".join(str(s + 1) for s in stages))}
    if coarse:
        tinted = [
            drawing.tint(image, labels, last[stage, "window"].weights.shape[-1]) for stage, labels in coarse.items()
        ]
        caption = "window level of stages " + ", ".join(str(stage + 1) for stage in coarse)
        pictures["windows"] = (_png(drawing.sheet(tinted)), caption)
    sure = {key: drawing.confidence(assignment) for key, assignment in last.items()}
    shaded = [
        drawing.shade(image, drawing.enlarge(sure[stage, "patch"][0], height, width), labels)
        for stage, labels in zip(stages, fine, strict=True)
    ]
    pictures["confidence"] = (_png(drawing.sheet(shaded)), "top weight of the patch level, before regions are joined")
    if heads:
        pictures |= _each_head(image, last, stages)
    table = [
        (f"{stage + 1}", level, float(top.mean()), 1 / last[stage, level].weights.shape[-1], float(agree.mean()))
        for (stage, level), (top, agree) in sorted(sure.items())
    ]
    return _Drawn(pictures, rows, table)


def _each_head(image: np.ndarray, last: Any, stages: Any) -> dict[str, tuple[bytes, str]]:
    """The regions of the patch level of every stage by each head alone."""
    from leafward.systems.hcformer import figures as drawing

    height, width = image.shape[:2]
    drawn = {}
    for stage in stages:
        count = last[stage, "patch"].weights.shape[2]
        maps = [drawing.patch_regions(last[stage, "patch"], head=head) for head in range(count)]
        painted = [drawing.paint(image, drawing.enlarge(labels, height, width)) for labels in maps]
        drawn[f"heads-{stage + 1}"] = (_png(drawing.sheet(painted)), f"the heads of stage {stage + 1}")
    return drawn


def _prepare(path: Path, size: int, card: Any) -> tuple[np.ndarray, Any]:
    """The image with its shorter side at `size` pixels, as (H, W, 3) uint8 and as the model's input (1, 3, H, W)."""
    import numpy as np
    import torch

    from leafward.data.image_files import read_image

    image = read_image(path)
    scale = size / min(image.size)
    image = image.resize((max(32, round(image.width * scale)), max(32, round(image.height * scale))))
    pixels = np.asarray(image)
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (card.mean, card.std))
    tensor = (torch.from_numpy(pixels.copy()).permute(2, 0, 1).unsqueeze(0).float() / 255 - mean) / std
    return pixels, tensor


def _png(pixels: np.ndarray) -> bytes:
    import io

    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()
