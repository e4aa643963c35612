"""``leafward evaluate RUN --task open-vocabulary [--data FOLDER]``: a trained segmenter on its own held-out scenes, or
on scenes with other classes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

if TYPE_CHECKING:
    from rich.console import Console

SUMMARY = "mIoU of an open-vocabulary segmenter on its held-out scenes, or on scenes and classes of another set."


@dataclass
class Args:
    target: Annotated[Path, tyro.conf.Positional]
    """A finished run of leafward train hyperclip --task segment."""
    data: Path | None = None
    """Scenes with masks, whose held-out part is scored; classes.txt names their classes. None: the run's own."""
    ignore: int | Literal["run"] | None = "run"
    """Number of mask pixels that do not count: that of the run, or 0 for ADE20K-150, 65535 for ADE20K-847."""
    most: int | None = None
    """Score only so many held-out scenes."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute."""
    out: Path | None = None
    """A folder for evaluation.json and report.html, or NAME.json, with the page beside it as NAME.html."""


def run(args: Args, console: Console) -> dict[str, Any]:
    from leafward.data.scenes import check, load_scenes, score
    from leafward.engine.devices import device_of
    from leafward.engine.evaluation import write_evaluation
    from leafward.errors import need
    from leafward.report import Result
    from leafward.systems.hyperclip.segment.model import headline, iou_rows, open_run
    from leafward.systems.hyperclip.segment.task import class_ious, confusions

    need(args.most is None or args.most >= 1, "--most", "an integer ≥ 1, or None", args.most)
    config, model = open_run(args.target)
    data = args.data or config.data.source
    assert data is not None
    # The seed says which scenes are held out, where the folder does not.
    scenes = load_scenes(data, config.data.ignore if args.ignore == "run" else args.ignore, seed=config.loop.seed)
    check(scenes.held_out, "held-out scenes", complete=False)
    table = confusions(model.to(device_of(args.device)), scenes, config.data.size, args.most)
    scores, ious = score(table), class_ious(table)
    found = {"run": str(args.target), "data": str(data), "classes": len(scenes.classes), **scores}
    made = Result(
        "Evaluation: open-vocabulary",
        f"{args.target} on {data}",
        headline([scores], scenes, args.most, f"; {len(scenes.classes)} classes"),
        values=found | {"iou": iou_rows(scenes.classes, ious)},
    )
    made.scores({**scores, "IoU": dict(zip(scenes.classes, ious, strict=True))}, terminal=False)
    return write_evaluation(args.out, made, console)
