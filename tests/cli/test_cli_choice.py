"""Commands that are families: which module is meant, and what is said when none is."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import pytest
import tyro

from leafward.cli import data, evaluate, explain
from leafward.cli.choice import take_value
from leafward.engine.run import RunDirectory
from leafward.errors import UsageError
from leafward.systems import EVALUATIONS


@dataclass
class Args:
    target: Annotated[str, tyro.conf.Positional]
    size: int = 3


@pytest.fixture
def family(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A module of a family, under the names `score` and `other`."""
    module: Any = ModuleType("leafward_family")
    module.Args, module.SUMMARY = Args, "Counts letters."
    module.run = lambda args, console: {"length": len(args.target), "size": args.size}
    monkeypatch.setitem(sys.modules, "leafward_family", module)
    table = {"score": "leafward_family", "other": "leafward_family"}
    monkeypatch.setattr(evaluate, "EVALUATIONS", table)
    monkeypatch.setattr(evaluate, "EVALUATION_OF", {"toy": "score"})
    monkeypatch.setattr(explain, "EXPLANATIONS", {"toy": "leafward_family"})
    monkeypatch.setattr(data, "PREPARATIONS", table)
    return table


def test_named_task_and_its_flags(family):
    for words in (["abcd", "--task", "score", "--size", "5"], ["--task=score", "abcd", "--size", "5"]):
        chosen = evaluate.parse(words)
        assert evaluate.run(chosen, None) == {"length": 4, "size": 5}  # pyright: ignore[reportArgumentType]
    assert data.parse(["other", "xy"]).args == Args("xy")


def test_a_run_knows_its_task_and_its_system(family, tmp_path: Path):
    RunDirectory.create(tmp_path, {"a": 1}, recipe="toy")
    assert evaluate.parse([str(tmp_path)]).args == Args(str(tmp_path))
    assert explain.parse([str(tmp_path)]).args == Args(str(tmp_path))
    assert explain.parse(["timm:toy_small"]).args == Args("timm:toy_small")


def test_what_cannot_be_chosen_is_refused_by_name(family, tmp_path: Path):
    with pytest.raises(UsageError, match="unknown task 'scor'; did you mean 'score'"):
        evaluate.parse(["x", "--task", "scor"])
    with pytest.raises(UsageError, match="x is not a run directory, so --task must say what to measure: score, other"):
        evaluate.parse(["x"])
    RunDirectory.create(tmp_path, {"a": 1}, recipe="nobody")
    with pytest.raises(UsageError, match="recipe 'nobody' have no task"):
        evaluate.parse([str(tmp_path)])
    with pytest.raises(UsageError, match="neither a run directory nor"):
        explain.parse(["x"])


def saved(folder: Path, record: Any, name: str = "config.json") -> str:
    folder.mkdir()
    (folder / name).write_text(json.dumps(record))
    return str(folder)


@pytest.mark.parametrize(
    ("card", "task"),
    [
        ({"task": "classify", "model": "hcformer_nano", "classes": ["a", "b"], "size": 96}, "vision"),
        ({"task": "segment", "model": "resnet18", "decoder": "semantic-fpn"}, "vision"),
        ({"vision": {"task": "classify", "model": "resnet18"}, "hierarchy": None}, "himapper"),
        ({"model_type": "helm", "architectures": ["HelmForCausalLM"]}, "language"),
    ],
)
def test_a_saved_model_knows_its_task(tmp_path: Path, card: dict[str, Any], task: str) -> None:
    model = saved(tmp_path / "model", card)
    assert evaluate.parse([model, "--data", "d"]).module.__name__ == EVALUATIONS[task]
    assert evaluate.parse([model, "--task", "sample"]).module.__name__ == EVALUATIONS["sample"]


@pytest.mark.parametrize(
    ("record", "name"),
    [
        ({"model_type": "clip"}, "config.json"),
        ({"model_cfg": {}}, "open_clip_config.json"),
        ({"format": "leafward-adapter", "method": "block_scale"}, "adapter_config.json"),
    ],
)
def test_an_encoder_is_asked_which_of_its_tasks_is_meant(tmp_path: Path, record: dict[str, Any], name: str) -> None:
    with pytest.raises(UsageError, match=r"merged holds an encoder.*one of hierarcaps, hyperlex, .*zeroshot$"):
        evaluate.parse([saved(tmp_path / "merged", record, name)])


@pytest.mark.parametrize("record", [{}, {"task": "classify"}, {"task": ["classify"], "model": "x"}, {"channels": 8}])
def test_a_foreign_folder_is_named_with_all_tasks(tmp_path: Path, record: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"foreign is neither a run .* --task must say .*: vision, .*, search$"):
        evaluate.parse([saved(tmp_path / "foreign", record)])


@pytest.mark.parametrize(("words", "status"), [([], 2), (["--help"], 0)])
def test_choices_are_listed(family, capsys, words, status):
    for command in (evaluate, explain, data):
        with pytest.raises(SystemExit) as stopped:
            command.parse(list(words))
        assert stopped.value.code == status
        assert "Counts letters." in capsys.readouterr().out


def test_value_of_a_flag_is_taken_out():
    assert take_value(["a", "--task", "b", "c"], "--task") == ("b", ["a", "c"])
    assert take_value(["a", "--task=b"], "--task") == ("b", ["a"])
    assert take_value(["a", "--task"], "--task") == (None, ["a", "--task"])
