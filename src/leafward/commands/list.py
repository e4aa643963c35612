"""``leafward list``: what is here, and what to install for the rest."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from leafward.commands._choice import load
from leafward.commands._show import show_rows
from leafward.recipes import EVALUATIONS, EXPLANATIONS, PREPARATIONS, RECIPES

if TYPE_CHECKING:
    from rich.console import Console

EXTRAS = {
    "lm": ("transformers", "tokenizers"),
    "vision": ("timm", "torchvision", "PIL", "open_clip"),
    "search": ("faiss",),
    "cluster": ("ray",),
}
FAMILIES = {"evaluate --task": EVALUATIONS, "explain": EXPLANATIONS, "data": PREPARATIONS}
"""What goes before a name of the table on the command line -> the table."""


@dataclass
class Args:
    pass


def run(args: Args, console: Console) -> dict[str, Any]:
    modules = {name: load(RECIPES, name, "recipe") for name in RECIPES}
    recipes = {name: list(module.PRESETS) for name, module in modules.items()}
    tasks = {
        command: {name: load(table, name, command).SUMMARY for name in table} for command, table in FAMILIES.items()
    }
    missing = {
        extra: [p for p in packages if importlib.util.find_spec(p) is None] for extra, packages in EXTRAS.items()
    }
    rows = [(name, ", ".join(presets), modules[name].SUMMARY) for name, presets in recipes.items()]
    show_rows(console, ["recipe", "presets", "what it does"], rows)
    rows = [(f"{command} {name}", text) for command, family in tasks.items() for name, text in family.items()]
    show_rows(console, ["task", "what it does"], rows)
    state = [
        (extra, "there" if not absent else f"missing {', '.join(absent)}", f"pip install 'leafward[{extra}]'")
        for extra, absent in missing.items()
    ]
    show_rows(console, ["extra", "state", "install with"], state)
    return {"recipes": recipes, "tasks": tasks, "missing": missing}
