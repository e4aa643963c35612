"""`leafward train taxonomy`: a taxonomy in hyperbolic space, with its twin and seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from leafward.config import replace
from leafward.data.taxonomy import read_taxonomy
from leafward.engine import Cluster, Experiment, Member, RunDirectory
from leafward.errors import UsageError
from leafward.systems.taxonomy import report
from leafward.systems.taxonomy.config import Config, check
from leafward.systems.taxonomy.embed import EMBEDDINGS, NAMES, Embedded, embed, steps_per_epoch


class Training(Experiment[Config]):
    """The taxonomy in its space and in that of its twin, from several seeds.

    The negatives of a node are the others of its batch, so each rank trains some of the members, on whole batches.
    """

    recipe, settings, leftovers, apart = "taxonomy", settings, (EMBEDDINGS, NAMES), True

    def __init__(self, config: Config, cluster: Cluster) -> None:
        super().__init__(config, cluster)
        self.tax = read_taxonomy(config.data, config.root)
        if len(self.tax) < 3:
            raise UsageError(f"data: {config.data} has {len(self.tax)} nodes; at least three are needed to rank one")

    def arms(self) -> dict[str, Config]:
        config = self.config
        arms = {config.geometry: config}
        return arms | ({"euclidean": replace(config, geometry="euclidean", twin=False)} if config.arms.twin else {})

    def train(self, member: Member[Config], run: RunDirectory, cluster: Cluster) -> dict[str, Any]:
        return embed(member, self.tax, run, cluster)

    def conclude(
        self, run: RunDirectory, members: list[Member[Config]], results: list[dict[str, Any]]
    ) -> dict[str, Any]:
        steps = steps_per_epoch(self.config, self.tax)
        pairs = zip(members, results, strict=True)
        self.embedded = [Embedded.read(member, result, steps) for member, result in pairs]
        return report.summarise(self.config, self.tax, self.embedded)

    def page(self, run: RunDirectory, members: list[Member[Config]], result: dict[str, Any]) -> None:
        report.write(self.config, self.tax, result, self.embedded, run)


def run(config: Config, out: Path, *, resume: bool = False, overwrite: bool = False) -> dict[str, Any]:
    """Embed the taxonomy of `config` in the run directory `out`: embeddings, names, result, report.

    The embedding of the first seed lies in `out` itself, those of further seeds and of the twin each in its own
    directory under `out`/members. Returns what result.json holds. Raises `engine.Interrupted` after SIGTERM or SIGINT,
    once everything is saved.
    """
    config = checked(Config, config)
    check(config)
    with session(config.device) as cluster:
        return Training(config, cluster).run(out, resume=resume, overwrite=overwrite)
