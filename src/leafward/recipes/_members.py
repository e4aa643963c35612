"""Runs of several models: the arms of a comparison (both geometries, say) and several seeds of each.

A single model trains in the run directory itself. Several train in `members/ARM-SEED`, each a run directory of its own;
the model of the first is published in the run directory's `model` either way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from leafward.engine import Cluster, RunDirectory, to_dict
from leafward.engine.run import CONFIG, MEMBERS, MODEL, RESULT
from leafward.report import Number

C = TypeVar("C")
Run = TypeVar("Run", bound=RunDirectory)


@dataclass(frozen=True)
class Member(Generic[C]):
    """One model of a run: its settings, its run directory, and where its model is published."""

    arm: str
    config: C
    path: Path
    model: Path
    alone: bool

    @property
    def name(self) -> str:
        return f"{self.arm}-{self.config.loop.seed}"  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def begun(self) -> bool:
        return (self.path / CONFIG).is_file()

    def earlier_result(self) -> dict[str, Any] | None:
        """What an earlier attempt at the whole run found, if it came to the end of this member."""
        if self.alone or not (self.path / RESULT).is_file():
            return None
        return RunDirectory.open(self.path).result()


def by_geometry(config: Any) -> dict[str, Any]:
    """The arms of a comparison of geometries: that of `config` and, with `twin`, the other one."""
    other = "euclidean" if config.geometry == "lorentz" else "lorentz"
    return {name: replace(config, geometry=name) for name in (config.geometry, *([other] if config.twin else []))}


def plan(config: Any, arms: Mapping[str, Any], out: Path) -> list[Member[Any]]:
    """A member for each arm and seed, the one that gives the run its model first."""
    seeds = range(config.loop.seed, config.loop.seed + config.seeds)
    alone = len(arms) * len(seeds) == 1
    members: list[Member[Any]] = []
    for arm, settings in arms.items():
        for seed in seeds:
            own = replace(settings, twin=False, seeds=1, loop=replace(config.loop, seed=seed))
            path = out if alone else out / MEMBERS / f"{arm}-{seed}"
            members.append(Member(arm, own, path, path / MODEL if members else out / MODEL, alone))
    return members


def train_members(
    members: Iterable[Member[Any]],
    run: Run,
    create: Callable[..., Run],
    train: Callable[[Member[Any], Run], dict[str, Any]],
) -> list[dict[str, Any]]:
    """The result of each member in turn: what an earlier attempt found, else that of `train`, given the member and its
    run directory, which is `run` for a member alone and else comes from `create`."""
    results = []
    for member in members:
        if (result := member.earlier_result()) is None:
            config = member.config
            own = run if member.alone else create(member.path, config, resume=member.begun, overwrite=False)
            if config.loop.compile:
                torch._dynamo.reset()  # every member compiles the same code anew, and only a few versions are allowed
            torch.manual_seed(config.loop.seed)
            result = train(member, own)
        results.append(result)
    return results


def create_run(
    kind: type[Run],
    cluster: Cluster,
    path: Path,
    config: Any,
    *,
    recipe: str,
    may_change: Iterable[str],
    resume: bool,
    overwrite: bool,
    leftovers: Iterable[str] = (),
) -> Run:
    """The run directory on every rank; only the first writes. `leftovers` are files of the recipe's own to clear."""

    def create() -> None:
        RunDirectory.create(path, config, resume=resume, overwrite=overwrite, may_change=may_change, recipe=recipe)
        for name in leftovers if overwrite else ():
            (path / name).unlink(missing_ok=True)

    cluster.on_main(create)
    return kind(path, to_dict(config), may_change, writes=cluster.main)


def finish(run: RunDirectory, result: dict[str, Any], write_page: Callable[[], None]) -> dict[str, Any]:
    """Write result.json, then report.html, so that nothing the page needs can lose the result."""
    run.finish(result)
    try:
        write_page()
    except ImportError as error:
        result["notes"].append(f"There is no report.html: the package {error.name!r} is missing.")
        run.finish(result)
    return result


def with_twins_named(numbers: Iterable[Number], geometry: str | None) -> list[Number]:
    """`numbers` of models of `geometry`, the twin called what it is: flat where ours is curved, and the other way."""
    name = "Lorentz twin" if geometry == "euclidean" else "Euclidean twin"
    return [replace(number, twin_name=name) for number in numbers]
