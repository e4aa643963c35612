"""The one lifecycle of a training: arms × seeds (× cells), in one run directory, on one rank or many.

A system derives from `Experiment` and says what is trained, how, and what the run then found; the rest happens here.
The first rank makes the run directory and those of the members, and nobody else does. What is finished is not trained
again, what was begun goes on. A member is trained, published and scored; of all of them together `result.json` is
written first and the page after it, so that nothing that the page needs can lose the result.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Generic, Literal, TypeVar

import torch
import torch.distributed as dist

from leafward.config import checked, lasting, places, replace, to_dict
from leafward.engine import inputs as read
from leafward.engine.bookkeeping import Signals
from leafward.engine.config import MAY_CHANGE, ONE_ARM
from leafward.engine.distributed import Cluster, session
from leafward.engine.layout import begun_otherwise, is_run
from leafward.engine.lock import release, releasing
from leafward.engine.run import MEMBERS, MODEL, RESULT, RunDirectory, discard_unbegun
from leafward.errors import LeafwardError, UsageError
from leafward.report.result import Result

C = TypeVar("C")
T = TypeVar("T")
Resume = bool | Literal["data-changed"]
"""Whether a run goes on; "data-changed": also where the data are not those that it was started with."""


@dataclass(frozen=True)
class Member(Generic[C]):
    """One model of a run: its settings, its run directory, and its `home`, the folder that holds what is published of
    it: the run directory for the member that the run is named for, and its own for every other."""

    arm: str
    seed: int
    config: C
    path: Path
    home: Path
    alone: bool

    @property
    def name(self) -> str:
        return f"{self.arm}-{self.seed}"

    @property
    def model(self) -> Path:
        return self.home / MODEL

    @property
    def kept(self) -> bool:
        """Whether the run directory gets what is published of this member."""
        return self.alone or self.home != self.path

    def earlier_result(self) -> dict[str, Any] | None:
        """What an earlier attempt at the whole run found, if it came to the end of this member."""
        if self.alone or not (self.path / RESULT).is_file():
            return None
        return RunDirectory.open(self.path).result()


class Experiment(Generic[C]):
    """A training with all its members. A system overrides `train`, `conclude` and `page`, and what else differs.

    `run` is called on every rank; so are `prepare` and `train`. `conclude` and `page` run on the first.
    """

    recipe: ClassVar[str] = ""
    """What later commands know the run by."""
    settings: ClassVar[ModuleType]
    """The module of its settings: `Config`, and where there are any `check`, `MAY_CHANGE` and `ABLATIONS`."""
    member_recipe: ClassVar[str | None] = None
    """The same of the members, where their settings are not those of the run."""
    leftovers: ClassVar[Sequence[str]] = ()
    """Files and folders of the system's own, which go when a run is replaced."""
    kind: ClassVar[type[RunDirectory]] = RunDirectory
    apart: ClassVar[bool] = False
    """Each member is trained by one rank alone, and the ranks share the members: for small trainings, and for losses
    that do not split over a batch. Otherwise all ranks train each member together."""

    def __init__(self, config: Any, cluster: Cluster) -> None:
        self.config, self.cluster = lasting(config), cluster  # whole paths: the run is opened from anywhere
        self.may_change = may_change(self.settings)
        self.out = Path()
        self.fresh = self.data_changed = False

    @classmethod
    def launch(cls, config: Any, out: str | Path, *, resume: Resume = False, overwrite: bool = False) -> dict[str, Any]:
        """Train, publish and score in the run directory `out`; returns what result.json holds.

        Start it with torchrun for several ranks. Raises `engine.Interrupted` after SIGTERM or SIGINT, once everything
        is saved; the same call with `resume` goes on from there. What `arms.ablate` and `arms.grid` name is trained in
        runs of their own below `out`.
        """
        from leafward.engine.sweep import Sweep, cells_of

        config = checked(cls.settings.Config, config)
        if hasattr(cls.settings, "check"):
            cls.settings.check(config)
        cells = cells_of(config, getattr(cls.settings, "ABLATIONS", {}))
        with session(config.loop.device, config.loop.timeout) as cluster:
            made = Sweep(cls, config, cells, cluster) if cells else cls(config, cluster)
            return made.run(out, resume=resume, overwrite=overwrite)

    def arms(self) -> Mapping[str, C]:
        """What is compared, the arm that the run is named for first, as settings of one model each."""
        raise NotImplementedError

    def seeds(self) -> Sequence[int]:
        first = self.config.loop.seed
        return range(first, first + self.config.arms.seeds)

    def seeded(self, settings: C, seed: int) -> C:
        """The settings of one member."""
        return alone(settings, seed)

    def kept(self) -> str | None:
        """The arm whose first model is published in the run directory; None: every member keeps its own."""
        return next(iter(self.arms()))

    def needed(self, member: Member[C]) -> bool:
        """Whether other members are trained with the help of this one, so that it comes before them."""
        return False

    def inputs(self) -> Mapping[str, Path]:
        """The files and folders that the run reads, by setting; going on with others is refused."""
        return places(self.config)

    def prepare(self, run: RunDirectory) -> None:
        """What is done once, on every rank, between the making of the run directory and the first training."""

    def train(self, member: Member[C], run: RunDirectory, cluster: Cluster) -> dict[str, Any]:
        """Train one member in `run`, publish it in its home and score it; JSON, the same on every rank of `cluster`."""
        raise NotImplementedError

    def conclude(self, run: RunDirectory, members: list[Member[C]], results: list[dict[str, Any]]) -> Result:
        """What the run found, from the results of all members: result.json and report.html are made of it."""
        raise NotImplementedError

    def page(self, run: RunDirectory, found: Result) -> None:
        """Write report.html."""
        found.write(run.report)

    def plan(self, out: Path) -> list[Member[C]]:
        """A member for each arm and seed, in their order."""
        arms, seeds = self.arms(), self.seeds()
        single = len(arms) * len(seeds) == 1
        kept = None if single else self.kept()
        members: list[Member[C]] = []
        for arm, settings in arms.items():
            for seed in seeds:
                path = out if single else out / MEMBERS / f"{arm}-{seed}"
                home = out if (arm, seed) == (kept, seeds[0]) else path
                members.append(Member(arm, seed, self.seeded(settings, seed), path, home, single))
        return members

    def run(self, out: str | Path, *, resume: Resume = False, overwrite: bool = False) -> dict[str, Any]:
        """Train every member in the run directory `out` and put their results together: what result.json holds.

        Raises `Interrupted` after SIGTERM or SIGINT, once everything is saved; the same call with `resume` goes on.
        """
        out = Path(out)
        self.data_changed, resume = resume == "data-changed", bool(resume)
        self.out, self.fresh = out, not (out.is_dir() and any(out.iterdir()))
        members = self.plan(out)
        with releasing():  # the locks of the run and of its members, which the first rank takes
            whole = self._create(out, resume, overwrite, several=not (members and members[0].alone))
            self.prepare(whole)
            results = self._train_all(members, whole)
            return self.on_main(lambda: self._finish(whole, members, results))

    def on_main(self, action: Callable[[], T]) -> T:
        """Run `action` on rank 0, however long it takes, and give its value, or its failure, to all."""
        return self._together(action if self.cluster.main else None)[0]

    def _together(self, action: Callable[[], Any] | None) -> list[Any]:
        """What `action` gave on each rank (None: nothing is done there); a failure of one rank reaches all."""
        if self.cluster.world == 1:
            return [action() if action is not None else None]
        failure: Exception | None = None
        value: Any = None
        if action is not None:
            try:
                value = action()
            except Exception as error:
                failure = error
        told = None if failure is None else (f"{type(failure).__name__}: {failure}", getattr(failure, "exit_code", 1))
        outcomes: list[Any] = [None] * self.cluster.world
        with Signals():  # whoever waits lets those that train save what they have
            dist.all_gather_object(outcomes, (value, told), group=self.cluster.patient)
        if failure is not None:
            raise failure
        for rank, (_, error) in enumerate(outcomes):
            if error is not None:
                raise _failed_elsewhere(rank, *error)
        return [value for value, _ in outcomes]

    def _create(self, out: Path, resume: bool, overwrite: bool, several: bool) -> RunDirectory:
        """The run directory, made by the first rank for all."""

        def create() -> None:
            unfinished = is_run(out) and not (out / RESULT).is_file()
            if resume and unfinished and begun_otherwise(out, several):
                raise UsageError(
                    f"{out} was begun by an earlier version of leafward, which kept its models in other places, so it "
                    "cannot be resumed; start again with --overwrite, or give another path"
                )
            found = self.inputs()
            if resume and is_run(out) and not self.data_changed:
                read.compare(out, found)
            chosen = {"resume": resume, "overwrite": overwrite, "may_change": self.may_change}
            RunDirectory.create(out, self.config, recipe=self.recipe, **chosen)
            read.note(out, found, self.data_changed)
            for name in self.leftovers if overwrite else ():
                _remove(out / name)

        self.on_main(create)
        return self.kind(out, to_dict(self.config), self.may_change, writes=self.cluster.main)

    def _train_all(self, members: list[Member[C]], whole: RunDirectory) -> list[dict[str, Any]]:
        """The result of each member: what an earlier attempt found, else what its training gives."""
        earlier = self.on_main(lambda: {each.name: each.earlier_result() for each in members})
        found = {name: result for name, result in earlier.items() if result is not None}
        todo = [each for each in members if each.name not in found]
        fresh = self.on_main(lambda: self._create_members(todo))
        try:
            for stage in (True, False):
                now = [each for each in todo if self.needed(each) == stage]
                found |= self._train_apart(now, whole) if self.apart else self._train_one_by_one(now, whole)
        except Exception:
            if self.cluster.main:  # a member that was never begun leaves nothing
                _discard(fresh)
            raise
        return [found[each.name] for each in members]

    def _create_members(self, members: list[Member[C]]) -> list[Path]:
        """The run directories of members; those that were not there before are returned."""
        recipe = self.recipe if self.member_recipe is None else self.member_recipe
        fresh = []
        for each in (each for each in members if not each.alone):
            begun = is_run(each.path)
            RunDirectory.create(each.path, each.config, resume=begun, may_change=self.may_change, recipe=recipe)
            fresh += [] if begun else [each.path]
        return fresh

    def _train_one_by_one(self, members: list[Member[C]], whole: RunDirectory) -> dict[str, dict[str, Any]]:
        """All ranks train each member together."""
        return {each.name: self._train_one(each, whole, self.cluster) for each in members}

    def _train_apart(self, members: list[Member[C]], whole: RunDirectory) -> dict[str, dict[str, Any]]:
        """Each rank trains some of the members alone."""
        cluster = self.cluster
        mine = members[cluster.rank :: cluster.world]
        single = Cluster(device=cluster.device)
        shares = self._together(lambda: {each.name: self._train_one(each, whole, single) for each in mine})
        return {name: result for share in shares for name, result in share.items()}

    def _train_one(self, member: Member[C], whole: RunDirectory, cluster: Cluster) -> dict[str, Any]:
        run = whole
        if not member.alone:
            run = self.kind(member.path, to_dict(member.config), self.may_change, writes=cluster.main)
        if getattr(getattr(member.config, "loop", None), "compile", False):
            torch._dynamo.reset()  # every member compiles the same code anew, and only a few versions are allowed
        torch.manual_seed(member.seed)
        result = self.train(member, run, cluster)
        if not member.alone:
            run.finish(result)
        return result

    def _finish(self, run: RunDirectory, members: list[Member[C]], results: list[dict[str, Any]]) -> dict[str, Any]:
        """Put the members together; result.json first, then the page."""
        if members and not members[0].alone:
            run.rewind(0)  # an earlier attempt may have come this far
            for step, values in merged(curves(members)).items():
                run.log(step, values)
        found = self.conclude(run, members, results)
        found.run = run.path
        run.finish(found.to_json())
        try:
            self.page(run, found)
        except ImportError as error:
            found.notes.append(f"There is no report.html: the package {error.name!r} is missing.")
            run.finish(found.to_json())
        return found.to_json()


def may_change(settings: ModuleType) -> tuple[str, ...]:
    """The settings that a resumed run of a training may change."""
    return (*MAY_CHANGE, *getattr(settings, "MAY_CHANGE", ()))


def alone(settings: Any, seed: int) -> Any:
    """Settings of one model with this seed: without twin, comparison and more seeds."""
    return replace(settings, arms=to_dict(type(settings.arms)()) | to_dict(ONE_ARM), loop={"seed": seed})


def by_geometry(config: Any) -> dict[str, Any]:
    """The arms of a comparison of geometries: that of `config` and, with its twin, the other one."""
    other = "euclidean" if config.geometry == "lorentz" else "lorentz"
    return {name: replace(config, geometry=name) for name in (config.geometry, *([other] if config.arms.twin else []))}


def batch_of(wanted: int, samples: int, cluster: Cluster) -> int:
    """A batch of as many samples as wanted; of fewer samples than that, all of them, and on several ranks as many
    again from the next pass as make it split evenly."""
    return wanted if wanted <= samples else math.ceil(samples / cluster.world) * cluster.world


def curves(members: Sequence[Member[Any]]) -> dict[str, list[dict[str, Any]]]:
    """The metrics of every member, by its name."""
    return {each.name: RunDirectory.open(each.path).metrics() for each in members}


def merged(records: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[int, dict[str, float]]:
    """The metrics of all members by step, their names with the member's in front."""
    steps: dict[int, dict[str, float]] = {}
    for member, lines in records.items():
        for line in lines:
            values = {f"{member}/{key}": value for key, value in line.items() if key not in ("step", "time")}
            steps.setdefault(line["step"], {}).update(values)
    return dict(sorted(steps.items()))


def _failed_elsewhere(rank: int, told: str, exit_code: int) -> LeafwardError:
    error = LeafwardError(f"rank {rank} failed: {told}")
    error.exit_code = exit_code  # type: ignore[attr-defined]
    return error


def _discard(paths: Sequence[Path]) -> None:
    """Remove the directories of members that were made and never begun, and their folder where it is left empty."""
    for path in paths:
        release(path)  # the lock is a file of the directory
        discard_unbegun(path)
    for folder in {path.parent for path in paths}:
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
