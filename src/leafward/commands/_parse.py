"""Words into dataclasses, with the flags that every command takes."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import tyro

SHARED_FLAGS = {
    "json": "One JSON object on the last line of stdout; all else goes to stderr.",
    "debug": "Show the traceback of an error.",
}


def parse_into(cls: type, prog: str, argv: list[str], *, description: str, default: Any = None) -> Any:
    """`argv` as an instance of a dataclass, with the shared flags taken along. Wrong usage exits with 2."""
    given = [] if default is None else [dataclasses.field(default_factory=lambda: default)]
    fields: list[Any] = [("args", Annotated[cls, tyro.conf.arg(name="")], *given)]
    for flag, text in SHARED_FLAGS.items():
        fields.append((flag, Annotated[bool, tyro.conf.arg(help=text)], dataclasses.field(default=False)))
    whole = dataclasses.make_dataclass("Invocation", fields)
    config = (tyro.conf.FlagCreatePairsOff, tyro.conf.OmitSubcommandPrefixes)
    return tyro.cli(whole, prog=prog, args=argv, description=description, config=config).args
