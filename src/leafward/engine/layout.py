"""Where a run keeps its models: one layout, and those of earlier versions, which are read and no longer written.

A single model trains in the run directory itself. Several train in `members/ARM-SEED`, each a run directory of its own.
Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from leafward.engine.run import CHECKPOINTS, CONFIG, MEMBERS, RunDirectory

EARLIER_SEED = "-seed"
"""In the name of a member of an earlier version, whose first model lay in the run itself."""
EARLIER_TWIN = "twin"
EARLIER_CELLS = f"{CHECKPOINTS}/cells"
EARLIER_TRAININGS = (f"{CHECKPOINTS}/*/training", f"{EARLIER_CELLS}/*", f"{EARLIER_CELLS}/teacher/*")
EARLIER_SCORES = f"{CHECKPOINTS}/*/scores.json"
"""What was trained, or measured without a training, one after the other by earlier versions."""


def is_run(path: str | Path) -> bool:
    """Whether `path` is a run directory: it holds the configuration of a run."""
    return (Path(path) / CONFIG).is_file()


def members_of(path: str | Path) -> list[RunDirectory]:
    """The run directories of the models of a run, in order of arm and seed; of a single model the run itself.

    Runs of earlier versions are read as they are: their first model may lie in the run itself, beside the others.
    """
    path = Path(path)
    whole = RunDirectory.open(path)
    members = _runs(path, [f"{MEMBERS}/*"])
    beside = [each for each in members if EARLIER_SEED in each.path.name] + _runs(path, [EARLIER_TWIN])
    if beside:
        return [whole, *beside]
    return members or _runs(path, EARLIER_TRAININGS) or [whole]


def begun_otherwise(path: str | Path, several: bool) -> bool:
    """Whether an earlier version began the run and laid out what it trained in another way; `several`: whether the run
    has several models."""
    path = Path(path)
    patterns = [f"{MEMBERS}/*{EARLIER_SEED}*", EARLIER_TWIN, *EARLIER_TRAININGS, EARLIER_SCORES]
    patterns += [f"{CHECKPOINTS}/step-*"] if several else []
    return any(next(path.glob(pattern), None) is not None for pattern in patterns)


def _runs(path: Path, patterns: Iterable[str]) -> list[RunDirectory]:
    found = {each for pattern in patterns for each in path.glob(pattern) if is_run(each)}
    return [RunDirectory.open(each) for each in sorted(found, key=_order)]


def _order(path: Path) -> tuple[str, int, str]:
    """By arm, then by the number of the seed."""
    arm, _, seed = path.name.rpartition("-")
    return (arm, int(seed), str(path)) if seed.isdecimal() else (path.name, -1, str(path))
