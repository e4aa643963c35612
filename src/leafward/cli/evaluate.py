"""``leafward evaluate TARGET [--task NAME]``: scores with the protocol of a task."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from leafward.cli.choice import Chosen, choose, show_choices, take_value
from leafward.errors import UsageError
from leafward.files import read_record
from leafward.systems import ENCODER_EVALUATIONS, EVALUATION_OF, EVALUATIONS

if TYPE_CHECKING:
    from rich.console import Console

USAGE = "leafward evaluate TARGET [--task NAME] [--key value]   (a task's flags: leafward evaluate --task NAME --help)"


def parse(argv: list[str]) -> Chosen:
    task, words = take_value(argv, "--task")
    if task is None and (not words or words[0] in ("-h", "--help")):
        show_choices(USAGE, EVALUATIONS, "task", 0 if words else 2)
    name = task or _task_of(words[0])
    return choose(EVALUATIONS, name, "task", f"leafward evaluate --task {name}", words)


def _task_of(target: str) -> str:
    """The task that goes with a run's recipe, or with the card of a saved model."""
    folder = Path(target)
    from leafward.engine.layout import is_run

    if is_run(folder):
        return _task_of_run(target)
    if folder.is_dir():
        return _task_of_model(folder)
    raise UsageError(f"{target} is not a run directory, so --task must say what to measure: {', '.join(EVALUATIONS)}")


def _task_of_run(target: str) -> str:
    from leafward.engine.run import RunDirectory

    recipe = RunDirectory.open(target).recipe
    if recipe not in EVALUATION_OF:
        tasks = ", ".join(EVALUATIONS)
        raise UsageError(f"runs of recipe {recipe!r} have no task of their own; --task must be one of {tasks}")
    return EVALUATION_OF[recipe]


def _task_of_model(folder: Path) -> str:
    """The task of a model that a run or ``leafward export`` wrote; refused where several fit or none is known."""
    card = _record(folder / "config.json")
    if card.keys() == {"vision", "hierarchy"}:
        return "himapper"
    if card.get("model_type") == "helm":
        return "language"
    if "model" in card and card.get("task") in ("classify", "segment", "detect"):
        return "vision"
    if _is_encoder(folder, card):
        tasks = ", ".join(ENCODER_EVALUATIONS)
        raise UsageError(f"{folder} holds an encoder, which several tasks measure; --task must be one of {tasks}")
    tasks = ", ".join(EVALUATIONS)
    raise UsageError(
        f"{folder} is neither a run directory nor a model whose task is known; --task must say what to measure: {tasks}"
    )


def _is_encoder(folder: Path, card: dict[str, Any]) -> bool:
    """Whether the folder looks like a model of transformers or open_clip, or like an adapter of ours for one."""
    adapter = _record(folder / "adapter_config.json").get("format") == "leafward-adapter"
    return adapter or "model_type" in card or (folder / "open_clip_config.json").is_file()


def _record(path: Path) -> dict[str, Any]:
    """What a JSON file says; nothing where there is none."""
    return read_record(path) if path.is_file() else {}


def run(args: Chosen, console: Console) -> dict[str, Any]:
    return args.run(console)
