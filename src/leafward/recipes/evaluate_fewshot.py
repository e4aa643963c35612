"""``leafward evaluate RUN --task fewshot --features FILE``: the hosts of a LatHAdapter run on other data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from leafward.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

SUMMARY = "Trained few-shot hosts on other feature files: as a cross-dataset or a domain test."


@dataclass
class Args:
    target: Annotated[Path, tyro.conf.Positional]
    """A finished run of leafward train lathadapter."""
    features: tuple[Path, ...] = ()
    """Feature files to score on; their test parts count."""
    protocol: Literal["cross-dataset", "domain"] = "cross-dataset"
    """cross-dataset: any classes; domain: classes of the training only, in other pictures."""
    out: Path | None = None
    """A .json file for the result."""


def run(args: Args, console: Console) -> dict[str, Any]:
    from leafward.engine import RunDirectory, from_dict
    from leafward.files import write_json
    from leafward.recipes import _lathadapter_results as results
    from leafward.recipes import _lathadapter_training as training
    from leafward.recipes.lathadapter import Config
    from leafward.tasks import fewshot

    if not args.features:
        raise UsageError("--features is missing: at least one feature file to score on")
    run = RunDirectory.open(args.target)
    if run.recipe != "lathadapter" or not run.finished:
        raise UsageError(f"{args.target} is not a finished run of leafward train lathadapter")
    config = from_dict(Config, run.config)
    assert config.features is not None
    data = fewshot.read_features(config.features)
    others = [fewshot.read_features(path) for path in args.features]
    seeds = range(config.seed, config.seed + config.seeds)
    trained = fewshot.episodes(config.protocol, data, _targets(config), config.shots, seeds)
    exams = fewshot.episodes(args.protocol, data, others, [1], [0])[0].exams[1:]
    rows = training.train_all(
        config, [replace(episode, exams=exams) for episode in trained], run.checkpoints / "cells", None
    )
    summary = results.summarise(config, data, rows)
    result = {"run": str(args.target), "protocol": args.protocol} | {
        key: summary[key] for key in ("headline", "table", "differences", "scores")
    }
    _show(console, summary)
    if args.out is not None:
        write_json(args.out, result)
    return result


def _targets(config: Any) -> list[Any]:
    from leafward.tasks import fewshot

    return [fewshot.read_features(path) for path in config.targets]


def _show(console: Console, summary: dict[str, Any]) -> None:
    from rich.table import Table

    from leafward.report import Estimate

    table = Table("method", "shots", "test", "accuracy, %")
    for row in summary["table"]:
        table.add_row(row["method"], str(row["shots"]), row["test"], str(Estimate(row["accuracy"], row["interval"])))
    console.print(table)
