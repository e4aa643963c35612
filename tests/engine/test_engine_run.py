"""The run directory: what it takes over, what it refuses, and what it keeps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from leafward.engine.run import RunDirectory
from leafward.errors import DataError, LeafwardError, UsageError

CONFIG = {"loop": {"steps": 10, "seed": 3}, "name": "x"}


def test_a_new_run_records_its_configuration_and_environment(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "deep" / "run", CONFIG)
    assert RunDirectory.open(run.path).config == CONFIG
    env = json.loads((run.path / "env.json").read_text())
    assert env["seed"] == {"loop.seed": 3}
    assert {"python", "versions", "commit", "hardware", "argv"} <= env.keys()
    assert run.checkpoints.is_dir()
    assert not run.finished


def test_a_finished_run_is_replaced_only_when_told(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, CONFIG)
    run.log(1, {"train/loss": 1.0})
    (run.path / "note.txt").write_text("mine")
    for stale in ("model", "members", "figures", "evaluation"):
        (run.path / stale).mkdir()
    run.finish({"score": 1})
    assert run.result() == {"score": 1}
    for resume in (False, True):
        with pytest.raises(UsageError, match=r"finished run.*--overwrite"):
            RunDirectory.create(tmp_path, CONFIG, resume=resume)
    run.report.write_text("page")
    (run.checkpoints / "step-00000010").mkdir()
    with pytest.raises(UsageError, match=r"finished run.*--overwrite"):
        RunDirectory.create(tmp_path, CONFIG, resume=True)
    again = RunDirectory.create(tmp_path, {"other": 1}, overwrite=True, recipe="toy")
    assert again.metrics() == []
    assert not any((run.path / stale).exists() for stale in ("model", "members", "figures", "evaluation"))
    assert RunDirectory.open(tmp_path).recipe == "toy"
    assert not again.finished
    assert again.config == {"other": 1}
    assert (run.path / "note.txt").read_text() == "mine"


def test_a_finished_run_without_its_page_is_taken_up_to_write_it(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, CONFIG)
    run.log(1, {"train/loss": 1.0})
    (run.checkpoints / "step-00000010").mkdir()
    run.finish({"score": 1})
    with pytest.raises(UsageError, match=r"finished run"):
        RunDirectory.create(tmp_path, CONFIG)
    with pytest.raises(UsageError, match=r"name \(was 'x', now 'y'\)"):
        RunDirectory.create(tmp_path, CONFIG | {"name": "y"}, resume=True)
    again = RunDirectory.create(tmp_path, CONFIG, resume=True)
    assert again.result() == {"score": 1}
    assert len(again.metrics()) == 1


def test_what_a_killed_writer_left_goes_when_the_run_is_taken_up(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, CONFIG)
    folder = run.checkpoints / "cells" / "first"
    folder.mkdir(parents=True)
    stopped = f"""import os, sys
from pathlib import Path
from leafward.data.text.folders import replacing_folder
from leafward.files import replacing
with replacing_folder({str(tmp_path / "model")!r}) as model, replacing({str(folder / "scores.json")!r}) as scores:
    for file in (model / "weights", scores):
        file.write_text("half")
    os.kill(os.getpid(), 9)
"""
    assert subprocess.run([sys.executable, "-c", stopped]).returncode == -9
    (tmp_path / ".partial-model").mkdir()
    (tmp_path / ".notes").write_text("mine")
    (tmp_path / ".settings.json").write_text("mine")
    assert len([path for path in tmp_path.rglob(".*") if path.name.endswith(".tmp")]) == 2
    run.release()
    RunDirectory.create(tmp_path, CONFIG, resume=True)
    assert sorted(path.name for path in tmp_path.rglob(".*")) == [".notes", ".settings.json"]
    assert sorted(path.name for path in folder.iterdir()) == []


def test_an_unfinished_run_is_continued_only_when_told(tmp_path: Path) -> None:
    RunDirectory.create(tmp_path, CONFIG)
    with pytest.raises(UsageError, match=r"unfinished run.*--resume"):
        RunDirectory.create(tmp_path, CONFIG)
    first = json.loads((tmp_path / "env.json").read_text())
    for _ in range(2):
        RunDirectory.create(tmp_path, CONFIG, resume=True)
    assert json.loads((tmp_path / "env.json").read_text())["earlier"] == [first, first]


def test_resume_refuses_another_configuration_and_names_the_difference(tmp_path: Path) -> None:
    first = RunDirectory.create(tmp_path, CONFIG, may_change={"loop.steps"})
    changed = {"loop": {"steps": 20, "seed": 3}, "name": "y", "new": 1}
    with pytest.raises(UsageError) as caught:
        RunDirectory.create(tmp_path, changed, resume=True, may_change={"loop.steps"})
    assert "name (was 'x', now 'y')" in str(caught.value)
    assert "new" in str(caught.value)
    assert "loop.steps" not in str(caught.value)
    longer = {"loop": {"steps": 20, "seed": 3}, "name": "x"}
    second = RunDirectory.create(tmp_path, longer, resume=True, may_change={"loop.steps"})
    assert second.identity == first.identity
    assert RunDirectory.open(tmp_path).config == longer


@pytest.mark.parametrize("flags", [{}, {"resume": True}, {"overwrite": True}])
def test_a_foreign_directory_is_never_touched(tmp_path: Path, flags: dict[str, bool]) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UsageError, match="not a run directory"):
        RunDirectory.create(tmp_path, CONFIG, **flags)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("mark", [None, "{}", '{"format": "other"}', "[]"])
def test_a_project_that_only_looks_like_a_run_is_never_touched(tmp_path: Path, mark: str | None) -> None:
    (tmp_path / "config.yaml").write_text("mine: 1")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "best.pt").write_text("weeks of work")
    if mark is not None:
        (tmp_path / "env.json").write_text(mark)
    with pytest.raises(UsageError, match="not a run directory"):
        RunDirectory.create(tmp_path, CONFIG, overwrite=True)
    (tmp_path / "config.yaml").unlink()
    with pytest.raises(UsageError, match="not a run directory"):
        RunDirectory.create(tmp_path, CONFIG)
    assert (tmp_path / "checkpoints" / "best.pt").read_text() == "weeks of work"


def test_resume_and_overwrite_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="exclude each other"):
        RunDirectory.create(tmp_path, CONFIG, resume=True, overwrite=True)


def test_a_path_below_a_file_gives_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LeafwardError, match="file/run"):
        RunDirectory.create(tmp_path / "file" / "run", CONFIG)
    with pytest.raises(LeafwardError, match="cannot be a run directory"):
        RunDirectory.create(tmp_path / "file", CONFIG)


def test_open_refuses_what_is_not_a_run(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not a run directory"):
        RunDirectory.open(tmp_path)


def test_rewind_drops_later_steps_and_a_torn_line(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, CONFIG)
    for step in range(1, 6):
        run.log(step, {"train/loss": step / 3, "train/bad": float("nan")}, {"seconds": 0.1})
    with open(run.path / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "train/lo')
    assert [line["step"] for line in run.metrics()] == [1, 2, 3, 4, 5]
    assert run.metrics()[2] == {"step": 3, "train/loss": 1.0, "train/bad": None, "time": {"seconds": 0.1}}
    run.rewind(3)
    assert [line["step"] for line in run.metrics()] == [1, 2, 3]
    run.log(4, {})
    assert [line["step"] for line in run.metrics()] == [1, 2, 3, 4]


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run", CONFIG, writes=False)
    run.log(1, {"train/loss": 1.0})
    run.rewind(0)
    run.finish({})
    assert not run.path.exists()


def test_numbers_reach_tensorboard(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = RunDirectory.create(tmp_path, CONFIG)
    run.log(3, {"train/loss": 0.25})
    run.finish({})
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(3, 0.25)]
