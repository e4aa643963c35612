"""``leafward explain TARGET INPUT...``: what the model saw."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from leafward.cli.choice import Chosen, choose, show_choices, take_value
from leafward.errors import UsageError
from leafward.files import read_record
from leafward.systems import EXPLANATIONS

if TYPE_CHECKING:
    from rich.console import Console

USAGE = "leafward explain TARGET INPUT... [--system NAME] [--out DIR]"


def parse(argv: list[str]) -> Chosen:
    system, words = take_value(argv, "--system")
    if system is None and (not words or words[0] in ("-h", "--help")):
        show_choices(USAGE, EXPLANATIONS, "system", 0 if words else 2)
    name = system or _system_of(words[0])
    return choose(EXPLANATIONS, name, "system", f"leafward explain --system {name}", words)


def _system_of(target: str) -> str:
    """The recipe of a run directory or of the one that a model or checkpoint lies in, or a model's family by name."""
    from leafward.engine.layout import is_run
    from leafward.engine.run import RunDirectory

    path = Path(target)
    around = (path, path.absolute().parent, path.absolute().parent.parent) if path.is_dir() else ()
    if run := next((folder for folder in around if is_run(folder)), None):
        recipe = RunDirectory.open(run).recipe
        if recipe not in EXPLANATIONS:
            raise UsageError(f"{target} is a run of {recipe}; explain draws runs of {', '.join(EXPLANATIONS)}")
        return recipe
    if (path / "config.json").is_file():
        target = str(read_record(path / "config.json").get("model", target))
    for name in EXPLANATIONS:
        if Path(target).name.removeprefix("timm:").startswith(name):
            return name
    systems = ", ".join(EXPLANATIONS)
    raise UsageError(f"{target} is neither a run directory nor the name of a known model; --system may say: {systems}")


def run(args: Chosen, console: Console) -> dict[str, Any]:
    return args.run(console)
