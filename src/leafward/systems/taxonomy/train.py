"""`leafward train taxonomy`: a taxonomy in hyperbolic space, with its twin and seeds."""

from __future__ import annotations

from typing import Any

from leafward.config import replace
from leafward.data.taxonomy import read_taxonomy
from leafward.engine import Cluster, Experiment, Member, RunDirectory
from leafward.errors import UsageError
from leafward.report import Result
from leafward.systems.taxonomy import config as settings
from leafward.systems.taxonomy import report
from leafward.systems.taxonomy.config import Config
from leafward.systems.taxonomy.embed import EMBEDDINGS, NAMES, Embedded, embed


class Training(Experiment[Config]):
    """The taxonomy in its space and in that of its twin, from several seeds.

    The negatives of a node are the others of its batch, so each rank trains some of the members, on whole batches.
    """

    recipe, settings, leftovers, apart = "taxonomy", settings, (EMBEDDINGS, NAMES), True

    def __init__(self, config: Config, cluster: Cluster) -> None:
        super().__init__(config, cluster)
        data = config.data
        self.tax = read_taxonomy(data.source, data.root)
        if len(self.tax) < 3:
            raise UsageError(f"data: {data.source} has {len(self.tax)} nodes; at least three are needed to rank one")

    def arms(self) -> dict[str, Config]:
        config = self.config
        flat = {"geometry": "euclidean", "twin": False}
        return {config.geometry: config} | ({"euclidean": replace(config, **flat)} if config.arms.twin else {})

    def train(self, member: Member[Config], run: RunDirectory, cluster: Cluster) -> dict[str, Any]:
        return embed(member, self.tax, run, cluster)

    def conclude(self, run: RunDirectory, members: list[Member[Config]], results: list[dict[str, Any]]) -> Result:
        pairs = zip(members, results, strict=True)
        return report.result(self.config, self.tax, [Embedded.read(*pair, len(self.tax)) for pair in pairs])


run = Training.launch
