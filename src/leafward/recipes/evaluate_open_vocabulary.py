"""``leafward evaluate RUN --task open-vocabulary --data FOLDER``: a trained segmenter on scenes with other classes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

if TYPE_CHECKING:
    from rich.console import Console

SUMMARY = "mIoU of an open-vocabulary segmenter on scenes and classes that it was not trained on."


@dataclass
class Args:
    target: Annotated[Path, tyro.conf.Positional]
    """A finished run of leafward train segmenter."""
    data: Path
    """Scenes with masks; classes.txt names their classes."""
    ignore: int | None = 255
    """Number of mask pixels that do not count; 0 for ADE20K-150, 65535 for ADE20K-847."""
    most: int | None = None
    """Score only so many held-out scenes."""
    device: str = "auto"
    """Where to compute: auto, cpu or cuda."""
    out: Path | None = None
    """A folder for evaluation.json and report.html, or NAME.json, with the page beside it as NAME.html."""


def run(args: Args, console: Console) -> dict[str, Any]:
    from leafward.recipes._devices import device_of
    from leafward.recipes._evaluation_page import evaluation_page, write_evaluation
    from leafward.recipes._segmenter import headline, iou_rows, open_run
    from leafward.tasks.open_vocabulary import class_ious, confusions
    from leafward.tasks.segmentation import check, load_scenes, score

    scenes = load_scenes(args.data, args.ignore)
    check(scenes.held_out, "held-out scenes", complete=False)
    config, model = open_run(args.target)
    table = confusions(model.to(device_of(args.device)), scenes, config.size, args.most)
    scores, ious = score(table), class_ious(table)
    console.print(
        f"mIoU {100 * scores['miou']:.2f} %, pixel accuracy {100 * scores['pixel_accuracy']:.2f} % over "
        f"{len(scenes.classes)} classes"
    )
    numbers = headline(scores, scenes, args.most)
    result = {
        "run": str(args.target),
        "data": str(args.data),
        "classes": len(scenes.classes),
        **scores,
        "headline": [number.to_json() for number in numbers],
        "iou": iou_rows(scenes.classes, ious),
    }
    if args.out is not None:
        shown = {**scores, "IoU": dict(zip(scenes.classes, ious, strict=True))}
        page = evaluation_page("Evaluation: open-vocabulary", f"{args.target} on {args.data}", numbers, shown)
        write_evaluation(args.out, result, page, console)
    return result
