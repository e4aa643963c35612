"""A training that is killed at any file operation and resumed leaves what one leaves that never was, byte for byte."""

from __future__ import annotations

import json
import random
import shutil
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import crashes
import golden_cases as golden
import golden_data
import pytest

from ranks import finish, launch

SHORT = {"loop.steps": 3, "loop.checkpoint_every": 1, "loop.eval_every": 2}
CASES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "one model": ("vision", golden.CLASSIFY | SHORT | {"model": "test_convnext"}),
    "members together": ("helm", golden.HELM | SHORT | {"twin": True}),
    "members apart": ("taxonomy", golden.NODES | {"twin": True, "epochs": 3}),
    "many members": ("lathadapter", golden.CACHED | {"hosts": ["promptkd"], "max_steps": 2}),
}
PARTS = 8
SAMPLE = 2


@dataclass(frozen=True)
class Whole:
    """A run that was never killed: what it left, its operations, and its photographs by the number of the first.

    All others lie at the same place after it, so that whole paths in them are the same.
    """

    folder: Path
    given: crashes.Given
    left: Mapping[str, Any] = field(repr=False)
    operations: list[tuple[str, int]] = field(repr=False)

    @property
    def out(self) -> Path:
        return self.folder / "run"

    def photograph(self, number: int) -> Path:
        return self.folder / "photographs" / str(self.operations[number][1])

    def wrong(self) -> list[str]:
        """What differs, once the run has gone on to its end; then it is removed."""
        (status,) = finish(launch(crashes.alone, crashes.train, self.out, self.given))
        if status and not _is_done(self.out):
            return [f"status {status}"]
        found = crashes.left(self.out)
        shutil.rmtree(self.out)
        names = sorted(found.keys() | self.left.keys())
        return [name for name in names if found.get(name, ...) != self.left.get(name, ...)]


def _is_done(out: Path) -> bool:
    """Whether the run was killed after its last file: then there is nothing to go on with."""
    return all((out / name).is_file() for name in ("result.json", "report.html"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Whole]:
    data, made = golden_data.make_all(tmp_path_factory.mktemp("data")), {}

    def make(name: str) -> Whole:
        if name not in made:
            folder, system, settings = tmp_path_factory.mktemp("whole"), *CASES[name]
            given, photographs = (system, settings, data), folder / "photographs"
            photographs.mkdir()
            child = launch(crashes.alone, crashes.train_photographed, photographs, folder / "run", given)
            assert finish(child) == [0]
            operations = json.loads((photographs / "operations.json").read_text(encoding="utf-8"))
            made[name] = Whole(folder, given, crashes.left(folder / "run"), [tuple(each) for each in operations])
            shutil.rmtree(folder / "run")
        return made[name]

    return make


@pytest.mark.parametrize("case", CASES)
def test_some_kills(case: str, whole: Callable[[str], Whole]) -> None:
    run = whole(case)
    for number in random.Random(case).sample(range(2, len(run.operations)), SAMPLE):
        operation = run.operations[number][0]
        killed = launch(crashes.alone, crashes.train_until, number, run.out, run.given)
        assert finish(killed) == [-signal.SIGKILL], operation
        assert crashes.left(run.out) == crashes.left(run.photograph(number)), f"the photograph at {operation}"
        assert run.wrong() == [], operation


@pytest.mark.full
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("case", CASES)
def test_every_kill(case: str, part: int, whole: Callable[[str], Whole]) -> None:
    run = whole(case)
    wrong: dict[str, list[str]] = {}
    for state in sorted({state for _, state in run.operations})[part::PARTS]:
        shutil.rmtree(run.out, ignore_errors=True)
        shutil.copytree(run.photograph(state), run.out)
        found = run.wrong()
        if found:
            wrong[f"{state} {run.operations[state][0]}"] = found
    assert wrong == {}
