"""Runs and their members are found in the layout of today and in those of earlier versions."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from leafward.engine import Cluster, Experiment, Member, RunDirectory, is_run, members_of
from leafward.errors import DataError, UsageError
from leafward.report import Result

LAYOUTS = {
    "one": ("", []),
    "members": (".", ["members/lorentz-2", "members/lorentz-10", "members/plain-2"]),
    "taxonomy": ("", ["members/euclidean-seed0", "members/lorentz-seed1"]),
    "radial": ("", ["twin"]),
    "hyperclip": (".", ["checkpoints/block-scale-seed-0/training", "checkpoints/lora-seed-0/training"]),
    "lathadapter": (
        ".",
        ["checkpoints/cells/coop-4-shots-seed-0", "checkpoints/cells/teacher/promptsrc-4-shots-seed-0"],
    ),
}
"""Name -> the member in the run itself ("") or none ("."), and the others in their order."""


def made(out: Path, places: list[str]) -> Path:
    for place in ("", *places):
        RunDirectory.create(out / place, {"seed": 0}, overwrite=True)
    return out


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_members_of_a_run_are_found(name: str, tmp_path: Path) -> None:
    own, places = LAYOUTS[name]
    out = made(tmp_path / "run", places)
    (out / "members" / "notes").mkdir(parents=True)
    (out / "checkpoints" / "step-00000004").mkdir()
    expected = [*([out] if own == "" else []), *(out / place for place in places)]
    assert [each.path for each in members_of(out)] == expected


def test_what_is_no_run_has_no_members(tmp_path: Path) -> None:
    assert not is_run(tmp_path)
    assert not is_run(tmp_path / "none")
    with pytest.raises(DataError, match="is not a run directory"):
        members_of(tmp_path)


SETTINGS = ModuleType("settings")
SETTINGS.MAY_CHANGE = ("fails",)  # type: ignore[attr-defined]


class Counting(Experiment[dict]):
    """Two members that need no training."""

    recipe, settings = "counting", SETTINGS

    def arms(self) -> dict[str, dict]:
        return {"a": {"arm": "a"}, "b": {"arm": "b"}}

    def seeds(self) -> list[int]:
        return [3]

    def seeded(self, settings: dict, seed: int) -> dict:
        return settings | {"seed": seed}

    def train(self, member: Member[dict], run: RunDirectory, cluster: Cluster) -> dict:
        if self.config.get("fails") == member.arm:
            raise ValueError("broken")
        member.model.mkdir()
        return {"arm": member.config["arm"]}

    def conclude(self, run: RunDirectory, members: list, results: list) -> Result:
        return Result("Arms", values={"arms": [each["arm"] for each in results]})


def test_members_lie_beside_each_other_and_the_first_model_in_the_run(tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert Counting({}, Cluster()).run(out)["arms"] == ["a", "b"]
    assert [each.path for each in members_of(out)] == [out / "members" / "a-3", out / "members" / "b-3"]
    assert [each.config for each in members_of(out)] == [{"arm": "a", "seed": 3}, {"arm": "b", "seed": 3}]
    assert (out / "model").is_dir()
    assert not (out / "members" / "a-3" / "model").exists()
    assert (out / "members" / "b-3" / "model").is_dir()
    with pytest.raises(UsageError, match="finished run"):
        Counting({}, Cluster()).run(out)


def test_what_is_finished_is_kept_and_what_was_never_begun_leaves_nothing(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(ValueError, match="broken"):
        Counting({"fails": "b"}, Cluster()).run(out)
    assert [path.name for path in (out / "members").iterdir()] == ["a-3"]
    (out / "members" / "a-3" / "result.json").write_text('{"arm": "kept"}')
    assert Counting({"fails": None}, Cluster()).run(out, resume=True)["arms"] == ["kept", "b"]


def test_a_run_that_fails_before_it_has_begun_anything_leaves_no_members(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="broken"):
        Counting({"fails": "a"}, Cluster()).run(tmp_path / "run")
    assert not (tmp_path / "run" / "members").exists()


class WithoutPage(Counting):
    def page(self, run: RunDirectory, found: Result) -> None:
        import a_package_that_is_not_there  # noqa: F401  # pyright: ignore[reportMissingImports]


class BrokenPage(Counting):
    def page(self, run: RunDirectory, found: Result) -> None:
        assert run.finished
        raise ValueError("broken page")


def test_a_page_that_fails_leaves_the_result(tmp_path: Path) -> None:
    (note,) = WithoutPage({}, Cluster()).run(tmp_path / "one")["notes"]
    assert note == "There is no report.html: the package 'a_package_that_is_not_there' is missing."
    assert RunDirectory.open(tmp_path / "one").result()["notes"] == [note]
    with pytest.raises(ValueError, match="broken page"):
        BrokenPage({}, Cluster()).run(tmp_path / "two")
    assert RunDirectory.open(tmp_path / "two").result()["arms"] == ["a", "b"]


@pytest.mark.parametrize("name", ["taxonomy", "radial", "hyperclip", "lathadapter"])
def test_an_unfinished_run_of_an_earlier_version_is_refused(name: str, tmp_path: Path) -> None:
    out = made(tmp_path / "run", LAYOUTS[name][1])
    with pytest.raises(UsageError, match=r"begun by an earlier version .*; start again with --overwrite"):
        Counting({"seed": 0}, Cluster()).run(out, resume=True)


def test_a_first_member_that_trained_in_the_run_itself_is_refused(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", {})
    (run.checkpoints / "step-00000004").mkdir()
    with pytest.raises(UsageError, match="begun by an earlier version"):
        Counting({}, Cluster()).run(run.path, resume=True)


def test_whether_something_is_a_run_is_known_without_torch(tmp_path: Path) -> None:
    code = "import sys; from leafward.engine import is_run, members_of; is_run('.'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
