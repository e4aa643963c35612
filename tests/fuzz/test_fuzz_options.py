"""Every option of every recipe and task with a value it cannot take; nothing may start."""

from __future__ import annotations

import dataclasses
import importlib
import types
import typing
from collections.abc import Iterator
from typing import Any, Literal

import pytest

from leafward.cli.train import CONFIGS
from leafward.config import is_settings
from leafward.systems import EVALUATIONS, EXPLANATIONS, PREPARATIONS

FAMILIES = {"train": CONFIGS, "data": PREPARATIONS, "evaluate": EVALUATIONS, "explain": EXPLANATIONS}
HUGE = "1" + "0" * 30
WRONG = {int: ("1.5", HUGE), float: ("wrong", "nan"), Literal: ("no-such-choice",)}
"""Kind of an option -> values that no option of that kind takes."""


def options(cls: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted name and kind of the options that hold numbers or choices."""
    for name, hint in typing.get_type_hints(cls).items():
        if dataclasses.is_dataclass(hint) or is_settings(hint):
            yield from options(typing.cast(type, hint), f"{prefix}{name}.")
        elif (kind := kind_of(hint)) is not None:
            yield prefix + name, kind


def kind_of(hint: Any) -> Any:
    """int, float or Literal where every value of the hint is of that kind; None for anything else."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        kinds = {kind_of(each) for each in arguments if each is not type(None)}
        return kinds.pop() if len(kinds) == 1 else None
    if origin is tuple:
        return kind_of(arguments[0])
    return Literal if origin is Literal else hint if hint in (int, float) else None


def head(command: str, name: str, cls: type) -> list[str]:
    """A command line with all that must be there but the option in question."""
    families = {"data": ["data", name], "train": ["train", *name.split()]}
    words = families.get(command, [command, "nowhere", "--task", name])
    if command == "explain":
        words = ["explain", "nowhere", "picture.png", "--system", name]
    if command == "data":
        for field in dataclasses.fields(cls):
            if field.default is dataclasses.MISSING:
                positional = field.name in ("images", "embeddings")
                words += ["nowhere"] if positional else [f"--{field.name}", "nowhere.csv"]
    elif command == "evaluate":
        required = [f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING and f.name != "target"]
        words += [word for name in required for word in (f"--{name}", "nowhere")]
    return words


CASES = [
    pytest.param(command, name, module, option, kind, id=f"{command}-{name}-{option}")
    for command, table in FAMILIES.items()
    for name, module in table.items()
    for option, kind in options(getattr(importlib.import_module(module), "Config" if command == "train" else "Args"))
]


@pytest.mark.parametrize(("command", "name", "module", "option", "kind"), CASES)
def test_a_value_that_the_option_cannot_take(command, name, module, option, kind, refuses, monkeypatch):
    loaded = importlib.import_module(module)
    begins = importlib.import_module(module.replace(".config", ".train")) if command == "train" else loaded
    monkeypatch.setattr(begins, "run", None)  # nothing may begin
    cls = loaded.Config if command == "train" else loaded.Args
    # The parts of the engine are the same in every recipe; one wrong value for each option of theirs is enough.
    for value in WRONG[kind][: 1 if "." in option else None]:
        refuses([*head(command, name, cls), f"--{option.replace('_', '-')}={value}"], option.rpartition(".")[2])
