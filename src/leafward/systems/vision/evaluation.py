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

    from leafward.report import Result
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


def conclude(found: Result, args: Any, data: str | None, console: Console) -> dict[str, Any]:
    """Show the scores of every model and write them, by default into the target; returns what the file holds."""
    from leafward.engine.evaluation import write_evaluation
    from leafward.report import Result
    from leafward.systems.vision.report import show_models

    members = found.values["members"]
    values = {"target": str(args.target), "data": data, "scores": {each["name"]: each["scores"] for each in members}}
    made = Result(found.title, found.subtitle, found.estimates, notes=found.notes, values=values)
    show_models(made, members, terminal=True)
    return write_evaluation(args.out or args.target, made, console)


def _some(classes: Sequence[str]) -> str:
    return f"{', '.join(classes[:3])}{' …' if len(classes) > 3 else ''} ({len(classes)})"
