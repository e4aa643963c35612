"""``leafward evaluate RUN``: score every arm of a Hi-Mapper run by the protocol of its task."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from leafward.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

SUMMARY = "Accuracy, mean IoU or COCO AP of Hi-Mapper and of what it was compared with."


@dataclass
class Args:
    target: Annotated[Path, tyro.conf.Positional]
    """The directory of a finished run."""
    data: str | None = None
    """Other data in any form that training takes; their held-out part is scored. None: those of the run."""
    taxonomy: Path | None = None
    """Classify: a taxonomy with the classes as nodes, for hierarchical scores."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute."""
    out: Path | None = None
    """File for the scores as JSON (default: evaluation.json in the run)."""


def run(args: Args, console: Console) -> dict[str, Any]:
    """Score every model of the run; returns what the file holds."""
    from leafward.engine import RunDirectory, from_dict, session
    from leafward.files import finite, write_json
    from leafward.recipes._hcformer_train import make_task
    from leafward.recipes._himapper_model import open_model
    from leafward.recipes._himapper_train import vision_config
    from leafward.recipes.himapper import Config

    trained = RunDirectory.open(args.target)
    if trained.recipe != "himapper" or not trained.finished:
        raise UsageError(f"{args.target} is not the directory of a finished run of recipe 'himapper'")
    config = from_dict(Config, trained.config)
    config = replace(config, data=args.data or config.data, taxonomy=args.taxonomy or config.taxonomy)
    task = make_task(vision_config(config))
    scores: dict[str, dict[str, float]] = {}
    with session(args.device) as cluster:
        for member in trained.result()["members"]:
            model, card = open_model(args.target / member["model"])
            if card.vision.classes != task.classes:
                raise UsageError(f"{args.target} knows the classes {card.vision.classes}, but the data {task.classes}")
            scores[member["name"]] = task.measure(model.to(cluster.device))[0]
    result = finite({"target": str(args.target), "data": config.data, "scores": scores})
    write_json(args.out or args.target / "evaluation.json", result)
    for name, values in scores.items():
        console.print(f"{name}: " + ", ".join(f"{measure} {value:.4g}" for measure, value in values.items()))
    return result
