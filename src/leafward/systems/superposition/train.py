"""`leafward train superposition`: fleets of toy models, the claims tested on them, figures and the report."""

from __future__ import annotations

import os
from typing import Any

from leafward.engine import Cluster, Experiment, Member, RunDirectory
from leafward.engine.run import FIGURES
from leafward.errors import UsageError
from leafward.report import Result
from leafward.systems.superposition import analysis, packs, report
from leafward.systems.superposition import config as settings
from leafward.systems.superposition.config import Config


class Training(Experiment[Config]):
    """One fleet: rank 0 trains all of it, and other ranks wait.

    Its packs are no members of the run but jobs below `checkpoints/`, each named by the hash of its settings: there may
    be thousands, they know no epochs, checkpoints and metrics of their own, and the executor sends them to processes or
    to a Ray cluster, where torchrun's ranks would only be in the way.
    """

    recipe, settings, apart = "superposition", settings, True

    def __init__(self, config: Config, cluster: Cluster) -> None:
        super().__init__(config, cluster)
        self.device = cluster.device.type
        if self.device == "cuda" and config.executor == "ray":
            raise UsageError("executor must be local where cuda trains, in this process; for ray use --device cpu")
        self.jobs = packs.plan(config, self.device)

    def arms(self) -> dict[str, Config]:
        return {"fleet": self.config}

    def seeds(self) -> range:
        """One member: the seeds are an axis of the grid."""
        return range(self.config.loop.seed, self.config.loop.seed + 1)

    def seeded(self, settings: Config, seed: int) -> Config:
        return settings

    def train(self, member: Member[Config], run: RunDirectory, cluster: Cluster) -> dict[str, Any]:
        processes, executor = _processes(self.config, self.device), self.config.executor
        return packs.train(self.jobs, run.path, workers=processes, executor=executor)

    def conclude(self, run: RunDirectory, members: list[Member[Config]], results: list[dict[str, Any]]) -> Result:
        (trained,) = results
        run.rewind(0)  # an earlier attempt may have come this far
        for record in analysis.curves(self.config, trained["rows"]):
            run.log(record.pop("step"), record)
        return report.result(self.config, analysis.analyse(self.config, trained))

    def page(self, run: RunDirectory, found: Result) -> None:
        report.add_figures(found, self.config.features, run.path / FIGURES)
        super().page(run, found)


run = Training.launch


def _processes(config: Config, device: str) -> int:
    """Processes that train; 0: this one."""
    if device == "cuda":
        return 0
    return (os.cpu_count() or 1) if config.processes is None else config.processes
