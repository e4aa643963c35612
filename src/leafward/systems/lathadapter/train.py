"""`leafward train lathadapter`: every method on every episode of the protocol."""

from __future__ import annotations

from typing import Any

from leafward.data.taxonomy import class_taxonomy
from leafward.engine import Cluster, Experiment, Member, RunDirectory
from leafward.report import Result
from leafward.systems.lathadapter import config as settings
from leafward.systems.lathadapter import methods, report
from leafward.systems.lathadapter.config import Config
from leafward.systems.lathadapter.methods import Cell


class Training(Experiment[Cell]):
    """Small trainings, whose losses compare the images of a batch with each other: each rank trains some of them."""

    recipe, settings, member_recipe, apart = "lathadapter", settings, "", True

    def __init__(self, config: Config, cluster: Cluster) -> None:
        super().__init__(config, cluster)
        config = self.config
        self.sets = methods.read_sets(config)
        self.episodes = methods.episodes(config, self.sets)
        self.frozen: list[methods.Episode] | None = None
        names = [each.class_names for each in self.sets]
        taxonomy = config.data.taxonomy
        self.taxonomy = None if taxonomy is None else class_taxonomy(taxonomy, *names)

    def arms(self) -> dict[str, Cell]:
        return {cell.arm: cell for cell in methods.cells(self.config, methods.has_teacher(self.sets[0]))}

    def seeded(self, settings: Cell, seed: int) -> Cell:
        return settings.seeded(seed)

    def kept(self) -> None:
        """Every training keeps its own host: none stands for the run."""

    def needed(self, member: Member[Cell]) -> bool:
        """PromptKD learns from its teacher."""
        cell = member.config
        own = methods.has_teacher(self.sets[0])
        return "promptkd" in self.config.hosts and cell == Cell(methods.TEACHER, None, None, cell.shots, cell.seed, own)

    def prepare(self, run: RunDirectory) -> None:
        if methods.needs_frozen(self.config):
            self.frozen = methods.episodes(self.config, methods.frozen_sets(self.sets))

    def train(self, member: Member[Cell], run: RunDirectory, cluster: Cluster) -> dict[str, Any]:
        cell = member.config
        known = self.frozen if self.frozen and cell.host in methods.BASELINES else self.episodes
        episode = next(each for each in known if (each.shots, each.seed) == (cell.shots, cell.seed))
        found = methods.train(self.config, member, episode, run, cluster)
        return {"name": member.name, "method": cell.method.label, "shots": cell.shots, "seed": cell.seed} | {
            "attributes": cell.attributes,
            "steps": found.step,
        }

    def conclude(self, run: RunDirectory, members: list[Member[Cell]], results: list[dict[str, Any]]) -> Result:
        rows = methods.score_all(self.config, self.episodes, run.path, self.taxonomy, self.frozen)
        return report.result(self.config, self.sets[0], rows)


run = Training.launch
