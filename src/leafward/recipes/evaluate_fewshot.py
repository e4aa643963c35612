"""``leafward evaluate RUN [--features FILE] [--protocol NAME]``: the hosts of a LatHAdapter run, scored again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from leafward.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

SUMMARY = "Trained few-shot hosts: by the protocol of their run, or on other feature files (cross-dataset, domain)."


@dataclass
class Args:
    target: Annotated[Path, tyro.conf.Positional]
    """A finished run of leafward train lathadapter."""
    features: tuple[Path, ...] = ()
    """Feature files to score on, for cross-dataset and domain; their test parts count."""
    protocol: Literal["base-to-new", "few-shot", "cross-dataset", "domain"] | None = None
    """base-to-new, few-shot: that of the run, on its own data. cross-dataset: any classes; domain: classes of the
    training only, in other pictures. Left out: the run's own, or cross-dataset where there are features."""
    out: Path | None = None
    """A folder for evaluation.json and report.html, or NAME.json, with the page beside it as NAME.html."""


def run(args: Args, console: Console) -> dict[str, Any]:
    from leafward.engine import RunDirectory, from_dict
    from leafward.recipes import _lathadapter_results as results
    from leafward.recipes import _lathadapter_training as training
    from leafward.recipes._evaluation_page import write_evaluation
    from leafward.recipes.lathadapter import Config
    from leafward.tasks import fewshot

    run = RunDirectory.open(args.target)
    if run.recipe != "lathadapter" or not run.finished:
        raise UsageError(f"{args.target} is not a finished run of leafward train lathadapter")
    config = from_dict(Config, run.config)
    if config.features is None:
        raise UsageError(f"{args.target} was trained on images; give other data sets as --targets of the training")
    data = fewshot.read_features(config.features)
    protocol = args.protocol or ("cross-dataset" if args.features else config.protocol)
    seeds = range(config.seed, config.seed + config.seeds)
    episodes = fewshot.episodes(config.protocol, data, _targets(config), config.shots, seeds)
    if args.features:
        if protocol not in ("cross-dataset", "domain"):
            raise UsageError(f"--protocol {protocol} is scored on the data of the run; leave --features out")
        others = [fewshot.read_features(path) for path in args.features]
        exams = fewshot.episodes(protocol, data, others, [1], [0])[0].exams[1:]
        episodes = [replace(episode, exams=exams) for episode in episodes]
    elif protocol != config.protocol:
        missing = "--features" if protocol in ("cross-dataset", "domain") else f"a run with --protocol {protocol}"
        raise UsageError(f"{args.target} was trained for {config.protocol}; --protocol {protocol} needs {missing}")
    taxonomy = results.read_taxonomy(config.taxonomy, data.class_names)
    rows = training.train_all(config, episodes, run.checkpoints / "cells", taxonomy)
    summary = results.summarise(config, data, rows)
    result = {"run": str(args.target), "protocol": protocol} | {
        key: summary[key] for key in ("headline", "table", "differences", "scores")
    }
    _show(console, summary)
    if args.out is not None:
        tests = ", ".join(dict.fromkeys(row["test"] for row in summary["table"]))
        page = results.scores_page(f"Evaluation: few-shot, {protocol}", f"{args.target} on {tests}", summary)
        write_evaluation(args.out, result, page, console)
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
