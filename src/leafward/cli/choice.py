"""Commands that are families of modules: which one is meant, and its flags parsed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from leafward.errors import UsageError, nearest

if TYPE_CHECKING:
    from rich.console import Console


@dataclass
class Chosen:
    """A module of the family and its parsed arguments."""

    module: ModuleType
    args: Any

    def run(self, console: Console) -> dict[str, Any]:
        return self.module.run(self.args, console)


def load(table: Mapping[str, str], name: str, noun: str) -> ModuleType:
    if name not in table:
        raise UsageError(f"unknown {noun} {name!r}; {nearest(name, table)}")
    return importlib.import_module(table[name])


def choose(table: Mapping[str, str], name: str, noun: str, prog: str, words: list[str]) -> Chosen:
    """The module `name` of `table` with `words` parsed into its `Args`."""
    from leafward.cli.parse import parse_into

    module = load(table, name, noun)
    return Chosen(module, parse_into(module.Args, prog, words, description=module.SUMMARY))


def show_choices(usage: str, table: Mapping[str, str], noun: str, status: int) -> None:
    """Print what there is to choose from, and exit."""
    width = max(map(len, table)) + 2
    lines = [f"  {name:<{width}}{load(table, name, noun).SUMMARY}" for name in table]
    print("\n".join([f"usage: {usage}", "", *lines]))
    sys.exit(status)


def take_value(words: list[str], flag: str) -> tuple[str | None, list[str]]:
    """The value of a flag that must be known before the rest can be parsed, and the words without it."""
    for index, word in enumerate(words):
        if word == flag and index + 1 < len(words):
            return words[index + 1], words[:index] + words[index + 2 :]
        if word.startswith(flag + "="):
            return word.partition("=")[2], words[:index] + words[index + 1 :]
    return None, words
