"""Configuration: round trips, strictness, and errors that name what is wrong."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leafward.engine.config import (
    CHANGEABLE_LOOP,
    LoopConfig,
    OptimConfig,
    config_hash,
    flatten,
    from_dict,
    from_yaml,
    load_yaml,
    save_yaml,
    to_dict,
    to_yaml,
)
from leafward.errors import DataError, LeafwardError, UsageError


@dataclass(frozen=True)
class Inner:
    rate: float = 0.5
    names: tuple[str, ...] = ()
    pair: tuple[int, float] = (1, 2.0)


@dataclass(frozen=True)
class Outer:
    path: Path
    inner: Inner = field(default_factory=Inner)
    maybe: Inner | None = None
    kind: Literal["a", "b"] = "a"
    flag: bool = False
    count: int = 3
    extra: dict[str, float] = field(default_factory=dict)
    rows: list[Inner] = field(default_factory=list)
    either: int | str = 0


def test_round_trip_through_yaml(tmp_path: Path) -> None:
    config = Outer(
        Path("some/where"), Inner(1e-7, ("x", "é")), Inner(), "b", True, 9, {"u": 1.5}, [Inner(2.0)], either="text"
    )
    assert from_dict(Outer, to_dict(config)) == config
    assert from_yaml(Outer, to_yaml(config)) == config
    save_yaml(config, tmp_path / "config.yaml")
    assert load_yaml(Outer, tmp_path / "config.yaml") == config


@given(
    lr=st.floats(1e-12, 1e3),
    warmup=st.integers(0, 10**6),
    clip=st.none() | st.floats(1e-6, 1e6),
    kind=st.sampled_from(["cosine", "linear", "constant"]),
)
def test_round_trip_keeps_every_bit(lr: float, warmup: int, clip: float | None, kind: Any) -> None:
    config = OptimConfig(lr=lr, warmup_steps=warmup, clip_norm=clip, schedule=kind)
    assert from_yaml(OptimConfig, to_yaml(config)) == config
    assert config_hash(from_dict(OptimConfig, to_dict(config))) == config_hash(config)


@pytest.mark.parametrize(
    ("mapping", "words"),
    [
        ({"path": "p", "inner": {"rat": 1.0}}, ["inner.rat", "did you mean 'rate'"]),
        ({"path": "p", "cuont": 1}, ["cuont", "did you mean 'count'"]),
        ({}, ["missing key 'path'"]),
        ({"path": "p", "count": "3"}, ["count", "an integer", "'3'"]),
        ({"path": "p", "count": True}, ["count", "an integer", "True"]),
        ({"path": "p", "count": 2.0}, ["count", "an integer"]),
        ({"path": "p", "flag": 1}, ["flag", "true or false"]),
        ({"path": 4}, ["path", "a path"]),
        ({"path": "p", "kind": "c"}, ["kind", "one of a, b", "'c'"]),
        ({"path": "p", "inner": {"rate": "fast"}}, ["inner.rate", "a number", "'fast'"]),
        ({"path": "p", "inner": {"names": "xy"}}, ["inner.names", "a list"]),
        ({"path": "p", "inner": {"names": ["x", 1]}}, ["inner.names[1]", "a string"]),
        ({"path": "p", "inner": {"pair": [1]}}, ["inner.pair", "2 values"]),
        ({"path": "p", "inner": 3}, ["inner", "a mapping"]),
        ({"path": "p", "extra": {"u": "v"}}, ["extra.u", "a number"]),
        ({"path": "p", "rows": [{}, {"rate": None}]}, ["rows[1].rate", "a number"]),
        ({"path": "p", "either": 1.5}, ["either", "an integer", "a string"]),
    ],
)
def test_wrong_mappings_are_refused_by_name(mapping: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        from_dict(Outer, mapping)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("cls", "name", "value"),
    [
        (OptimConfig, "lr", 0.0),
        (OptimConfig, "lr", float("nan")),
        (OptimConfig, "betas", (0.9, 1.0)),
        (OptimConfig, "weight_decay", -1.0),
        (OptimConfig, "clip_norm", 0.0),
        (OptimConfig, "schedule", "step"),
        (OptimConfig, "warmup_steps", -1),
        (OptimConfig, "final_ratio", 1.5),
        (LoopConfig, "steps", 0),
        (LoopConfig, "batch_size", 0),
        (LoopConfig, "micro_batch", 0),
        (LoopConfig, "eval_every", 0),
        (LoopConfig, "seed", -1),
        (LoopConfig, "ema", 1.0),
        (LoopConfig, "precision", "float16"),
        (LoopConfig, "strategy", "tensor"),
        (LoopConfig, "keep_last", 0),
        (LoopConfig, "steps", "10"),
        (LoopConfig, "steps", 10.0),
        (LoopConfig, "compile", "yes"),
        (OptimConfig, "lr", "1e-3"),
        (OptimConfig, "betas", (0.9,)),
        (OptimConfig, "betas", 0.9),
    ],
)
def test_values_out_of_range_are_refused_by_name(cls: type, name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"^{name} must be"):
        cls(**{name: value})


def test_a_value_refused_deep_inside_is_named_with_its_whole_path() -> None:
    @dataclass
    class Recipe:
        optim: OptimConfig = field(default_factory=OptimConfig)

    # get_type_hints of a local class needs its names; the module's are enough here.
    with pytest.raises(UsageError, match=r"^optim\.lr must be"):
        from_dict(Recipe, {"optim": {"lr": -1}})


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
    assert {field.name for field in fields(LoopConfig)} > CHANGEABLE_LOOP


def test_without_pyyaml_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(LeafwardError, match="pip install pyyaml"):
        to_yaml(LoopConfig())


def test_flatten_gives_dotted_paths() -> None:
    assert flatten({"a": {"b": 1, "c": {}}, "d": [1, 2]}) == {"a.b": 1, "a.c": {}, "d": [1, 2]}


def test_the_package_and_its_configuration_do_not_import_torch() -> None:
    code = (
        "import sys, leafward.engine, leafward.engine.config, leafward.engine.run, leafward.engine.progress\n"
        "heavy = {'torch', 'rich', 'yaml', 'ray', 'numpy', 'tensorboard'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert leafward.engine.LoopConfig().steps and 'torch' not in sys.modules\n"
        "assert all(hasattr(leafward.engine, name) for name in leafward.engine.__all__)\n"
        "assert 'torch' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
