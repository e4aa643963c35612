"""Variants of a training: the cells of an ablation and of a grid, each a whole run of its own below the sweep's.

A cell has the arms and seeds of its training, so every variant has its twin, and both sides are tuned over the same
grid. The sweep's `result.json` has a row for each cell, the best of each side, and says so where a best value lies at
the edge of its grid: a better one may lie beyond.
"""

from __future__ import annotations

import importlib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leafward.config import checked, flatten, full_name, replace, to_dict
from leafward.engine.distributed import Cluster
from leafward.engine.executor import run_jobs
from leafward.engine.layout import is_run
from leafward.engine.lock import releasing
from leafward.engine.run import CELLS, RESULT, RunDirectory
from leafward.errors import LeafwardError, UsageError, nearest

if TYPE_CHECKING:
    from leafward.engine.experiment import Experiment

Changes = Mapping[str, Any]
Ablations = Mapping[str, Mapping[str, Changes]]
"""Name of an ablation -> its variants, each the settings that it changes."""


@dataclass(frozen=True)
class Cell:
    """One variant: what it changes, and the settings of its run."""

    name: str
    changes: Changes
    config: Any


def cells_of(config: Any, ablations: Ablations) -> list[Cell]:
    """The variants that `config.arms` names: those of the ablation, each at every point of the grid. None: one run."""
    arms = config.arms
    if arms.ablate is None and not arms.grid:
        return []
    variants: Mapping[str, Changes] = {"": {}}
    if arms.ablate is not None:
        if arms.ablate not in ablations:
            raise UsageError(f"arms.ablate {arms.ablate!r} is not an ablation; {nearest(arms.ablate, ablations)}")
        variants = ablations[arms.ablate]
    single = replace(config, arms={"ablate": None, "grid": (), "jobs": 1, "executor": "local"})
    cells = []
    for name, changes in variants.items():
        for point in _points(type(config), arms.grid):
            chosen = {full_name(type(config), key): value for key, value in changes.items()} | point
            words = [name, *(f"{key.rpartition('.')[2]}={value}" for key, value in point.items())]
            cells.append(Cell(_file_name(" ".join(filter(None, words))), chosen, replace(single, **chosen)))
    names = [cell.name for cell in cells]
    if len(set(names)) < len(names):
        raise UsageError("arms.grid must be without repeats")
    return cells


def _points(kind: Any, grid: Sequence[str]) -> Iterator[dict[str, str]]:
    axes: dict[str, list[str]] = {}
    for words in grid:
        name, equals, values = words.partition("=")
        if not equals or not all(values.split(",")):
            raise UsageError(f"arms.grid must be NAME=VALUE,VALUE,…, got {words!r}")
        axes[full_name(kind, name)] = values.split(",")
    for point in itertools.product(*axes.values()):
        yield dict(zip(axes, point, strict=True))


def _file_name(words: str) -> str:
    return re.sub(r"[^\w.=+-]+", "-", words)


class Sweep:
    """The cells of `training`, one after the other on all ranks, or several at once in processes of their own."""

    def __init__(self, training: type[Experiment[Any]], config: Any, cells: Sequence[Cell], cluster: Cluster) -> None:
        self.training, self.config, self.cells, self.cluster = training, config, cells, cluster
        if config.arms.jobs > 1 and cluster.world > 1:
            raise UsageError("arms.jobs must be 1 under torchrun, where all ranks train each variant together")

    def run(self, out: str | Path, *, resume: bool = False, overwrite: bool = False) -> dict[str, Any]:
        """Train what is not finished and put the cells together: what result.json holds."""
        out = Path(out)
        with releasing():
            self.cluster.on_main(lambda: self._create(out, resume, overwrite))
            if self.config.arms.jobs > 1:
                self._train_in_processes(out)
            else:
                for cell in self.cells:
                    self._train(cell, out / CELLS / cell.name)
            return self.cluster.on_main(lambda: self._finish(RunDirectory.open(out)))

    def _create(self, out: Path, resume: bool, overwrite: bool) -> None:
        from leafward.engine.experiment import may_change

        chosen = {"resume": resume, "overwrite": overwrite, "may_change": may_change(self.training.settings)}
        RunDirectory.create(out, self.config, recipe=self.training.recipe, **chosen)

    def _train(self, cell: Cell, path: Path) -> None:
        if not self.cluster.on_main((path / RESULT).is_file):
            begun = self.cluster.on_main(lambda: is_run(path))
            self.training(cell.config, self.cluster).run(path, resume=begun)

    def _train_in_processes(self, out: Path) -> None:
        source = f"{self.training.__module__}:{self.training.__name__}"
        jobs = [
            {"training": source, "config": to_dict(cell.config), "out": str((out / CELLS / cell.name).resolve())}
            for cell in self.cells
        ]
        arms = self.config.arms
        done = run_jobs(train_cell, jobs, out / "checkpoints", executor=arms.executor, workers=arms.jobs)
        if done.failures:
            first = done.failures[0]
            raise LeafwardError(
                f"{len(done.failures)} of {len(jobs)} variants failed; the first, {Path(first.config['out']).name}: "
                f"{first.message} ({first.trace})"
            )

    def _finish(self, run: RunDirectory) -> dict[str, Any]:
        rows = [_row(cell, run.path / CELLS / cell.name) for cell in self.cells]
        result = summarise(rows)
        run.finish(result)
        page(self.training.recipe, rows, result, run)
        return result


def train_cell(config: dict[str, Any], directory: Path) -> dict[str, Any]:
    """One variant in a process of its own."""
    module, _, name = config["training"].partition(":")
    training = getattr(importlib.import_module(module), name)
    path = Path(config["out"])
    if not (path / RESULT).is_file():
        training.launch(checked(training.settings.Config, config["config"]), path, resume=is_run(path))
    return {"run": str(path)}


def _row(cell: Cell, path: Path) -> dict[str, Any]:
    found = RunDirectory.open(path).result()
    settings = {key: value for key, value in flatten(cell.config).items() if key in cell.changes}
    return {"cell": cell.name, "settings": settings, "run": f"{CELLS}/{cell.name}", "headline": found["headline"]}


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The rows, the best of each side by its first headline number, and a note for every best value at an edge."""
    result: dict[str, Any] = {"cells": rows, "best": {}, "headline": [], "notes": []}
    for side in ("value", "twin"):
        best = best_of(rows, side)
        if best is None:
            continue
        number = best["headline"][0]
        result["best"][side] = {"cell": best["cell"], "name": number["name"], "value": number[side]}
        result["notes"] += [
            f"{number.get('twin_name', 'twin')}: {note}" if side == "twin" else note for note in edges(rows, best)
        ]
        if side == "value":
            result["headline"] = best["headline"]
    if "twin" in result["best"] and result["best"]["twin"]["cell"] != result["best"]["value"]["cell"]:
        own = {
            "twin": result["best"]["twin"]["value"],
            "note": f"each side at its best: {result['best']['value']['cell']}"
            f", its twin {result['best']['twin']['cell']}",
            "twin_interval": None,
        }
        result["headline"] = [result["headline"][0] | own]
    return result


def best_of(rows: Sequence[dict[str, Any]], side: str) -> dict[str, Any] | None:
    """The cell with the best first headline number of a side; None where it has none, or no direction is better."""
    scored = [row for row in rows if row["headline"] and row["headline"][0].get(side) is not None]
    if not scored or scored[0]["headline"][0].get("better") is None:
        return None
    pick = max if scored[0]["headline"][0]["better"] == "higher" else min
    return pick(scored, key=lambda row: row["headline"][0][side])


def edges(rows: Sequence[dict[str, Any]], best: dict[str, Any]) -> list[str]:
    """The settings of `best` that lie at an end of what was tried of them, in words."""
    notes = []
    for key, value in best["settings"].items():
        tried = {row["settings"].get(key) for row in rows}
        numbers = sorted(each for each in tried if isinstance(each, int | float) and not isinstance(each, bool))
        if len(numbers) > 1 and value in (numbers[0], numbers[-1]):
            notes.append(f"{key} = {value:g} is the best tried and lies at the edge of the grid: better may lie beyond")
    return notes


def page(recipe: str, rows: Sequence[dict[str, Any]], result: Mapping[str, Any], run: RunDirectory) -> None:
    """report.html: a row for each cell."""
    from leafward.engine.evaluation import how_it_was_run
    from leafward.report import Estimate, Number, Page

    made = Page(
        f"{recipe}: {len(rows)} variants", subtitle=", ".join(sorted({key for row in rows for key in row["settings"]}))
    )
    for note in result["notes"]:
        made.note(note)
    if result["headline"]:
        made.headline([Number.from_json(each) for each in result["headline"]])
    names = list(dict.fromkeys(number["name"] for row in rows for number in row["headline"]))
    twins = any(number.get("twin") is not None for row in rows for number in row["headline"][:1])
    columns = ["variant", *names[:4], *([f"{names[0]}, twin"] if twins else []), "run"]
    cells = []
    for row in rows:
        numbers = {each["name"]: Number.from_json(each) for each in row["headline"]}
        found = [numbers[name].estimate if name in numbers else None for name in names[:4]]
        twin = [numbers[names[0]].twin_estimate or Estimate(None)] if twins else []
        cells.append([row["cell"], *found, *twin, row["run"]])
    made.section("Variants")
    made.table(columns, cells)
    how_it_was_run(made)
    made.write(run.report)
