"""`leafward train hyperclip`: an adapter of CLIP, or every method under one budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from leafward.config import checked, replace
from leafward.engine import Cluster, Experiment, Member, RunDirectory, session
from leafward.engine.experiment import alone
from leafward.files import read_record
from leafward.systems.hyperclip import methods
from leafward.systems.hyperclip.config import MAY_CHANGE, Config, check
from leafward.systems.hyperclip.report import page, summarise


class Training(Experiment[Config]):
    """The methods, each with every seed."""

    recipe, may_change, leftovers = "hyperclip", MAY_CHANGE, (methods.ADAPTER,)

    def __init__(self, config: Config, cluster: Cluster) -> None:
        super().__init__(config, cluster)
        self.data = {seed: methods.read(alone(config, seed)) for seed in self.seeds()}

    def arms(self) -> dict[str, Config]:
        chosen: Any = {each.arm: {"method": each.name, "score": each.score} for each in methods.methods(self.config)}
        return {arm: replace(self.config, **settings) for arm, settings in chosen.items()}

    def seeds(self) -> range:
        return range(self.config.seed, self.config.seed + self.config.seeds)

    def kept(self) -> str:
        return methods.Method(self.config.method, self.config.score).arm

    def train(self, member: Member[Config], run: RunDirectory, cluster: Cluster) -> dict[str, Any]:
        home = member.home if member.kept else None
        return methods.train(member.config, self.data[member.seed], run, cluster, home)

    def conclude(
        self, run: RunDirectory, members: list[Member[Config]], results: list[dict[str, Any]]
    ) -> dict[str, Any]:
        return summarise(self.config, self.data[self.config.seed], results)

    def page(self, run: RunDirectory, members: list[Member[Config]], result: dict[str, Any]) -> None:
        page(self.config, result, read_record(run.path / "env.json")).write(run.report)


def run(config: Config, out: Path, *, resume: bool = False, overwrite: bool = False) -> dict[str, Any]:
    """Train one method, or all of them, with every seed in the run directory `out`.

    What the chosen method learned with the first seed goes to `out`/adapter, or, where weights of the model itself
    were trained, to `out`/model. Trainings that are done are kept: a run that was stopped continues with `resume`.
    """
    config = checked(Config, config)
    check(config)
    with session(config.device) as cluster:
        return Training(config, cluster).run(out, resume=resume, overwrite=overwrite)
