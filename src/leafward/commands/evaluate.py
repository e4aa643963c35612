"""``leafward evaluate TARGET [--task NAME]``: scores with the protocol of a task."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from leafward.commands._choice import Chosen, choose, show_choices, take_value
from leafward.errors import UsageError
from leafward.recipes import EVALUATION_OF, EVALUATIONS

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
    """The task that goes with a run's recipe."""
    from leafward.engine.run import RunDirectory

    tasks = ", ".join(EVALUATIONS)
    if not (Path(target) / "config.yaml").is_file():
        raise UsageError(f"{target} is not a run directory, so --task must say what to measure: {tasks}")
    recipe = RunDirectory.open(target).recipe
    if recipe not in EVALUATION_OF:
        raise UsageError(f"runs of recipe {recipe!r} have no task of their own; --task must be one of {tasks}")
    return EVALUATION_OF[recipe]


def run(args: Chosen, console: Console) -> dict[str, Any]:
    return args.run(console)
