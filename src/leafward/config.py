"""Settings: their types say what is allowed, and one function checks them. In and out of mappings and YAML.

Imports neither torch nor tyro.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, ClassVar, TypeVar, get_args, get_type_hints

import msgspec
from msgspec import Meta, inspect

from leafward.errors import DataError, LeafwardError, UsageError, nearest
from leafward.files import LARGEST_RECORD, read_text, whole_path, write_text

LARGEST_INTEGER = 1 << 63
V = TypeVar("V")

Count = Annotated[int, Meta(ge=1)]
Several = Annotated[int, Meta(ge=2)]
Natural = Annotated[int, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
NonNegative = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
Rate = Annotated[float, Meta(ge=0, lt=1)]
Part = Annotated[float, Meta(gt=0, lt=1)]
# More than these and a run would be endless, or be killed without a word long before an allocation fails.
Seeds = Annotated[int, Meta(ge=1, le=10_000)]
Workers = Annotated[int, Meta(ge=0, le=1 << 10)]
Samples = Annotated[int, Meta(ge=1, le=1 << 24)]
Pixels = Annotated[int, Meta(ge=32, le=1 << 16)]
Some = Annotated[tuple[V, ...], Meta(min_length=1)]
Place = Annotated[str, Meta(extra={"place": True})]
"""The name of a file or folder, perhaps with weights after an @, or of something else: a preset, a model of the hub."""
Template = Annotated[
    str, Meta(pattern=r"^(?s:(?!.*\{\}.*\{\}).*\{\})", description="a text with {} once, for the class name")
]


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all settings. The constructor checks nothing; `checked` does, for everything that takes settings."""

    EARLIER: ClassVar[Mapping[str, str]] = {}
    """Names that settings had in earlier versions -> their dotted names today."""
    ALTERNATIVES: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Pairs of fields of which one counts: whoever sets one alone leaves the other at its default."""
    MAIN: ClassVar[str] = ""
    """The field that the name of the whole group may stand for: `data` for `data.source`."""
    RARE: ClassVar[frozenset[str]] = frozenset()
    """Fields that --help leaves to --help-all."""

    def conditions(self) -> None:
        """Refuse fields that do not go together; called by `checked` once each of them is what its type allows."""


S = TypeVar("S", bound=Settings)


def checked(kind: type[S], values: Any) -> S:
    """Settings from a mapping, or from settings that nothing has checked yet: the one check of what a user sets.

    Texts that are numbers, as a command line or JSON may have them, become numbers. What a type does not allow is
    refused by its dotted path, with what is allowed and what came; an unknown name with the nearest valid one. The name
    of a nested field may stand alone where only one field is called so (`steps` for `loop.steps`); what a mapping
    leaves out is as in the defaults of `kind`.
    """
    kind = type(values) if isinstance(values, kind) else kind
    return _checked(kind, to_dict(values), _defaults(kind))


def replace(settings: S, **changes: Any) -> S:
    """The same settings with other values for some fields, checked; their names may be dotted or short."""
    return _checked(type(settings), to_dict(changes), to_dict(settings))


def _checked(kind: type[S], given: Any, base: dict[str, Any]) -> S:
    plain = _completed(kind, _placed(kind, given), base) if isinstance(given, dict) else given
    try:
        settings = msgspec.convert(plain, kind, strict=False, dec_hook=_read_path)
    except msgspec.ValidationError as error:
        place = re.search(r" - at `(?:key` in `)?\$(.*)`$", str(error))
        raise _refusal(inspect.type_info(kind), plain, re.findall(r"[^.\[\]]+", place[1] if place else "")) from None
    _check_beyond_types(settings, plain, "")
    return settings


def short_names(kind: type[Settings]) -> dict[str, str]:
    """What may stand for the dotted name of a nested field: its last part where no other field is called so, and the
    names of earlier versions."""
    places: dict[str, list[str]] = {}
    for path in _nested(kind):
        places.setdefault(path.rpartition(".")[2], []).append(path)
    own = set(kind.__struct_fields__)
    short = {name: paths[0] for name, paths in places.items() if len(paths) == 1 and name not in own}
    main = {name: f"{name}.{inner.MAIN}" for name, inner in _groups(kind).items() if inner.MAIN}
    return short | main | dict(kind.EARLIER)


def setting_names(kind: type[Settings]) -> list[str]:
    """Every name that a setting may be given by."""
    return [*kind.__struct_fields__, *_nested(kind), *short_names(kind)]


def full_name(kind: type[Settings], name: str) -> str:
    """The dotted name of a field from that or a short one; refused where there is none."""
    name = name.replace("-", "_")
    path = short_names(kind).get(name, name)
    if path not in (*kind.__struct_fields__, *_nested(kind)):
        raise UsageError(f"unknown setting {name!r}; {nearest(name, setting_names(kind))}")
    return path


def alternatives(kind: type[Settings]) -> dict[str, tuple[str, Any]]:
    """Dotted name of a field -> the field that it replaces, and the default of that one."""
    found: dict[str, tuple[str, Any]] = {}
    for prefix, part in [("", kind), *((f"{name}.", inner) for name, inner in _groups(kind).items())]:
        defaults = _defaults(part)
        for one, other in part.ALTERNATIVES:
            found[prefix + one] = (prefix + other, defaults[other])
            found[prefix + other] = (prefix + one, defaults[one])
    return found


def _nested(kind: type[Settings]) -> list[str]:
    """The dotted names of all fields of fields."""
    return [
        path
        for group, inner in _groups(kind).items()
        for path in (
            *(f"{group}.{name}" for name in inner.__struct_fields__),
            *(f"{group}.{p}" for p in _nested(inner)),
        )
    ]


@cache
def _groups(kind: type[Settings]) -> dict[str, type[Settings]]:
    """The fields that are settings themselves, or None."""
    hints = {name: hint for name, hint in get_type_hints(kind).items() if name in kind.__struct_fields__}
    arms = {name: next(filter(is_settings, (hint, *get_args(hint))), None) for name, hint in hints.items()}
    return {name: arm for name, arm in arms.items() if arm is not None and hints[name] in (arm, arm | None)}


@cache
def _optional(kind: type[Settings]) -> set[str]:
    """The fields that may be None as a whole."""
    return {name for name, hint in get_type_hints(kind).items() if type(None) in get_args(hint)}


def _defaults(kind: type[Settings]) -> dict[str, Any]:
    """The fields that have a default, as plain values."""
    fields = msgspec.structs.fields(kind)
    return {field.name: to_dict(field.default) for field in fields if field.default is not msgspec.NODEFAULT}


def _placed(kind: type[Settings], given: dict[str, Any]) -> dict[str, Any]:
    """`given` with every value at its place: no short, earlier or dotted names."""
    short, placed, own, optional = short_names(kind), {}, kind.__struct_fields__, _optional(kind)
    for name, value in given.items():
        group = name in own and (name not in short or isinstance(value, dict) or (value is None and name in optional))
        path = name if group else short.get(name, name)
        inner, parts = placed, path.split(".")
        for part in parts[:-1]:
            inner = inner.setdefault(part, {})
        _put(inner, parts[-1], value, path)
    return placed


def _put(place: dict[str, Any], name: str, value: Any, path: str) -> None:
    """Set a value, or those of a group; refused where one is there already."""
    if isinstance(value, dict) and isinstance(place.get(name), dict):
        for key, each in value.items():
            _put(place[name], key, each, _join(path, key))
    elif name in place:
        raise UsageError(f"{path} is given twice")
    else:
        place[name] = dict(value) if isinstance(value, dict) else value


def _completed(kind: type[Settings], given: dict[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """`given` with what it leaves out as in `base`, down to the fields of fields."""
    whole = {**base, **given}
    for one, other in kind.ALTERNATIVES:
        for said, unsaid in ((one, other), (other, one)):
            if given.get(said) is not None and unsaid not in given:
                whole[unsaid] = _defaults(kind)[unsaid]
    for name, inner in _groups(kind).items():
        if isinstance(given.get(name), dict):
            whole[name] = _completed(inner, given[name], base.get(name) or _defaults(inner))
    return whole


def is_settings(kind: Any) -> bool:
    """Whether a type is that of settings, which have fields of their own."""
    return isinstance(kind, type) and issubclass(kind, Settings)


def lasting(settings: S) -> S:
    """The same settings with whole paths for the files and folders that are there, so that they hold anywhere."""
    plain = _lasting(settings)
    return settings if plain == to_dict(settings) else checked(type(settings), plain)


def places(settings: Settings) -> dict[str, Path]:
    """Dotted name of a setting -> the file or folder that it names, or the weights after an @, where that is there."""
    found: dict[str, Path] = {}
    for name, field in _naming(settings):
        if isinstance(field, Settings):
            found |= {_join(name, inner): path for inner, path in places(field).items()}
        elif isinstance(field, tuple):
            named = {f"{name}[{number}]": value for number, value in enumerate(field)}
            found |= {each: value for each, value in named.items() if isinstance(value, Path) and value.exists()}
        elif (path := _there(field)) is not None:
            found[name] = path
    return found


def _there(named: Path) -> Path | None:
    _, at, weights = str(named).partition("@")
    return named if named.exists() else Path(weights) if at and Path(weights).is_file() else None


def _lasting(settings: Settings) -> dict[str, Any]:
    """Fields that are settings, or that name a place that is there, with whole paths; all others as they are."""

    def whole(value: Any) -> Any:
        if isinstance(value, Settings):
            return _lasting(value)
        if isinstance(value, tuple):
            return tuple(map(whole, value))
        return whole_path(str(value)) if isinstance(value, Path) else value

    plain = to_dict(settings)
    return plain | {name: to_dict(whole(value)) for name, value in _naming(settings)}


def _naming(settings: Settings) -> Iterator[tuple[str, Any]]:
    """The fields that are settings or may name a place, the latter as paths."""
    kind = inspect.type_info(type(settings))
    for field in kind.fields if isinstance(kind, inspect.StructType) else ():  # a mapping says nothing of its fields
        value = getattr(settings, field.name)
        arms = field.type.types if isinstance(field.type, inspect.UnionType) else (field.type,)
        marked = any(isinstance(arm, inspect.Metadata) and (arm.extra or {}).get("place") for arm in arms)
        if marked and isinstance(value, str) and value:
            yield field.name, Path(value)
        elif isinstance(value, Settings | Path | tuple):
            yield field.name, value


def to_dict(config: Any) -> Any:
    """Settings, dataclasses and mappings as plain dicts, lists, strings and numbers (paths become strings)."""
    if isinstance(config, Settings):
        return {name: to_dict(getattr(config, name)) for name in config.__struct_fields__}
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {field.name: to_dict(getattr(config, field.name)) for field in dataclasses.fields(config)}
    if isinstance(config, Mapping):
        return {str(key): to_dict(value) for key, value in config.items()}
    if isinstance(config, list | tuple):
        return [to_dict(value) for value in config]
    if isinstance(config, Path):
        return str(config)
    return config


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """Leaves of `to_dict(config)` by dotted path."""
    plain = to_dict(config)
    if not isinstance(plain, dict) or not plain:
        return {prefix: plain}
    leaves: dict[str, Any] = {}
    for key, value in plain.items():
        leaves |= flatten(value, f"{prefix}.{key}" if prefix else key)
    return leaves


def check_numbers(config: Any) -> None:
    """Refuse numbers that no setting can mean, by name: those that are not finite, or do not fit 64 bits."""
    for path, value in flatten(config).items():
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, float) and not math.isfinite(number):
                raise _wrong(path, "a finite number", number)
            if isinstance(number, int) and abs(number) >= LARGEST_INTEGER:
                raise _wrong(path, "an integer that fits 64 bits", number)


def config_hash(config: Any, without: Iterable[str] = ()) -> str:
    """SHA-256 (hex) of the canonical JSON of `config`, leaving out the dotted paths in `without`.

    1 and 1.0 are the same value, and the order of keys does not count.
    """
    left_out = set(without)
    leaves = {path: _canonical(value) for path, value in flatten(config).items() if path not in left_out}
    text = json.dumps(leaves, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def to_yaml(config: Any) -> str:
    return _yaml().dump(to_dict(config), Dumper=_dialect()[1], sort_keys=False, allow_unicode=True)


def from_yaml(kind: type[S], text: str, source: str = "the text") -> S:
    """Settings from YAML `text`; `source` names it in errors about the YAML."""
    return checked(kind, parse_yaml(text, source))


def parse_yaml(text: str, source: str = "the text") -> dict[str, Any]:
    """The mapping that YAML `text` holds."""
    yaml = _yaml()
    try:
        value = yaml.load(text, Loader=_dialect()[0])
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise DataError(f"{source} is not valid YAML: {error}") from error
    if not isinstance(value, dict):
        raise DataError(f"{source} must hold a mapping of names to values, not {type(value).__name__}")
    return value


def save_yaml(config: Any, path: str | Path) -> None:
    write_text(path, to_yaml(config))


def load_yaml(kind: type[S], path: str | Path) -> S:
    """Settings from a YAML (or JSON) file."""
    mapping = parse_yaml(read_text(path, LARGEST_RECORD), str(path))
    try:
        return checked(kind, mapping)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error


def _read_path(kind: type, value: Any) -> Any:
    """msgspec knows no paths, and asks."""
    if not isinstance(value, str):
        raise ValueError
    return kind(value)


def _check_beyond_types(settings: Any, came: Any, path: str) -> None:
    """What msgspec lets through: 1 for true, numbers that no setting can mean, fields that do not go together."""
    if isinstance(settings, Settings):
        for name in settings.__struct_fields__:
            if name in came:  # the rest are defaults
                _check_beyond_types(getattr(settings, name), came[name], _join(path, name))
        try:
            settings.conditions()
        except UsageError as error:
            raise UsageError(_join(path, str(error))) from error
    elif isinstance(settings, list | tuple):
        for place, value in enumerate(settings):
            _check_beyond_types(value, came[place], f"{path}[{place}]")
    elif isinstance(settings, bool) and not isinstance(came, bool | str):
        raise _wrong(path, "true or false", came)
    else:
        check_numbers({path: settings})


def _refusal(kind: Any, value: Any, steps: list[str], path: str = "") -> UsageError:
    """Why msgspec refused something: `steps` lead to it from `value` of type `kind` (as msgspec describes types)."""
    if isinstance(kind, inspect.UnionType) and (steps or isinstance(value, dict)):
        kind = next(arm for arm in kind.types if not isinstance(arm, inspect.NoneType))
    if isinstance(kind, inspect.StructType) and isinstance(value, dict):
        fields = {field.name: field for field in kind.fields}
        if steps:
            return _refusal(fields[steps[0]].type, value[steps[0]], steps[1:], _join(path, steps[0]))
        for key in value:
            if key not in fields:
                short = () if path or not is_settings(kind.cls) else short_names(kind.cls)  # type: ignore[arg-type]
                known = [*fields, *short]
                return UsageError(f"unknown key {_join(path, key)!r}; {nearest(key, known)}")
        missing = next(name for name, field in fields.items() if field.required and name not in value)
        return UsageError(f"missing key {_join(path, missing)!r}, which has no default")
    if isinstance(kind, inspect.Metadata) and steps:
        return _refusal(kind.type, value, steps, path)
    if steps:
        place = int(steps[0])
        return _refusal(_item_type(kind, place), value[place], steps[1:], f"{path}[{place}]")
    if isinstance(kind, inspect.LiteralType):
        hint = nearest(str(value)[:200], [str(choice) for choice in kind.values])
        near = f"; {hint}" if hint.startswith("did you mean") else ""  # else it would list the choices again
        return UsageError(f"{_wrong(path, _allowed(kind), value)}{near}")
    return _wrong(path or "the configuration", _allowed(kind), value)


def _item_type(kind: Any, place: int) -> Any:
    return kind.item_types[place] if isinstance(kind, inspect.TupleType) else kind.item_type


def _allowed(kind: Any) -> str:
    """What a type allows, in words."""
    match kind:
        case inspect.Metadata(extra_json_schema={"description": words}):
            return words
        case inspect.Metadata():
            return _allowed(kind.type)
        case inspect.UnionType():
            arms = [_allowed(arm) for arm in kind.types if not isinstance(arm, inspect.NoneType)]
            return ", or ".join(arms + ["None"] * (len(arms) < len(kind.types)))
        case inspect.LiteralType():
            return f"one of {', '.join(map(str, kind.values))}"
        case inspect.IntType():
            return _bounded("an integer", kind)
        case inspect.FloatType():
            return _bounded("a finite number", kind)
        case inspect.TupleType():
            return f"a list of {len(kind.item_types)} values"
        case inspect.VarTupleType() | inspect.ListType():
            return f"a list{' with at least one entry' * bool(kind.min_length)}, each {_allowed(kind.item_type)}"
        case inspect.StructType():
            return "a mapping of names to values"
    names = {inspect.BoolType: "true or false", inspect.StrType: "a string", inspect.CustomType: "a path"}
    return names[type(kind)]


def _bounded(noun: str, kind: Any) -> str:
    """An integer ≥ 1, an integer from 2 to 16, a number in [0, 1), a multiple of 4 ≥ 4."""
    if kind.multiple_of is not None:
        noun = f"a multiple of {kind.multiple_of}"
    signs = {">": kind.gt, "≥": kind.ge, "<": kind.lt, "≤": kind.le}
    bounds = [(sign, f"{bound:,}") for sign, bound in signs.items() if bound is not None]
    if len(bounds) < 2:
        return " ".join([noun, *(f"{sign} {bound}" for sign, bound in bounds)])
    (low, least), (high, most) = bounds
    if isinstance(kind, inspect.IntType):
        return f"{noun} from {least} to {most}"
    return f"a number in {'[' if low == '≥' else '('}{least}, {most}{']' if high == '≤' else ')'}"


def _wrong(path: str, allowed: str, value: Any) -> UsageError:
    return UsageError(f"{path} must be {allowed}, got {value!r:.200}")


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _canonical(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_canonical(item) for item in value]
    if isinstance(value, dict):
        return {key: _canonical(item) for key, item in value.items()}
    return value


def _yaml() -> ModuleType:
    try:
        import yaml
    except ImportError as error:
        raise LeafwardError("YAML files need the package 'pyyaml': pip install pyyaml") from error
    return yaml


@cache
def _dialect() -> tuple[Any, Any]:
    """YAML's safe loader and dumper with 1e-3 as a number (YAML 1.1, and so PyYAML, reads a string), no key twice.

    The dumper must know as well: it puts quotes around a string that would be read as a number.
    """
    yaml = _yaml()

    class Loader(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            """No aliases: a few lines of them can stand for more values than there is memory."""
            if self.check_event(yaml.AliasEvent):
                mark = self.peek_event().start_mark
                raise yaml.composer.ComposerError(None, None, "an alias (*name) is not read; write the value", mark)
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            """YAML asks for keys that differ; PyYAML would take the last of them."""
            seen: set[str] = set()
            for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
                if key.value in seen:
                    message = f"the key {key.value!r} is there twice"
                    raise yaml.constructor.ConstructorError(None, None, message, key.start_mark)
                seen.add(key.value)
            return super().construct_mapping(node, deep)

    class Dumper(yaml.SafeDumper):
        pass

    number = re.compile(r"^[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+$")
    for side in (Loader, Dumper):
        side.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789."))
    return Loader, Dumper
