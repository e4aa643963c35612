"""``leafward list``: what is here, and what to install for the rest."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from leafward.cli.bench import FOLDER
from leafward.cli.choice import load
from leafward.cli.commands import COMMANDS
from leafward.cli.train import CONFIGS
from leafward.errors import EXTRAS
from leafward.report import show_rows
from leafward.systems import EVALUATIONS, EXPLANATIONS, PREPARATIONS

if TYPE_CHECKING:
    from rich.console import Console

FAMILIES = {"train": CONFIGS, "evaluate --task": EVALUATIONS, "explain --system": EXPLANATIONS, "data": PREPARATIONS}
"""What goes before a name of the table on the command line -> the table."""

NEEDS: dict[str, tuple[str, ...]] = {
    "train radial": ("lm",),
    "train hyperclip": ("lm", "vision"),
    "train hyperclip --task segment": ("lm", "vision"),
    "train hcformer": ("vision",),
    "train vision": ("vision",),
    "train helm": ("lm",),
    "train himapper": ("vision",),
    "evaluate --task vision": ("vision",),
    "evaluate --task himapper": ("vision",),
    "evaluate --task open-vocabulary": ("lm", "vision"),
    "evaluate --task language": ("lm",),
    "evaluate --task sample": ("lm",),
    "evaluate --task search": ("search",),
    "explain --system segmenter": ("lm", "vision"),
    "explain --system himapper": ("vision",),
    "explain --system hcformer": ("vision",),
    "explain --system vision": ("vision",),
    "data features": ("lm", "vision"),
    "data index": ("search",),
    "data tokenise": ("lm",),
    "export": ("lm",),
}
"""What goes on the command line -> the extras without which it does nothing. What is not here needs none."""

PARTLY: dict[str, tuple[str, tuple[str, ...]]] = {
    "evaluate --task hierarcaps": ("on features", ("lm",)),
    "evaluate --task hyperlex": ("on features", ("lm",)),
    "evaluate --task breeds": ("on features", ("lm",)),
    "evaluate --task retrieval": ("on features", ("lm",)),
    "evaluate --task zeroshot": ("on features", ("lm",)),
    "audit": ("on files", ("vision",)),
    "demo": ("with --only measure or adapt", ("lm", "vision")),
    "explore": ("with --export", ("serve",)),
}
"""What works in part, in which, and the extras for the rest of it."""


@dataclass
class Args:
    pass


def run(args: Args, console: Console) -> dict[str, Any]:
    missing = {
        extra: [name for name in packages if importlib.util.find_spec(name) is None]
        for extra, packages in EXTRAS.items()
    }
    modules = {f"{command} {name}": load(table, name, command) for command, table in FAMILIES.items() for name in table}
    recipes = {name: list(modules[f"train {name}"].PRESETS) for name in CONFIGS}
    rows = [
        (name, availability(f"train {name}", missing), ", ".join(presets), modules[f"train {name}"].SUMMARY)
        for name, presets in recipes.items()
    ]
    show_rows(console, ["system", "available", "presets", "what it does"], rows)
    rows = [
        (name, availability(name, missing), module.SUMMARY)
        for name, module in modules.items()
        if not name.startswith("train ")
    ]
    show_rows(console, ["task", "available", "what it does"], rows)
    others = {name: text for name, text in COMMANDS.items() if name not in [each.split()[0] for each in FAMILIES]}
    rows = [(name, availability(name, missing), text) for name, text in others.items()]
    show_rows(console, ["command", "available", "what it does"], rows)
    rows = [
        (extra, "there" if not absent else f"missing {', '.join(absent)}", f"pip install 'leafward[{extra}]'")
        for extra, absent in missing.items()
    ]
    show_rows(console, ["extra", "state", "install with"], rows)
    tasks = {
        command: {name: modules[f"{command} {name}"].SUMMARY for name in table}
        for command, table in FAMILIES.items()
        if command != "train"
    }
    available = {name: availability(name, missing) for name in (*modules, *others)}
    return {"recipes": recipes, "tasks": tasks, "missing": missing, "available": available}


def availability(name: str, missing: dict[str, list[str]]) -> str:
    """Whether something can be run here, or what to install for it."""
    absent = [extra for extra in NEEDS.get(name, ()) if missing[extra]]
    if absent:
        return f"install leafward[{','.join(absent)}]"
    if name == "bench" and not FOLDER.is_dir():
        return "from a clone: pip install -e ."
    part, extras = PARTLY.get(name, ("", ()))
    absent = [extra for extra in extras if missing[extra]]
    return f"yes {part}; otherwise install leafward[{','.join(absent)}]" if absent else "yes"
