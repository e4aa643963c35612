"""Settings: one check behind four doors, round trips, strictness, and errors that name what is wrong."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect

from leafward.adapters.block_scale import BlockScaleConfig
from leafward.adapters.low_rank import LowRankConfig
from leafward.cli.train import HOMES, parse
from leafward.config import (
    Count,
    Settings,
    checked,
    config_hash,
    flatten,
    from_yaml,
    load_yaml,
    replace,
    save_yaml,
    to_dict,
    to_yaml,
)
from leafward.engine import RunDirectory
from leafward.engine.config import CHANGEABLE_LOOP, LoopConfig, OptimConfig
from leafward.errors import DataError, LeafwardError, UsageError
from leafward.systems.hyperclip.config import Adapt
from leafward.systems.lathadapter.attributes import LatentHierarchyConfig

DOORS = ("command line", "file", "run directory", "Python")
INTEGER, HUGE = "an integer ≥ 1", 10**30

WRONG: list[tuple[str, str, Any, str]] = [
    # system, dotted name, value, what is said of it
    ("helm", "loop.steps", 0, f"must be {INTEGER}, got 0"),
    ("helm", "loop.steps", -3, f"must be {INTEGER}, got -3"),
    ("helm", "loop.steps", 2.5, f"must be {INTEGER}, got 2.5"),
    ("helm", "loop.steps", "many", f"must be {INTEGER}, got 'many'"),
    ("helm", "loop.steps", None, f"must be {INTEGER}, got None"),
    ("helm", "loop.steps", True, f"must be {INTEGER}, got True"),
    ("helm", "loop.steps", float("nan"), f"must be {INTEGER}, got nan"),
    ("helm", "loop.steps", HUGE, f"must be an integer that fits 64 bits, got {HUGE}"),
    ("helm", "loop.micro_batch", 0, "must be an integer from 1 to 16,777,216, or None, got 0"),
    ("helm", "loop.eval_every", "often", f"must be {INTEGER}, or None, got 'often'"),
    ("helm", "loop.seed", -1, "must be an integer ≥ 0, got -1"),
    ("helm", "loop.workers", 5000, "must be an integer from 0 to 1,024, got 5000"),
    ("helm", "loop.ema", 1.0, "must be a number in [0, 1), or None, got 1.0"),
    ("helm", "loop.precision", "float16", "must be one of bfloat16, float32, float64, got 'float16'; did you mean"),
    ("helm", "optim.lr", 0, "must be a finite number > 0, got 0"),
    ("helm", "optim.lr", "fast", "must be a finite number > 0, got 'fast'"),
    ("helm", "optim.lr", float("inf"), "must be a finite number, got inf"),
    ("helm", "optim.lr", float("nan"), "must be a finite number > 0, got nan"),
    ("helm", "optim.lr", False, "must be a finite number > 0, got False"),
    ("helm", "optim.weight_decay", -0.5, "must be a finite number ≥ 0, got -0.5"),
    ("helm", "optim.final_ratio", 1.5, "must be a number in [0, 1], got 1.5"),
    ("helm", "optim.betas", [0.9, 1.0], "[1] must be a number in [0, 1), got 1.0"),
    ("helm", "data.validation", 1.0, "must be a number in (0, 1), got 1.0"),
    ("helm", "data.vocab_size", 1, "must be an integer from 2 to 16,777,216, or None, got 1"),
    ("helm", "arms.seeds", 20_000, "must be an integer from 1 to 10,000, got 20000"),
    ("helm", "geometry", "sphere", "must be one of euclidean, lorentz, got 'sphere'"),
    ("radial", "objective.c", 0.0, "must be a finite number > 0, got 0.0"),
    ("himapper", "levels", 10**9, "must be an integer from 2 to 16, got 1000000000"),
    ("himapper", "leaves", 33, "must be a multiple of 2^(levels − 1) = 8, got 33"),
    ("himapper", "dim", 6, "must be a multiple of 4 ≥ 4, got 6"),
    ("himapper", "data.decoder", "unet", "must be semantic-fpn or smp:NAME, got 'unet'"),
    ("himapper", "augment.scale", [0.5, 0.3], "must be two parts with 0 < low ≤ high ≤ 1, got (0.5, 0.3)"),
    ("superposition", "widths", [8, 8], "must be a list of at least one, without repeats, got (8, 8)"),
    ("superposition", "widths", [4, "six"], f"[1] must be {INTEGER}, got 'six'"),
    ("superposition", "axis", ["step"], "[0] must be one of data, steps, got 'step'; did you mean 'steps'?"),
    (
        "hyperclip",
        "adapt.method",
        "loral",
        "must be one of attention, block-scale, frozen, full, lora, orthogonal, got",
    ),
    ("hyperclip", "data.template", "a dog", "must be a text with {} once, for the class name, got 'a dog'"),
    ("hyperclip --task segment", "adapt.rank", 0, f"must be {INTEGER}, or None, got 0"),
    ("hyperclip --task segment", "data.templates", [], "must be a list with at least one entry, each a text with"),
    (
        "lathadapter",
        "data.template",
        "a {} on a {}",
        "must be a text with {} once, for the class name, got 'a {} on a {}'",
    ),
]


class Inner(Settings, frozen=True):
    rate: float = 0.5
    names: tuple[str, ...] = ()
    pair: tuple[int, float] = (1, 2.0)


class Outer(Settings, frozen=True):
    path: Path
    inner: Inner = Inner()
    maybe: Inner | None = None
    kind: Literal["a", "b"] = "a"
    flag: bool = False
    count: Count = 3
    rows: tuple[Inner, ...] = ()
    either: int | str = 0

    def conditions(self) -> None:
        if self.flag and self.count == 7:
            raise UsageError("flag must be off for 7")


class Outermost(Settings, frozen=True):
    outer: Outer


def settings_of(system: str) -> type[Settings]:
    return importlib.import_module(f"{HOMES[system]}.config").Config


def nested(name: str, value: Any) -> dict[str, Any]:
    """{"a": {"b": value}} of "a.b"."""
    for part in reversed(name.split(".")):
        value = {part: value}
    return value


def unchecked(config: Settings, name: str, value: Any) -> Settings:
    """Settings as Python code can make them: their constructors check nothing."""
    first, _, rest = name.partition(".")
    held = {field: getattr(config, field) for field in config.__struct_fields__}
    return type(config)(**held | {first: unchecked(held[first], rest, value) if rest else value})


def bring(door: str, system: str, name: str, value: Any, place: Path) -> None:
    """Settings with one value that is not their default, by one of the doors."""
    kind = settings_of(system)
    config = unchecked(kind(), name, tuple(value) if isinstance(value, list) else value)
    if door == "command line":
        parse([system, f"--{name.replace('_', '-')}", *map(str, value if isinstance(value, list) else [value])])
    elif door == "file":
        (place / "c.yaml").write_text(to_yaml(nested(name, value)))
        load_yaml(kind, place / "c.yaml")
    elif door == "run directory":
        RunDirectory.create(place / "run", config)
        checked(kind, RunDirectory.open(place / "run").config)
    else:
        importlib.import_module(f"{HOMES[system]}.train").run(config, place / "run")


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(("system", "name", "value", "said"), WRONG, ids=[f"{w[1]}={w[2]!r:.20}" for w in WRONG])
def test_a_bad_value_is_refused_with_the_same_sentence_at_every_door(
    door: str, system: str, name: str, value: Any, said: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as caught:
        bring(door, system, name, value, tmp_path)
    gap = "" if said.startswith("[") else " "
    assert str(caught.value).removeprefix(f"{tmp_path / 'c.yaml'}: ").startswith(f"{name}{gap}{said}")
    assert door != "Python" or not (tmp_path / "run").exists()


def test_words_that_are_numbers_are_numbers_in_every_text(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(json.dumps({"optim": {"lr": "1e-3"}, "loop": {"steps": "20", "ema": None}}))
    expected = replace(settings_of("helm")(), optim={"lr": 1e-3}, loop={"steps": 20, "ema": None})
    assert load_yaml(settings_of("helm"), tmp_path / "c.json") == expected
    assert checked(settings_of("helm"), {"optim": {"lr": "1e-3"}, "loop": {"steps": "2e1"}}) == expected
    by_words = parse(["helm", "--optim.lr", "1e-3", "--loop.steps", "2e1", "--loop.ema", "None"]).config
    assert (by_words.optim.lr, by_words.loop.steps, by_words.loop.ema) == (1e-3, 20, None)
    assert type(by_words.loop.steps) is int
    assert parse(["superposition", "--widths", "4,6,9", "--bias-lr=None"]).config.widths == (4, 6, 9)


@pytest.mark.parametrize("system", HOMES)
def test_every_preset_survives_yaml_and_the_command_line(system: str, tmp_path: Path) -> None:
    module = importlib.import_module(f"{HOMES[system]}.config")
    for name, preset in module.PRESETS.items():
        config = preset()
        save_yaml(config, tmp_path / "config.yaml")
        again = load_yaml(module.Config, tmp_path / "config.yaml")
        assert (again, repr(again), config_hash(again)) == (config, repr(config), config_hash(config))
        assert parse([*system.split(), "--preset", name]).config == config
        assert parse([*system.split(), "--config", str(tmp_path / "config.yaml")]).config == config


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Values that a type allows, as msgspec describes types."""
    if isinstance(kind, inspect.StructType):
        return st.fixed_dictionaries({}, optional={each.name: values_of(each.type) for each in kind.fields})
    if isinstance(kind, inspect.UnionType):
        return st.one_of([values_of(arm) for arm in kind.types])
    if isinstance(kind, inspect.LiteralType):
        return st.sampled_from(kind.values)
    if isinstance(kind, inspect.IntType):
        return st.integers(kind.ge if kind.ge is not None else -(2**62), kind.le or 2**62)
    if isinstance(kind, inspect.FloatType):
        low, high = (kind.gt if kind.ge is None else kind.ge), (kind.lt if kind.le is None else kind.le)
        finite = st.floats(low, high, allow_nan=False, allow_infinity=False)
        return finite.filter(lambda x: (kind.gt is None or x > kind.gt) and (kind.lt is None or x < kind.lt))
    if isinstance(kind, inspect.TupleType):
        return st.tuples(*map(values_of, kind.item_types))
    if isinstance(kind, inspect.VarTupleType):
        return st.lists(values_of(kind.item_type), min_size=kind.min_length or 0, max_size=4)
    if isinstance(kind, inspect.Metadata):
        pattern = getattr(kind.type, "pattern")  # noqa: B009
        return st.text() if pattern is None else st.from_regex(pattern)
    plain = {inspect.BoolType: st.booleans(), inspect.NoneType: st.none(), inspect.StrType: st.text()}
    return plain.get(type(kind), st.just("some/path"))


FREE = [LoopConfig, OptimConfig, BlockScaleConfig, LowRankConfig, LatentHierarchyConfig]
FREE += [Adapt, settings_of("helm")]


@pytest.mark.parametrize("kind", FREE, ids=[kind.__module__ for kind in FREE])
@given(data=st.data())
def test_whatever_the_types_allow_is_kept_to_the_bit(kind: type[Settings], data: Any) -> None:
    """For settings without conditions between their fields."""
    config = checked(kind, data.draw(values_of(inspect.type_info(kind))))
    assert checked(kind, to_dict(config)) == config
    again = from_yaml(kind, to_yaml(config))
    assert (again, repr(again), config_hash(again)) == (config, repr(config), config_hash(config))


def test_the_constructor_checks_nothing_and_checked_all_of_it() -> None:
    config = OptimConfig(lr=-1.0)
    with pytest.raises(UsageError, match=r"^lr must be a finite number > 0, got -1\.0$"):
        checked(OptimConfig, config)
    with pytest.raises(UsageError, match="unknown key 'stepz'; did you mean 'steps'"):
        replace(LoopConfig(), stepz=3)
    with pytest.raises(UsageError, match=r"^keep_last must be"):
        replace(LoopConfig(), keep_last=0)


def test_settings_of_a_narrower_kind_stay_of_that_kind() -> None:
    hcformer = settings_of("hcformer")()
    assert type(checked(settings_of("vision"), hcformer)) is type(hcformer)


def test_fields_that_do_not_go_together_are_named_with_their_path() -> None:
    with pytest.raises(UsageError, match=r"^outer\.flag must be off for 7$"):
        checked(Outermost, {"outer": {"path": "p", "flag": True, "count": 7}})
    with pytest.raises(UsageError, match=r"^outer\.count must be an integer"):  # a field by itself comes first
        checked(Outermost, {"outer": {"path": "p", "flag": True, "count": "seven"}})


def test_round_trip_through_yaml(tmp_path: Path) -> None:
    config = Outer(Path("some/where"), Inner(1e-7, ("x", "é")), Inner(), "b", True, 9, (Inner(2.0),), either="text")
    assert checked(Outer, to_dict(config)) == config
    assert from_yaml(Outer, to_yaml(config)) == config
    save_yaml(config, tmp_path / "config.yaml")
    assert load_yaml(Outer, tmp_path / "config.yaml") == config


@pytest.mark.parametrize(
    ("mapping", "words"),
    [
        ({"path": "p", "inner": {"rat": 1.0}}, ["inner.rat", "did you mean 'rate'"]),
        ({"path": "p", "cuont": 1}, ["cuont", "did you mean 'count'"]),
        ({}, ["missing key 'path'"]),
        ({"path": "p", "count": "three"}, ["count", "an integer", "'three'"]),
        ({"path": "p", "count": True}, ["count", "an integer", "True"]),
        ({"path": "p", "count": 2.5}, ["count", "an integer"]),
        ({"path": "p", "flag": 1}, ["flag", "true or false"]),
        ({"path": 4}, ["path", "a path"]),
        ({"path": "p", "kind": "c"}, ["kind", "one of a, b", "'c'"]),
        ({"path": "p", "inner": {"rate": "fast"}}, ["inner.rate", "a finite number", "'fast'"]),
        ({"path": "p", "inner": {"names": "xy"}}, ["inner.names", "a list"]),
        ({"path": "p", "inner": {"names": ["x", 1]}}, ["inner.names[1]", "a string"]),
        ({"path": "p", "inner": {"pair": [1]}}, ["inner.pair", "2 values"]),
        ({"path": "p", "inner": 3}, ["inner", "a mapping"]),
        ({"path": "p", "rows": [{}, {"rate": None}]}, ["rows[1].rate", "a finite number"]),
        ({"path": "p", "either": 1.5}, ["either", "an integer", "a string"]),
    ],
)
def test_wrong_mappings_are_refused_by_name(mapping: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        checked(Outer, mapping)
    for word in words:
        assert word in str(caught.value)


def test_numbers_in_yaml_without_a_point_are_numbers() -> None:
    assert from_yaml(OptimConfig, "lr: 1e-3\nclip_norm: null\n") == OptimConfig(lr=1e-3, clip_norm=None)
    assert from_yaml(Inner, "rate: 5E+2\nnames: ['1e3', e1]\n") == Inner(500.0, ("1e3", "e1"))


@pytest.mark.parametrize("name", ["1e5", "12345e6", "-1_0E+3", ".5e3", "1e", "0x10", "1:30", "yes", "null", "1."])
def test_strings_that_look_like_something_else_stay_strings(name: str) -> None:
    config = Inner(names=(name,))
    assert from_yaml(Inner, to_yaml(config)) == config


@pytest.mark.parametrize("text", ["a: [", "- 1", "just words", ""])
def test_bad_yaml_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(DataError, match=r"bad\.yaml"):
        load_yaml(Inner, tmp_path / "bad.yaml")


@pytest.mark.parametrize("text", ["rate: 1\nnames: []\nrate: 2\n", "inner: {rate: 1, rate: 2}\npath: p\n"])
def test_a_key_that_is_there_twice_is_refused_by_name(text: str) -> None:
    with pytest.raises(DataError, match=r"the key 'rate' is there twice(?s:.*)line"):
        from_yaml(Outer if "path" in text else Inner, text, "run.yaml")


def test_yaml_cannot_make_objects(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    with pytest.raises(DataError):
        from_yaml(Inner, f"rate: !!python/object/apply:os.mkdir ['{trap}']")
    assert not trap.exists()


def test_hash_depends_on_values_alone() -> None:
    assert config_hash({"a": 1, "b": {"c": 2.0}}) == config_hash({"b": {"c": 2}, "a": 1.0})
    assert config_hash({"a": 1}) != config_hash({"a": 2})
    assert config_hash({"a": 1, "b": {"c": 2}}, without=["b.c"]) == config_hash(
        {"a": 1, "b": {"c": 3}}, without=["b.c"]
    )
    assert config_hash(LoopConfig()) != config_hash(LoopConfig(seed=1))
    # Stored in checkpoints and directory names, so it must never change.
    assert config_hash({"a": 1, "b": [True, None, 0.5, "é"]})[:16] == "65d59f8cf42b6194"


def test_changeable_fields_exist() -> None:
    assert set(LoopConfig.__struct_fields__) > CHANGEABLE_LOOP


def test_without_pyyaml_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(LeafwardError, match="pip install pyyaml"):
        to_yaml(LoopConfig())


def test_flatten_gives_dotted_paths() -> None:
    assert flatten({"a": {"b": 1, "c": {}}, "d": [1, 2]}) == {"a.b": 1, "a.c": {}, "d": [1, 2]}


def test_the_package_and_its_configuration_do_not_import_torch() -> None:
    code = (
        "import sys, leafward.config, leafward.engine.config, leafward.engine.run, leafward.engine.progress\n"
        "heavy = {'torch', 'tyro', 'rich', 'yaml', 'ray', 'numpy', 'tensorboard'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert leafward.engine.LoopConfig().steps and 'torch' not in sys.modules\n"
        "assert all(hasattr(leafward.engine, name) for name in leafward.engine.__all__)\n"
        "assert 'torch' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


class Group(Settings, frozen=True):
    MAIN: ClassVar[str] = "source"
    RARE: ClassVar[frozenset[str]] = frozenset({"field"})

    source: str | None = None
    field: str = "text"


class Whole(Settings, frozen=True):
    EARLIER: ClassVar[Mapping[str, str]] = {"batch": "loop.batch_size"}

    data: Group = Group()
    size: int = 3
    loop: LoopConfig = LoopConfig(epochs=5.0, batch_size=4)
    optim: OptimConfig = OptimConfig(lr=0.5)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"steps": 9}, {"loop.steps": 9, "loop.epochs": None}),  # they replace each other
        ({"epochs": 2}, {"loop.epochs": 2.0, "loop.steps": 1000}),
        ({"loop": {"steps": 9, "epochs": 3}}, {"loop.steps": 9, "loop.epochs": 3.0}),
        ({"batch": 7}, {"loop.batch_size": 7, "loop.epochs": 5.0}),
        ({"loop.seed": 3, "loop": {"batch_size": 2}}, {"loop.seed": 3, "loop.batch_size": 2}),
        ({"data": "here"}, {"data.source": "here", "data.field": "text"}),
        ({"data": None}, {"data.source": None}),
        ({"data": {"field": "body"}, "source": "there"}, {"data.source": "there", "data.field": "body"}),
        ({"lr": "1e-3", "size": 4}, {"optim.lr": 1e-3, "size": 4}),
    ],
)
def test_the_group_of_a_name_may_be_left_out(given: dict[str, Any], expected: dict[str, Any]) -> None:
    found = flatten(checked(Whole, given))
    assert {name: found[name] for name in expected} == expected
    changed = {name for name, value in flatten(Whole()).items() if found[name] != value}
    assert changed <= set(expected)
    assert replace(Whole(), **given) == checked(Whole, given)
    assert from_yaml(Whole, to_yaml(given)) == checked(Whole, given)


def test_what_is_replaced_keeps_all_else() -> None:
    first = replace(Whole(), seed=3, lr=0.1)
    assert replace(first, loop={"steps": 2}) == replace(first, steps=2)
    assert (replace(first, steps=2).loop.seed, replace(first, steps=2).optim.lr) == (3, 0.1)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"steps": 9, "loop": {"steps": 8}}, r"loop\.steps is given twice"),
        ({"batch": 0}, r"loop\.batch_size must be an integer"),
        ({"stpes": 9}, r"unknown key 'stpes'; did you mean 'steps'"),
        ({"loop": {"stpes": 9}}, r"unknown key 'loop\.stpes'; did you mean 'steps'"),
        ({"loop.stpes": 9}, r"unknown key 'loop\.stpes'; did you mean 'steps'"),
        ({"size.x": 9}, r"size"),
    ],
)
def test_short_names_are_refused_like_full_ones(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        checked(Whole, given)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--steps 7 --batch-size=3", {"loop.steps": 7, "loop.batch_size": 3}),
        ("--loop.steps 7 --optim.lr 0.5", {"loop.steps": 7, "optim.lr": 0.5}),
        ("--epochs 2 --lr 1e-2 --seed 4", {"loop.epochs": 2.0, "optim.lr": 0.01, "loop.seed": 4}),
        ("--twin --seeds 3 --precision float64 --compile", {"arms.twin": True, "arms.seeds": 3, "loop.compile": True}),
        ("--data photos --no-check", {"data.source": "photos", "data.check": False}),
        ("--contrast-weight 0.5", {"losses.contrast": 0.5}),
    ],
)
def test_short_flags_are_those_of_files(words: str, expected: dict[str, Any]) -> None:
    config = parse(["himapper", *words.split()]).config
    assert {name: flatten(config)[name] for name in expected} == expected


def test_rare_settings_are_shown_by_help_all_and_taken_always(capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit) as stop:
            parse(["helm", "--preset", "helm-d-115m", flag])
        assert not stop.value.code
        shown.append(capsys.readouterr().out)
    assert "--loop.ema" not in shown[0]
    assert "--loop.ema" in shown[1]
    assert all("--loop.steps" in text and "2400" in text for text in shown)
    assert parse(["helm", "--ema", "0.9"]).config.loop.ema == 0.9
    with pytest.raises(UsageError, match=r"Unrecognized options: --help-al; did you mean '--help-all'\?"):
        parse(["helm", "--help-al"])
