"""``leafward evaluate RUN``: score the models of a vision run by the protocol of its task."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from leafward.config import checked, load_yaml, replace
from leafward.errors import UsageError
from leafward.systems.vision.config import Config

if TYPE_CHECKING:
    from rich.console import Console
    from torch import nn

    from leafward.systems.vision.build import Card

SUMMARY = "Accuracy, mean IoU or COCO AP of vision models, on the run's held-out data or on others."


@dataclass
class Args:
    target: Annotated[Path, tyro.conf.Positional]
    """A run directory, or a published model's folder (then --data is needed)."""
    data: str | None = None
    """Other data in any form that training takes; their held-out part is scored."""
    sliding: bool = False
    """Segment: predict by overlapping windows instead of whole images."""
    taxonomy: Path | None = None
    """Classify: a taxonomy with the classes as nodes, for hierarchical scores."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute."""
    out: Path | None = None
    """A folder for evaluation.json and report.html, or NAME.json, with the page beside it as NAME.html. Default: the
    target. In a run, which has the report of its training, the page is evaluation.html."""


def run(args: Args, console: Console) -> dict[str, Any]:
    """Score every model of the target; returns what the file holds."""
    from leafward.systems.vision import report
    from leafward.systems.vision.build import open_model
    from leafward.systems.vision.evaluation import conclude, measure
    from leafward.systems.vision.train import make_task

    def open_classes(folder: Path) -> tuple[nn.Module, list[str]]:
        model, card = open_model(folder)
        return model, card.classes

    config = _config(args)
    task = make_task(config)
    results, units = measure(task, args.target, _members(args.target), open_classes, args.device)
    title, of = f"Evaluation: {config.data.task}", f"{args.target} on {config.data.source}"
    found = report.result(title, of, results[0]["geometry"], task.monitor, results, units)
    return conclude(found, args, config.data.source, console)


def _config(args: Args) -> Config:
    """The run's own configuration, or one that fits a published model, with the data that were asked for."""
    from leafward.engine import is_run, load_published
    from leafward.systems.vision.build import Card

    if is_run(args.target):
        config = load_yaml(Config, args.target / "config.yaml")
    elif args.data is None:
        raise UsageError(f"{args.target} is a model, not a run: give --data to score it on")
    else:
        card = Card.from_json(load_published(args.target)[0], args.target)
        config = of_card(card)
    return with_data(config, args.data, args.taxonomy, sliding=config.data.sliding or args.sliding)


def of_card(card: Card) -> Config:
    """Settings that fit a published model."""
    return checked(Config, {"task": card.task, "size": card.size, "model": card.model, "ignore": card.ignore})


def with_data(config: Any, source: str | None, taxonomy: Path | None, **changes: Any) -> Any:
    """Settings with other data or another taxonomy, where they are given."""
    data = config.data
    changes |= {"source": source or data.source, "taxonomy": taxonomy or data.taxonomy}
    return replace(config, data=changes)


def _members(target: Path) -> list[dict[str, Any]]:
    """The models of a run as its result names them, or the one published model, which has no twin."""
    from leafward.engine.run import MEMBERS, RESULT, RunDirectory

    if (target / RESULT).is_file():
        return RunDirectory.open(target).result()["members"]
    if (target / MEMBERS).is_dir():
        raise UsageError(f"{target} is not finished; continue it with --resume first")
    return [{"name": target.name, "model": ".", "geometry": None}]
