"""``leafward data TOOL``: prepare data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from leafward.cli.choice import Chosen, choose, show_choices
from leafward.systems import PREPARATIONS

if TYPE_CHECKING:
    from rich.console import Console


def parse(argv: list[str]) -> Chosen:
    if not argv or argv[0] in ("-h", "--help"):
        show_choices("leafward data TOOL [--key value]", PREPARATIONS, "data tool", 0 if argv else 2)
    return choose(PREPARATIONS, argv[0], "data tool", f"leafward data {argv[0]}", argv[1:])


def run(args: Chosen, console: Console) -> dict[str, Any]:
    return args.run(console)
