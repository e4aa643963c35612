"""Variants of a training: the cells of an ablation and of a grid, each a whole run of its own below the sweep's.

A cell has the arms and seeds of its training, so every variant has its twin, and both sides are tuned over the same
grid. A variant whose loss becomes infinite is a finding and does not end the others. What the cells found together is
the business of `engine.sweep_report`.
"""

from __future__ import annotations

import importlib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leafward.config import checked, config_hash, full_name, replace, to_dict
from leafward.engine.distributed import Cluster
from leafward.engine.executor import JobsStopped, run_jobs
from leafward.engine.layout import is_run
from leafward.engine.lock import release, releasing
from leafward.engine.loop import Interrupted
from leafward.engine.nonfinite import NonFiniteError
from leafward.engine.run import CELLS, RESULT, RunDirectory, discard_unbegun
from leafward.engine.sweep_report import result_of, row_of, summarise
from leafward.errors import LeafwardError, UsageError, nearest

if TYPE_CHECKING:
    from leafward.engine.experiment import Experiment, Resume

Changes = Mapping[str, Any]
Ablations = Mapping[str, Mapping[str, Changes]]
"""Name of an ablation -> its variants, each the settings that it changes."""
LONGEST = 200
"""Letters of the name of a folder."""


@dataclass(frozen=True)
class Cell:
    """One variant: what it changes, and the settings of its run."""

    name: str
    changes: Changes
    config: Any


def cells_of(config: Any, ablations: Ablations) -> list[Cell]:
    """The variants that `config.arms` names: those of the ablation, each at every point of the grid. None: one run."""
    arms, kind = config.arms, type(config)
    if arms.ablate is None and not arms.grid:
        return []
    variants: Mapping[str, Changes] = {"": {}}
    if arms.ablate is not None:
        if not ablations:
            raise UsageError(f"arms.ablate must be left out, as this training has no ablations, got {arms.ablate!r}")
        if arms.ablate not in ablations:
            raise UsageError(f"arms.ablate {arms.ablate!r} is not an ablation; {nearest(arms.ablate, ablations)}")
        variants = ablations[arms.ablate]
    single = replace(config, arms={"ablate": None, "grid": (), "jobs": 1, "executor": "local"})
    cells: dict[str, Cell] = {}
    for name, changes in variants.items():
        for point in _points(kind, arms.grid):
            words = [name, *(f"{key.rpartition('.')[2]}={value}" for key, value in point.items())]
            cell = _cell(_file_name(",".join(filter(None, words))), single, changes, point)
            other = cells.setdefault(config_hash(cell.config), cell)
            if other is not cell:
                raise UsageError(f"arms.grid must be without repeats: {other.name} and {cell.name} are the same")
    return list(cells.values())


def _cell(name: str, single: Any, changes: Changes, point: Changes) -> Cell:
    chosen = {full_name(type(single), key): value for key, value in changes.items()} | dict(point)
    try:
        return Cell(name, chosen, replace(single, **chosen))
    except UsageError as error:
        raise UsageError(f"{error} (in the variant {name})") from error


def _points(kind: Any, grid: Sequence[str]) -> Iterator[dict[str, str]]:
    axes: dict[str, list[str]] = {}
    for words in grid:
        name, equals, listed = words.partition("=")
        values = [value.strip() for value in listed.split(",")]
        if not equals or not all(values):
            raise UsageError(f"arms.grid must be NAME=VALUE,VALUE,…, got {words!r}")
        path = full_name(kind, name.strip())
        if path in axes or path.partition(".")[0] == "arms":
            raise UsageError(f"arms.grid must be of settings of one model, each named once, got {words!r}")
        axes[path] = values
    for point in itertools.product(*axes.values()):
        yield dict(zip(axes, point, strict=True))


def _file_name(words: str) -> str:
    """A name that is a folder's on every system, of words that may hold paths."""
    name = re.sub(r"[^\w.,=+-]+", "-", words).lstrip(".")
    return name if len(name) <= LONGEST else f"{name[:LONGEST]}-{config_hash(words)[:8]}"


class Sweep:
    """The cells of `training`, one after the other on all ranks, or several at once in processes of their own."""

    def __init__(self, training: type[Experiment[Any]], config: Any, cells: Sequence[Cell], cluster: Cluster) -> None:
        self.training, self.config, self.cells, self.cluster = training, config, cells, cluster
        self.failed: dict[str, str] = {}
        """Cell -> why it has no result."""
        self.by_jobs = config.arms.jobs > 1 or config.arms.executor == "ray"
        if self.by_jobs and cluster.world > 1:
            raise UsageError(
                "arms.jobs must be 1, and arms.executor local, under torchrun: all ranks train each variant together"
            )

    def run(self, out: str | Path, *, resume: Resume = False, overwrite: bool = False) -> dict[str, Any]:
        """Train what is not finished and put the cells together: what result.json holds.

        Raises `Interrupted` after SIGTERM or SIGINT, once everything is saved; the same call with `resume` goes on.
        """
        out = Path(out)
        self.going_on: Resume = "data-changed" if resume == "data-changed" else True
        with releasing():
            self.cluster.on_main(lambda: self._create(out, bool(resume), overwrite))
            try:
                self._train_in_processes(out) if self.by_jobs else self._train_one_by_one(out)
            except (Interrupted, JobsStopped) as stopped:
                done = sum((out / CELLS / cell.name / RESULT).is_file() for cell in self.cells)
                raise Interrupted(stopped.number, f"{done} of {len(self.cells)} variants", out) from None
            except Exception:
                self.cluster.on_main(lambda: _discard(out))
                raise
            return self.cluster.on_main(lambda: self._finish(RunDirectory.open(out)))

    def _create(self, out: Path, resume: bool, overwrite: bool) -> None:
        from leafward.engine.experiment import may_change

        chosen = {"resume": resume, "overwrite": overwrite, "may_change": may_change(self.training.settings)}
        RunDirectory.create(out, self.config, recipe=self.training.recipe, **chosen)

    def _train_one_by_one(self, out: Path) -> None:
        for cell in self.cells:
            path = out / CELLS / cell.name
            if self.cluster.on_main((path / RESULT).is_file):
                continue
            begun = self.cluster.on_main(lambda path=path: is_run(path))
            try:
                self.training(cell.config, self.cluster).run(path, resume=begun and self.going_on)
            except NonFiniteError as error:
                if self.cluster.world > 1:  # where ranks train apart, the others would not know of it
                    raise
                self.failed[cell.name] = str(error)

    def _train_in_processes(self, out: Path) -> None:
        source = f"{self.training.__module__}:{self.training.__name__}"
        jobs = [
            {
                "training": source,
                "config": to_dict(cell.config),
                "out": str((out / CELLS / cell.name).resolve()),
                "resume": self.going_on,
            }
            for cell in self.cells
        ]
        arms = self.config.arms
        done = run_jobs(train_cell, jobs, out / "checkpoints", executor=arms.executor, workers=arms.jobs)
        for failure in done.failures:
            name = Path(failure.config["out"]).name
            kind, _, said = failure.message.partition(": ")
            if kind.rpartition(".")[2] != NonFiniteError.__name__:
                raise LeafwardError(
                    f"{len(done.failures)} of {len(jobs)} variants failed, and the others are finished; {name}: "
                    f"{said or kind} ({failure.trace})"
                )
            self.failed[name] = said

    def _finish(self, run: RunDirectory) -> dict[str, Any]:
        if len(self.failed) == len(self.cells):
            name, said = next(iter(self.failed.items()))
            raise LeafwardError(f"no variant came to its end; {name}: {said}")
        rows = [
            row_of(cell.name, cell.changes, cell.config, run.path / CELLS / cell.name, self.failed.get(cell.name))
            for cell in self.cells
        ]
        result = summarise(rows)
        run.finish(result)
        result_of(self.training.recipe, result, run).write(run.report)
        return result


def _discard(out: Path) -> None:
    """Remove the directory of a sweep that failed before any variant was begun."""
    release(out)  # the lock is a file of the directory
    discard_unbegun(out)


def train_cell(config: dict[str, Any], directory: Path) -> dict[str, Any]:
    """One variant in a process of its own."""
    module, _, name = config["training"].partition(":")
    training = getattr(importlib.import_module(module), name)
    path = Path(config["out"])
    if not (path / RESULT).is_file():
        settings = checked(training.settings.Config, config["config"])
        training.launch(settings, path, resume=is_run(path) and config["resume"])
    return {"run": str(path)}
