"""What the evaluations of vision models share: scoring every model of a run, the answer on screen, and the files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leafward.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    from rich.console import Console
    from torch import nn

    from leafward.systems.vision.train import VisionTask

Record = Mapping[str, Any]


def measure(
    task: VisionTask,
    target: Path,
    members: Sequence[Record],
    open_classes: Callable[[Path], tuple[nn.Module, list[str]]],
    device: str,
) -> tuple[list[dict[str, Any]], list[np.ndarray | None]]:
    """`members` of the run `target` with their models' scores on the task's held-out data, and those of each image.

    `open_classes` gives the model in a folder and the names of its classes.
    """
    from leafward.engine import session
    from leafward.files import finite

    results, units = [], []
    with session(device) as cluster:
        for member in members:
            folder = target / member["model"]
            model, classes = open_classes(folder)
            if classes != task.classes:
                raise UsageError(
                    f"{folder} knows the classes {_some(classes)}, but the data have {_some(task.classes)}"
                )
            scores, of_images = task.measure(model.to(cluster.device).eval())
            results.append({**member, "scores": finite(scores)})
            units.append(of_images)
    return results, units


def conclude(
    title: str, args: Any, data: str | None, results: Sequence[Record], headline: Sequence[Record], console: Console
) -> dict[str, Any]:
    """Show the scores of every model and write them, by default into the target; returns what the file holds."""
    from leafward.engine.evaluation import write_evaluation
    from leafward.files import finite
    from leafward.report import Number, Page
    from leafward.report.number import format_value
    from leafward.systems.vision.report import NAMES

    scores = {each["name"]: each["scores"] for each in results}
    for name, values in scores.items():
        line = ", ".join(f"{measure} {format_value(value)}" for measure, value in values.items())
        console.print(f"{name}: {line}", markup=False)
    result = finite({"target": str(args.target), "data": data, "headline": list(headline), "scores": scores})
    page = Page(title, subtitle=f"{args.target} on {data}")
    page.headline([Number.from_json(record) for record in headline])
    page.section("All scores")
    measures: list[str] = list(results[0]["scores"])
    page.table(
        ["model", *(NAMES.get(measure, measure) for measure in measures)],
        [[name, *(values[measure] for measure in measures)] for name, values in scores.items()],
    )
    write_evaluation(args.out or args.target, result, page, console)
    return result


def _some(classes: Sequence[str]) -> str:
    return f"{', '.join(classes[:3])}{' …' if len(classes) > 3 else ''} ({len(classes)})"
