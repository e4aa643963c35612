"""``leafward evaluate RUN|MODEL``: score every arm of a Hi-Mapper run, or one model, by the protocol of its task."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from leafward.config import checked
from leafward.errors import UsageError
from leafward.systems.himapper.config import Config
from leafward.systems.vision.evaluate import of_card, with_data

if TYPE_CHECKING:
    from rich.console import Console
    from torch import nn


SUMMARY = "Accuracy, mean IoU or COCO AP of Hi-Mapper and of what it was compared with."


@dataclass
class Args:
    target: Annotated[Path, tyro.conf.Positional]
    """The directory of a finished run, or a published model's folder (then --data is needed)."""
    data: str | None = None
    """Other data in any form that training takes; their held-out part is scored. None: those of the run."""
    taxonomy: Path | None = None
    """Classify: a taxonomy with the classes as nodes, for hierarchical scores."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute."""
    out: Path | None = None
    """A folder for evaluation.json and report.html, or NAME.json, with the page beside it as NAME.html. Default: the
    target. In a run, which has the report of its training, the page is evaluation.html."""


def run(args: Args, console: Console) -> dict[str, Any]:
    """Score every model of the target; returns what the file holds."""
    from leafward.engine import is_run
    from leafward.systems.himapper import report
    from leafward.systems.himapper.build import open_model, pixels_of
    from leafward.systems.vision.evaluation import conclude, measure
    from leafward.systems.vision.train import make_task

    def open_classes(folder: Path) -> tuple[nn.Module, list[str]]:
        model, card = open_model(folder)
        return model, card.vision.classes

    config, members = _of_run(args) if is_run(args.target) else _of_model(args)
    config = with_data(config, args.data, args.taxonomy)
    task = make_task(config, pixels_of(args.target))
    results, units = measure(task, args.target, members, open_classes, args.device)
    title, of = f"Evaluation: Hi-Mapper, {config.data.task}", f"{args.target} on {config.data.source}"
    return conclude(report.result(title, of, task.monitor, results, units), args, config.data.source, console)


def _of_run(args: Args) -> tuple[Any, list[dict[str, Any]]]:
    """What a finished run learned from what, and its models as its result names them."""
    from leafward.engine import RunDirectory

    trained = RunDirectory.open(args.target)
    if trained.recipe != "himapper" or not trained.finished:
        raise UsageError(f"{args.target} is not the directory of a finished run of recipe 'himapper'")
    return checked(Config, trained.config), trained.result()["members"]


def _of_model(args: Args) -> tuple[Any, list[dict[str, Any]]]:
    """Settings that fit a published model, which has nothing to be compared with."""
    from leafward.systems.himapper.build import read_card

    card = read_card(args.target).vision
    if args.data is None:
        raise UsageError(f"{args.target} is a model, not a run: give --data to score it on")
    return of_card(card), [{"name": args.target.name, "model": ".", "arm": args.target.name}]
