"""`leafward train hyperclip`: an adapter of CLIP, or every method under one budget."""

from __future__ import annotations

from typing import Any

from leafward.engine import Cluster, Experiment, Member, RunDirectory
from leafward.engine.experiment import alone
from leafward.report import Result
from leafward.systems.hyperclip import config as settings
from leafward.systems.hyperclip import methods, report
from leafward.systems.hyperclip.config import Config


class Training(Experiment[Config]):
    """The methods, each with every seed.

    What the chosen method learned with the first seed goes to `out`/adapter, or, where weights of the model itself
    were trained, to `out`/model.
    """

    recipe, settings, leftovers = "hyperclip", settings, (methods.ADAPTER,)

    def __init__(self, config: Config, cluster: Cluster) -> None:
        super().__init__(config, cluster)
        self.data = {seed: methods.read(alone(self.config, seed)) for seed in self.seeds()}

    def arms(self) -> dict[str, Config]:
        return methods.arms_of(self.config)

    def kept(self) -> str:
        return self.config.adapt.arm

    def train(self, member: Member[Config], run: RunDirectory, cluster: Cluster) -> dict[str, Any]:
        home = member.home if member.kept else None
        return methods.train(member.config, self.data[member.seed], run, cluster, home)

    def conclude(self, run: RunDirectory, members: list[Member[Config]], results: list[dict[str, Any]]) -> Result:
        return report.result(self.config, self.data[self.config.loop.seed], results)


run = Training.launch
