"""Words into dataclasses and settings, with the flags that every command takes."""

from __future__ import annotations

import dataclasses
import io
import re
import typing
from collections.abc import Collection, Iterator, Mapping
from contextlib import redirect_stderr, suppress
from typing import Annotated, Any

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from leafward.config import Settings, alternatives, check_numbers, checked, is_settings, setting_names, short_names
from leafward.errors import UsageError, nearest

SHARED_FLAGS = {
    "json": "One JSON object on the last line of stdout; all else goes to stderr.",
    "debug": "Show the traceback of an error.",
}


def parse_into(cls: type, prog: str, argv: list[str], *, description: str, default: Any = None) -> Any:
    """`argv` as an instance of a dataclass, with the shared flags taken along. Raises `UsageError`.

    Words that set a field of settings are left to `config.checked`, so that they are refused as in a file.
    """
    given = [] if default is None else [dataclasses.field(default_factory=lambda: default)]
    fields: list[Any] = [("args", Annotated[cls, tyro.conf.arg(name="")], *given)]
    for flag, text in SHARED_FLAGS.items():
        fields.append((flag, Annotated[bool, tyro.conf.arg(help=text)], dataclasses.field(default=False)))
    whole = dataclasses.make_dataclass("Invocation", fields)
    config = (tyro.conf.FlagCreatePairsOff, tyro.conf.OmitSubcommandPrefixes)
    hints = typing.get_type_hints(cls).values()
    for kind in filter(is_settings, hints):
        argv = spelt_out(argv, kind)
    words = split_lists(gathered(argv, set(_list_fields(cls, every=True))), set(_list_fields(cls)))
    registry = ConstructorRegistry()
    if any(map(is_settings, hints)):
        registry.primitive_rule(_unchecked)
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            parsed = tyro.cli(
                whole, prog=prog, args=words, description=description, config=config, registry=registry
            ).args
    except SystemExit as stop:
        if not stop.code:
            raise
        raise UsageError(_unknown(argv, cls) or _plain(said.getvalue())) from None
    for name, value in vars(parsed).items():
        if isinstance(value, Settings):
            setattr(parsed, name, checked(type(value), value))
        else:
            check_numbers({name: value})
    return parsed


def _unchecked(kind: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
    """How tyro reads a number or a choice of settings: as YAML would, whatever the type wants."""
    choices = typing.get_args(kind.type) if kind.type_origin is typing.Literal else ()
    if not choices and kind.type not in (int, float):
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=f"{{{','.join(choices)}}}" if choices else kind.type.__name__.upper(),
        instance_from_str=lambda words: words[0] if choices else _number(words[0]),
        is_instance=lambda value: True,
        str_from_instance=lambda value: [str(value)],
    )


def _number(word: str) -> int | float | bool | str | None:
    """The number or constant that a word stands for; the word itself if it is none."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(word)
    return {"None": None, "True": True, "False": False}.get(word, word)


def spelt_out(argv: list[str], kind: type[Settings]) -> list[str]:
    """`argv` with the full name of every setting that has a short or an earlier one: `--steps 9` is `--loop.steps 9`.

    Of two settings that replace each other, the one that is not given goes back to its default.
    """
    short, others = short_names(kind), alternatives(kind)
    words, given = [], set()
    for word in argv:
        flag, equals, value = word.partition("=")
        if flag.startswith("--"):
            path = _full(flag[2:].replace("-", "_"), short, kind.EARLIER)
            given.add(path.replace(".no_", "."))
            word = f"--{path.replace('_', '-')}{equals}{value}"
        words.append(word)
    for path in sorted(given & others.keys()):
        other, default = others[path]
        if other not in given:
            words += [f"--{other.replace('_', '-')}", str(default)]
    return words


def _full(name: str, short: Mapping[str, str], earlier: Mapping[str, str]) -> str:
    """The dotted name for one that may be short, earlier, or a switch that is turned off."""
    group, dot, rest = name.partition(".")
    if name in short:
        return short[name]
    if dot and group in earlier:
        return f"{earlier[group]}.{rest}"
    if name.startswith("no_") and name[3:] in short:
        parent, _, last = short[name[3:]].rpartition(".")
        return f"{parent}.no_{last}"
    return name


def brief(kind: type[Settings]) -> type[Settings]:
    """The same settings for a --help that leaves out the rare ones."""
    hints, defaults = typing.get_type_hints(kind, include_extras=True), kind()
    groups = {name: brief(hint) for name, hint in hints.items() if is_settings(hint)}
    hidden = {name: Annotated[hints[name], tyro.conf.Suppress] for name in kind.RARE}
    if not groups and not hidden:
        return kind
    values: dict[str, Any] = {name: checked(group, getattr(defaults, name)) for name, group in groups.items()}
    values |= {name: getattr(defaults, name) for name in hidden}
    names = {"__annotations__": groups | hidden, "__module__": kind.__module__, "__doc__": kind.__doc__}
    meta: Any = type(kind)
    return meta(kind.__name__, (kind,), names | values, frozen=True)


def gathered(argv: list[str], names: Collection[str]) -> list[str]:
    """`argv` with one flag for each of the lists `names`: `--grid lr=1,2 --grid c=3,4` is `--grid lr=1,2 c=3,4`."""
    groups: list[list[str]] = [[]]
    lists: dict[str, list[str]] = {}
    for word in argv:
        flag, equals, value = word.partition("=")
        if not flag.startswith("--"):
            groups[-1].append(word)
        elif flag.rpartition(".")[2].lstrip("-").replace("-", "_") not in names:
            groups.append([word])
        else:
            group = lists.setdefault(flag, [flag])
            groups = [*(each for each in groups if each is not group), group]  # the newest, so that values go there
            group += [value] if equals else []
    return [word for group in groups for word in group]


def split_lists(argv: list[str], names: Collection[str]) -> list[str]:
    """`argv` with the values of the flags `names` taken apart at commas: `--widths 4,6,9` is `--widths 4 6 9`."""
    words: list[str] = []
    inside = False
    for word in argv:
        values = [word]
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            inside = flag.lstrip("-").rpartition(".")[2].replace("-", "_") in names
            if inside and equals:
                values = [flag, *value.split(",")]
        elif inside:
            values = word.split(",")
        words += values
    return words


def _list_fields(cls: type, every: bool = False) -> Iterator[str]:
    """Fields of `cls`, and of what is nested in it, that hold a list of numbers or choices: these have no commas.
    `every`: of texts too."""
    for name, hint in typing.get_type_hints(cls).items():
        arguments = typing.get_args(hint)
        if dataclasses.is_dataclass(hint) or is_settings(hint):
            yield from _list_fields(typing.cast(type, hint), every)
        elif typing.get_origin(hint) is tuple and (
            arguments[0] in (int, float)
            or (every and arguments[-1] is ...)
            or typing.get_origin(arguments[0]) is typing.Literal
        ):
            yield name


def _unknown(argv: list[str], cls: type) -> str | None:
    """What is wrong with a flag that there is not: the nearest one, among those that may leave out their group too."""
    hints = typing.get_type_hints(cls).values()
    known = set(SHARED_FLAGS) | {"help"} | ({"help_all"} if any(map(is_settings, hints)) else set())
    for name, hint in typing.get_type_hints(cls).items():
        known |= {name} | (set(setting_names(hint)) if is_settings(hint) else set())
    for word in argv:
        flag = word.partition("=")[0].removeprefix("--").replace("-", "_")
        plain = re.sub(r"(^|\.)no_", r"\1", flag)
        if word.startswith("--") and flag and not {flag, plain} & known:
            hint = nearest(flag, known)
            near = f"; {hint.replace(chr(39), chr(39) + '--', 1).replace('_', '-')}" if "did you mean" in hint else ""
            return f"Unrecognized options: {word.partition('=')[0]}{near}"
    return None


def _plain(box: str) -> str:
    """What tyro says about wrong words, without the frame around it."""
    lines = [line.strip("│╭╮╰╯─| ") for line in box.splitlines()]
    said = [line for line in lines[1:] if line and not re.fullmatch("[-─]+", line)]
    choice = re.match(r"invalid choice '(.*?)' for argument '(.*?)'. Expected one of \((.*?)\)", " ".join(said))
    if choice is not None:  # tyro lists a set, in no order and with the None of a flag that was left out
        word, flag, names = choice.groups()
        allowed = set(re.findall("'(.*?)'", names)) - {"None"}
        return f"{flag} {word!r} is not one of its choices; {nearest(word, allowed)}"
    return "\n  ".join(said or lines)
