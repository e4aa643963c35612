"""Settings that earlier versions wrote: they open and mean what they meant; a run that was begun with them says how to
begin again."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from leafward.cli.train import HOMES, parse
from leafward.config import Settings, flatten, load_yaml, parse_yaml
from leafward.engine import RunDirectory
from leafward.errors import UsageError

FOLDER = Path(__file__).parent / "data" / "configs"
SYSTEMS = {words: words.replace("hyperclip --task segment", "segmenter") for words in HOMES if words != "vision"}
"""What follows `leafward train` -> the file of that training; vision was hcformer's."""
RENAMED = {"batch": "batch_size", "warmup": "warmup_ratio", "contrast_weight": "contrast", "kl_weight": "kl"}
"""Last part of a name then -> now."""
PLACES = {
    "hyperclip": {"images": "data.source"},
    "superposition": {"optim": "optim.name", "workers": "processes"},
}
"""System -> full name then -> full name now, where the last part does not tell."""
MOVED: dict[str, dict[str, Any]] = {
    "helm": {
        "data.source": "fables.jsonl",
        "data.field": "story",
        "data.vocab_size": 320,
        "data.cache": "tokens",
        "arms.seeds": 2,
        "loop.steps": 40,
        "optim.warmup_steps": 7,
    },
    "hcformer": {"data.source": "photos", "data.size": 64, "data.taxonomy": "tree.csv", "data.check": False},
    "himapper": {"data.held_out": 0.2, "losses.contrast": 0.1, "losses.kl": 0.01, "arms.seeds": 3, "arms.twin": True},
    "lathadapter": {
        "data.features": "pets.npz",
        "data.targets": ["far.npz"],
        "data.shots": [1, 4],
        "data.taxonomy": "tree.csv",
        "hierarchy.c": 0.5,
        "hierarchy.refinement": 0.2,
        "hierarchy.normalise": False,
        "arms.seeds": 2,
        "arms.twin": False,
        "loop.seed": 7,
        "loop.epochs": 60,
        "loop.batch_size": 16,
        "optim.lr": 5e-3,
    },
    "radial": {
        "data.source": "captions.jsonl",
        "data.test": "test.jsonl",
        "data.hyperlex": "hyperlex.zip",
        "objective.loss": "cone",
        "arms.twin": True,
        "loop.epochs": 2.5,
        "loop.batch_size": 64,
        "loop.checkpoint_every": 100,
        "optim.warmup_ratio": 0.1,
        "optim.schedule": "cosine",
        "optim.clip_norm": 1.0,
    },
}
MOVED |= {
    "hyperclip": {
        "data.source": "squares",
        "data.shots": 4,
        "adapt.method": "lora",
        "adapt.score": "lorentz",
        "arms.twin": True,
        "loop.batch_size": 8,
        "loop.workers": 1,
        "optim.lr": 1e-3,
    },
    "hyperclip --task segment": {
        "data.source": "scenes",
        "data.ignore": 0,
        "arms.compare": True,
        "loop.steps": 70,
        "loop.batch_size": 2,
        "optim.lr": 3e-4,
    },
    "superposition": {
        "processes": 3,
        "arms.seeds": 2,
        "loop.precision": "float64",
        "loop.batch_size": 64,
        "optim.name": "muon",
        "optim.warmup_ratio": 0.2,
    },
    "taxonomy": {
        "data.source": "tree.csv",
        "arms.twin": True,
        "loop.epochs": 40,
        "loop.batch_size": 64,
        "loop.seed": 2,
    },
}
"""System -> where some settings of its file stand today, and what they are."""


def opened(system: str) -> tuple[dict[str, Any], Settings]:
    """What the earlier version wrote, and the settings of today."""
    kind = importlib.import_module(f"{HOMES[system]}.config").Config
    path = FOLDER / f"{SYSTEMS[system]}.yaml"
    return flatten(parse_yaml(path.read_text())), load_yaml(kind, path)


def place(system: str, name: str, today: dict[str, Any]) -> str:
    """The dotted name today of one of then: the same, or the only one with the same last part."""
    if name in PLACES.get(system, {}):
        return PLACES[system][name]
    if name in today:
        return name
    if f"{name}.source" in today:
        return f"{name}.source"
    last = name.rpartition(".")[2]
    (found,) = (path for path in today if path.rpartition(".")[2] in (last, RENAMED.get(last)))
    return found


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_file_of_an_earlier_version_opens_and_nothing_in_it_is_lost(system: str) -> None:
    then, config = opened(system)
    today = flatten(config)
    places = {name: place(system, name, today) for name in then}
    assert len(set(places.values())) == len(then)
    assert {name: today[path] for name, path in places.items()} == then


@pytest.mark.parametrize("system", MOVED)
def test_it_stands_where_it_belongs_and_all_else_is_as_by_default(system: str) -> None:
    then, config = opened(system)
    today, default = flatten(config), flatten(type(config)())
    assert {name: today[name] for name in MOVED[system]} == MOVED[system]
    given = {place(system, name, today) for name in then}
    given |= {"loop.steps"} if config.loop.epochs is not None else set()  # type: ignore[attr-defined]
    assert {name: value for name, value in today.items() if name not in given} == {
        name: value for name, value in default.items() if name not in given
    }


@pytest.mark.parametrize("system", MOVED)
def test_the_command_line_takes_it(system: str) -> None:
    _, config = opened(system)
    assert parse([*system.split(), "--config", str(FOLDER / f"{SYSTEMS[system]}.yaml")]).config == config
    assert (
        parse([*system.split(), "--config", str(FOLDER / f"{SYSTEMS[system]}.yaml"), "--seed", "11"]).config != config
    )


def test_earlier_flags_are_taken() -> None:
    words = ["--data", "c.csv", "--warmup", "0.2", "--epochs", "2", "--batch-size", "4", "--lr", "1e-3"]
    config = parse(["radial", *words]).config
    assert (str(config.data.source), config.optim.warmup_ratio, config.loop.epochs) == ("c.csv", 0.2, 2)
    config = parse(["lathadapter", "--features", "f.npz", "--batch", "8", "--no-twin", "--no-normalise"]).config
    assert (config.loop.batch_size, config.arms.twin, config.hierarchy.normalise) == (8, False, False)
    config = parse(["lathadapter", "--steps", "50", "--shots", "1,4"]).config
    assert (config.loop.steps, config.loop.epochs, config.data.shots) == (50, None, (1, 4))


@pytest.mark.parametrize("system", MOVED)
def test_an_unfinished_run_of_an_earlier_version_says_how_to_begin_again(system: str, tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", parse_yaml((FOLDER / f"{SYSTEMS[system]}.yaml").read_text()))
    _, config = opened(system)
    with pytest.raises(
        UsageError, match=r"begun by an earlier version .* other names .*--overwrite.*--config .*run/"
    ) as told:
        RunDirectory.create(run.path, config, resume=True)
    file = str(told.value).rpartition("--config ")[2]
    assert parse([*system.split(), "--config", file]).config == config


@pytest.mark.parametrize("system", ["radial", "lathadapter"])
def test_a_preset_as_an_earlier_version_wrote_it_says_what_is_missing(system: str, tmp_path: Path) -> None:
    """Where the source of the data was null."""
    settings = importlib.import_module(f"{HOMES[system]}.config")
    text = "data: null\nmodel: ''\n" if system == "radial" else "features: null\nimages: null\n"
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(UsageError, match=r"--data must|features is missing"):
        settings.check(load_yaml(settings.Config, tmp_path / "c.yaml"))
