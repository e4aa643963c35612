"""``leafward evaluate RUN [--protocol NAME]``: the hosts of a LatHAdapter run, again or on other data sets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from leafward.config import checked, replace
from leafward.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from leafward.systems.lathadapter.config import Config

SUMMARY = "Trained few-shot hosts: by the protocol of their run, or on other data sets (cross-dataset, domain)."


@dataclass
class Args:
    target: Annotated[Path, tyro.conf.Positional]
    """A finished run of leafward train lathadapter."""
    features: tuple[Path, ...] = ()
    """Feature files of other data sets, for cross-dataset and domain; their test parts count."""
    images: tuple[Path, ...] = ()
    """The same for a run that was trained on images: folders of labelled images."""
    protocol: Literal["base-to-new", "few-shot", "cross-dataset", "domain"] | None = None
    """base-to-new, few-shot: on the data of the run. cross-dataset: any classes; domain: classes of the training only,
    in other pictures. Left out: the run's own, or cross-dataset where other data sets are given."""
    taxonomy: str | None = None
    """Taxonomy over the class names: .csv, .json, .txt, wordnet or wordnet:NODE; adds hierarchical metrics and those of
    the decided node. Left out: that of the run."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute."""
    out: Path | None = None
    """A folder for evaluation.json and report.html, or NAME.json, with the page beside it as NAME.html."""


def run(args: Args, console: Console) -> dict[str, Any]:
    from leafward.data.taxonomy import class_taxonomy
    from leafward.engine import RunDirectory
    from leafward.engine.evaluation import write_evaluation
    from leafward.systems.lathadapter import methods as training
    from leafward.systems.lathadapter import report as results
    from leafward.systems.lathadapter.config import Config

    run = RunDirectory.open(args.target)
    if run.recipe != "lathadapter" or not run.finished:
        raise UsageError(f"{args.target} is not a finished run of leafward train lathadapter")
    config = replace(checked(Config, run.config), loop={"device": args.device})
    others = _others(args, config)
    protocol = args.protocol or ("cross-dataset" if others else config.data.protocol)
    _check_protocol(protocol, args, config, others)
    sets = training.read_sets(replace(config, data={"targets": others or config.data.targets}))
    episodes = training.episodes(config, sets, protocol, elsewhere=bool(others))
    frozen = None
    if training.needs_frozen(config):
        frozen = training.episodes(config, training.frozen_sets(sets), protocol, elsewhere=bool(others))
    scored = [exam.data.class_names for exam in episodes[0].exams]
    taxonomy = None
    if args.taxonomy is not None:
        taxonomy = class_taxonomy(args.taxonomy, *scored)
    elif config.data.taxonomy is not None:  # it has the classes of the training, if not those of other data sets
        taxonomy = class_taxonomy(config.data.taxonomy, *scored, sets[0].class_names)
    rows = training.score_all(config, episodes, run.path, taxonomy, frozen)
    tests = ", ".join(dict.fromkeys(row["test"] for row in rows))
    made = results.result(config, sets[0], rows, f"Evaluation: few-shot, {protocol}", f"{args.target} on {tests}")
    del made.values["data"]
    made.values |= {"run": str(args.target), "protocol": protocol}
    return write_evaluation(args.out, made, console)


def _others(args: Args, config: Config) -> tuple[Path, ...]:
    """The other data sets, of the kind that the run was trained on."""
    own, foreign = ("features", "images") if config.data.images is None else ("images", "features")
    if getattr(args, foreign):
        raise UsageError(f"--{foreign}: {args.target} was trained on {own}; give other data sets with --{own}")
    return getattr(args, own)


def _check_protocol(protocol: str, args: Args, config: Config, others: tuple[Path, ...]) -> None:
    kind = "features" if config.data.images is None else "images"
    elsewhere = protocol in ("cross-dataset", "domain")
    if others and not elsewhere:
        raise UsageError(f"--protocol {protocol} is scored on the data of the run; leave --{kind} out")
    if elsewhere and not others and not config.data.targets:
        raise UsageError(f"{args.target} was trained for {config.data.protocol}; --protocol {protocol} needs --{kind}")
    if not elsewhere and (protocol == "base-to-new") != (config.data.protocol == "base-to-new"):
        raise UsageError(
            f"{args.target} was trained for {config.data.protocol}; --protocol {protocol} needs a run of "
            f"leafward train lathadapter --protocol {protocol}"
        )
