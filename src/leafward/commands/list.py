"""``leafward list``: what is here, and what to install for the rest."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from leafward.commands._show import show_rows
from leafward.commands.train import load_recipe
from leafward.recipes import RECIPES

if TYPE_CHECKING:
    from rich.console import Console

EXTRAS = {
    "lm": ("transformers", "tokenizers"),
    "vision": ("timm", "torchvision", "PIL", "open_clip"),
    "search": ("faiss",),
    "cluster": ("ray",),
}


@dataclass
class Args:
    pass


def run(args: Args, console: Console) -> dict[str, Any]:
    recipes = {name: list(load_recipe(name).PRESETS) for name in RECIPES}
    missing = {
        extra: [p for p in packages if importlib.util.find_spec(p) is None] for extra, packages in EXTRAS.items()
    }
    rows = [(name, ", ".join(presets), load_recipe(name).SUMMARY) for name, presets in recipes.items()]
    show_rows(console, ["recipe", "presets", "what it does"], rows)
    state = [
        (extra, "there" if not absent else f"missing {', '.join(absent)}", f"pip install 'leafward[{extra}]'")
        for extra, absent in missing.items()
    ]
    show_rows(console, ["extra", "state", "install with"], state)
    return {"recipes": recipes, "missing": missing}
