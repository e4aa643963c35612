"""Configuration: nested dataclasses in and out of mappings and YAML, strictly checked. Imports no torch."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

from leafward.errors import DataError, LeafwardError, UsageError, nearest
from leafward.files import LARGEST_RECORD, read_text, write_text

T = TypeVar("T")
LARGEST_INTEGER = 1 << 63


@dataclass(frozen=True)
class OptimConfig:
    """AdamW and its learning-rate schedule."""

    lr: float = 3e-4
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of the first and second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled weight decay; never applied to norms, biases, scalars and curvature."""
    clip_norm: float | None = 1.0
    """Largest global gradient norm; None leaves gradients as they are."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the decay after the warm-up."""
    warmup_steps: int = 0
    """Steps of linear warm-up."""
    final_ratio: float = 0.1
    """Learning rate at the end, as a part of the peak."""

    def __post_init__(self) -> None:
        check_types(self)
        _positive(self, "lr", "eps")
        _require(all(0.0 <= beta < 1.0 for beta in self.betas), self, "betas", "two numbers in [0, 1)")
        _require(self.weight_decay >= 0.0, self, "weight_decay", "a number >= 0")
        _positive(self, "clip_norm")
        _require(self.warmup_steps >= 0, self, "warmup_steps", "an integer >= 0")
        _require(0.0 <= self.final_ratio <= 1.0, self, "final_ratio", "a number in [0, 1]")


@dataclass(frozen=True)
class LoopConfig:
    """How long, how much at once, on what, and how often to look and to save."""

    steps: int = 1000
    """Optimiser updates in all."""
    batch_size: int = 32
    """Samples per update, over all ranks and micro-batches together."""
    micro_batch: int | None = None
    """Samples per forward pass on one rank; None means no gradient accumulation."""
    seed: int = 0
    """Initialisation, data order and sampling follow from it."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Autocast type of the forward pass; parameters stay in float32."""
    compile: bool = False
    """Compile the model with torch.compile."""
    checkpoint_activations: bool = False
    """Recompute the blocks' activations in the backward pass to save memory."""
    eval_every: int | None = None
    """Steps between evaluations; None evaluates after the last step only."""
    checkpoint_every: int = 500
    """Steps between checkpoints; there is always one after the last step."""
    log_every: int = 10
    """Steps that one line of training metrics averages over."""
    keep_last: int = 2
    """Checkpoints kept beside the best one."""
    ema: float | None = None
    """Decay of the average of the weights that is evaluated and published; None for none."""
    patience: int | None = None
    """Stop after this many evaluations without improvement; None never stops early."""
    workers: int = 0
    """Processes that load data; 0 loads in the training process."""
    strategy: Literal["auto", "ddp", "fsdp"] = "auto"
    """How several ranks share the work; auto means ddp."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto takes cuda if there is one."""

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("steps", "batch_size", "checkpoint_every", "log_every", "keep_last"):
            _require(getattr(self, name) >= 1, self, name, "an integer >= 1")
        for name in ("micro_batch", "eval_every", "patience"):
            value = getattr(self, name)
            _require(value is None or value >= 1, self, name, "an integer >= 1, or None")
        for name in ("seed", "workers"):
            _require(getattr(self, name) >= 0, self, name, "an integer >= 0")
        _require(self.ema is None or 0.0 <= self.ema < 1.0, self, "ema", "a number in [0, 1), or None")


CHANGEABLE_LOOP = frozenset(
    {
        "steps",
        "micro_batch",
        "compile",
        "checkpoint_activations",
        "checkpoint_every",
        "keep_last",
        "workers",
        "strategy",
        "device",
    }
)
"""Fields of `LoopConfig` that a resumed run may change: they move work about or set how far it goes."""


def to_dict(config: Any) -> Any:
    """`config` as plain dicts, lists, strings and numbers (paths become strings, tuples lists)."""
    if is_dataclass(config) and not isinstance(config, type):
        return {field.name: to_dict(getattr(config, field.name)) for field in fields(config)}
    if isinstance(config, Mapping):
        return {str(key): to_dict(value) for key, value in config.items()}
    if isinstance(config, list | tuple):
        return [to_dict(value) for value in config]
    if isinstance(config, Path):
        return str(config)
    return config


def from_dict(cls: type[T], mapping: Mapping[str, Any]) -> T:
    """An instance of the dataclass `cls` from `mapping`; unknown keys and wrong types are refused by name."""
    config = _build(cls, mapping, "")
    check_numbers(config)
    return config


def check_numbers(config: Any) -> None:
    """Refuse numbers that no setting can mean, by name: those that are not finite, or do not fit 64 bits."""
    for path, value in flatten(config).items():
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, float) and not math.isfinite(number):
                raise UsageError(f"{path} must be a finite number, not {number!r}")
            if isinstance(number, int) and abs(number) >= LARGEST_INTEGER:
                raise UsageError(f"{path} must be an integer that fits 64 bits, not {number!r}")


def check_types(config: Any) -> None:
    """Refuse a dataclass instance whose fields do not have their types, by name; for `__post_init__`."""
    hints = typing.get_type_hints(type(config))
    for field in fields(config):
        _coerce(getattr(config, field.name), hints[field.name], field.name)


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """Leaves of `to_dict(config)` by dotted path."""
    plain = to_dict(config)
    if not isinstance(plain, dict) or not plain:
        return {prefix: plain}
    leaves: dict[str, Any] = {}
    for key, value in plain.items():
        leaves |= flatten(value, f"{prefix}.{key}" if prefix else key)
    return leaves


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


def from_yaml(cls: type[T], text: str, source: str = "the text") -> T:
    """Parse YAML `text` into the dataclass `cls`; `source` names it in errors."""
    return from_dict(cls, parse_yaml(text, source))


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


def load_yaml(cls: type[T], path: str | Path) -> T:
    mapping = parse_yaml(read_text(path, LARGEST_RECORD), str(path))
    try:
        return from_dict(cls, mapping)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error


def _canonical(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_canonical(item) for item in value]
    if isinstance(value, dict):
        return {key: _canonical(item) for key, item in value.items()}
    return value


def _yaml() -> types.ModuleType:
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


def _build(cls: type[T], mapping: Any, path: str) -> T:
    if not is_dataclass(cls):
        raise TypeError(f"{cls!r} is not a dataclass")
    if isinstance(mapping, cls):
        return mapping
    if not isinstance(mapping, Mapping):
        raise UsageError(f"{path or cls.__name__} must be a mapping of names to values, not {mapping!r:.200}")
    hints = typing.get_type_hints(cls)
    allowed = {field.name: field for field in fields(cls) if field.init}
    for key in mapping:
        if key not in allowed:
            raise UsageError(f"unknown key {_join(path, str(key))!r}; {nearest(str(key), allowed)}")
    missing = [name for name, field in allowed.items() if name not in mapping and _is_required(field)]
    if missing:
        raise UsageError(f"missing key {_join(path, missing[0])!r}, which has no default")
    values = {name: _coerce(value, hints[name], _join(path, name)) for name, value in mapping.items()}
    try:
        return cls(**values)
    except UsageError as error:
        raise UsageError(f"{path}.{error}" if path else str(error)) from error


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _coerce(value: Any, hint: Any, path: str) -> Any:
    """`value` as the type `hint` says, or an error that names `path`."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin is typing.Annotated:
        return _coerce(value, args[0], path)
    if origin in (typing.Union, types.UnionType):
        return _coerce_union(value, args, path)
    if origin is Literal:
        if any(value == choice and type(value) is type(choice) for choice in args):
            return value
        choices = [str(choice) for choice in args]
        raise UsageError(
            f"{path} must be one of {', '.join(choices)}, not {value!r:.200}; {nearest(str(value)[:200], choices)}"
        )
    if is_dataclass(hint):
        return _build(typing.cast(type, hint), value, path)
    if origin in (tuple, list):
        return _coerce_sequence(value, origin, args, path)
    if origin is dict:
        if not isinstance(value, Mapping):
            raise _wrong(path, "a mapping", value)
        return {str(key): _coerce(item, args[1], _join(path, str(key))) for key, item in value.items()}
    return _coerce_plain(value, hint, path)


def _coerce_plain(value: Any, hint: Any, path: str) -> Any:
    if hint is type(None):
        if value is None:
            return None
    elif hint is float:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    elif hint is int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    elif hint is Path:
        if isinstance(value, str | Path):
            return Path(value)
    elif isinstance(value, hint):
        return value
    names = {float: "a number", int: "an integer", bool: "true or false", str: "a string", Path: "a path"}
    raise _wrong(path, names.get(hint, getattr(hint, "__name__", str(hint))), value)


def _coerce_union(value: Any, arms: tuple[Any, ...], path: str) -> Any:
    if value is None and type(None) in arms:
        return None
    arms = tuple(arm for arm in arms if arm is not type(None))
    errors = []
    for arm in arms:
        try:
            return _coerce(value, arm, path)
        except UsageError as error:
            errors.append(str(error))
    raise UsageError("; or ".join(errors))


def _coerce_sequence(value: Any, origin: type, args: tuple[Any, ...], path: str) -> Any:
    if not isinstance(value, list | tuple):
        raise _wrong(path, "a list", value)
    if origin is list or (len(args) == 2 and args[1] is Ellipsis):
        hints: Iterable[Any] = [args[0]] * len(value)
    elif len(args) == len(value):
        hints = args
    else:
        raise _wrong(path, f"a list of {len(args)} values", value)
    return origin(_coerce(item, hint, f"{path}[{i}]") for i, (item, hint) in enumerate(zip(value, hints, strict=True)))


def _wrong(path: str, wanted: str, value: Any) -> UsageError:
    return UsageError(f"{path} must be {wanted}, not {value!r:.200} ({type(value).__name__})")


def _require(condition: bool, config: Any, name: str, allowed: str) -> None:
    if not condition:
        raise UsageError(f"{name} must be {allowed}, not {getattr(config, name)!r}")


def _positive(config: Any, *names: str) -> None:
    """Each named field must be a finite number above zero, or None."""
    for name in names:
        value = getattr(config, name)
        _require(value is None or (value > 0.0 and math.isfinite(value)), config, name, "a finite number > 0")
