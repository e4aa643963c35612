"""``leafward evaluate RUN``: score the models of a vision run by the protocol of its task."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from leafward.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from leafward.recipes.hcformer import Config

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
    """File for the scores as JSON (default: evaluation.json in the target)."""


def run(args: Args, console: Console) -> dict[str, Any]:
    """Score every model of the target; returns what the file holds."""
    from leafward.engine import session
    from leafward.files import finite, write_json
    from leafward.recipes._hcformer_model import open_model
    from leafward.recipes._hcformer_train import make_task

    config = _config(args)
    task = make_task(config)
    scores: dict[str, dict[str, float]] = {}
    with session(args.device) as cluster:
        for name, folder in _models(args.target).items():
            model, card = open_model(folder)
            if card.classes != task.classes:
                raise UsageError(
                    f"{folder} knows the classes {_some(card.classes)}, but the data have {_some(task.classes)}"
                )
            scores[name] = task.measure(model.to(cluster.device).eval())[0]
    result = finite({"target": str(args.target), "data": config.data, "scores": scores})
    write_json(args.out or args.target / "evaluation.json", result)
    for name, values in scores.items():
        console.print(f"{name}: " + ", ".join(f"{measure} {value:.4g}" for measure, value in values.items()))
    return result


def _config(args: Args) -> Config:
    """The run's own configuration, or one that fits a published model, with the data that were asked for."""
    from leafward.engine import load_published, load_yaml
    from leafward.recipes._hcformer_model import Card
    from leafward.recipes.hcformer import Config

    if (args.target / "config.yaml").is_file():
        config = load_yaml(Config, args.target / "config.yaml")
    elif args.data is None:
        raise UsageError(f"{args.target} is a model, not a run: give --data to score it on")
    else:
        card = Card.from_json(load_published(args.target)[0], args.target)
        config = Config(task=card.task, size=card.size, model=card.model)  # pyright: ignore[reportArgumentType]
    config = replace(config, data=args.data or config.data, taxonomy=args.taxonomy or config.taxonomy)
    return replace(config, sliding=config.sliding or args.sliding)


def _models(target: Path) -> dict[str, Path]:
    """Name -> folder of every model of a run, or of the one published model."""
    from leafward.engine.run import MEMBERS

    result = target / "result.json"
    if result.is_file():
        from leafward.engine import RunDirectory

        return {member["name"]: target / member["model"] for member in RunDirectory.open(target).result()["members"]}
    if (target / MEMBERS).is_dir():
        raise UsageError(f"{target} is not finished; continue it with --resume first")
    return {target.name: target}


def _some(classes: list[str]) -> str:
    return f"{', '.join(classes[:3])}{' …' if len(classes) > 3 else ''} ({len(classes)})"
