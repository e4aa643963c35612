"""One embedding of a taxonomy: trained by the engine, kept as files, measured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from leafward.config import replace
from leafward.data.items import read_matrix
from leafward.engine import Cluster, LoopConfig, Loss, Member, RunDirectory, train_loop
from leafward.engine.devices import device_of
from leafward.files import finite, replacing, write_json
from leafward.hierarchy import Taxonomy, metrics
from leafward.hierarchy.embedding import Batch, Closure, TaxonomyEmbedding, proper_ancestors
from leafward.hierarchy.fan import fan
from leafward.hierarchy.reconstruction import distortion, reconstruction
from leafward.systems.taxonomy.config import RATES

if TYPE_CHECKING:
    from leafward.systems.taxonomy.config import Config

#: Pairs on which distortion and entailment are measured; a taxonomy with no more pairs than this is measured on all.
PAIRS = 500_000
EMBEDDINGS, NAMES = "embeddings.safetensors", "names.json"
MEASURED = (
    "mean_average_precision",
    "mean_rank",
    "distortion",
    "worst_distortion",
    "radius_tau",
    "entailment_auc",
    "entailment_ap",
)


@dataclass
class Embedded:
    """One trained embedding and what was measured of it.

    tangent (N, n): tangent vectors at the origin, as long as the radius; losses: (epoch, training loss).
    """

    geometry: str
    seed: int
    tangent: Tensor
    scores: dict[str, float]
    losses: list[tuple[float, float]]
    seconds_per_epoch: float

    @classmethod
    def read(cls, member: Member[Config], result: Mapping[str, Any], nodes: int) -> Embedded:
        """What a member left, of a taxonomy of so many nodes."""
        loop = loop_over(member.config, nodes)
        tangent = torch.from_numpy(read_matrix(member.home / EMBEDDINGS, "tangent"))
        logged = losses(RunDirectory.open(member.path))
        # JSON has no NaN; it was written as null.
        scores = {name: math.nan if result[name] is None else result[name] for name in MEASURED}
        curve = [(record["step"] * loop.batch_size / nodes, record["train/loss"]) for record in logged]
        return cls(result["geometry"], result["seed"], tangent, scores, curve, result["time"]["seconds_per_epoch"])

    def to_json(self) -> dict[str, Any]:
        time = {"seconds_per_epoch": self.seconds_per_epoch}
        return {"geometry": self.geometry, "seed": self.seed, **self.scores, "time": time}


class _Nodes:
    """The numbers of the nodes as a data set."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitems__(self, rows: list[int]) -> list[int]:
        return rows


class _Task:
    """The engine's view of the objective: a batch of nodes with all their ancestors."""

    def __init__(self, closure: Closure) -> None:
        self.closure = closure
        self.dataset = _Nodes(len(closure))

    def collate(self, rows: list[int]) -> Batch:
        return self.closure.batch(torch.tensor(rows))

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        return Loss(model(batch), len(batch.owner))


class _Watched(_Task):
    """The same, measured while it is trained; the best embedding is the one that is kept."""

    monitor, mode = "mean_average_precision", "max"

    def __init__(self, closure: Closure, config: Config, tax: Taxonomy) -> None:
        super().__init__(closure)
        self.config, self.tax = config, tax
        self.still = untrained(config, tax)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """On a copy in memory, in the type of the parameters whatever the precision of training."""
        with torch.autocast("cpu", enabled=False):
            self.still.load_state_dict(model.state_dict())
            return measure(self.config, self.tax, self.still)


def embed(member: Member[Config], tax: Taxonomy, run: RunDirectory, cluster: Cluster) -> dict[str, Any]:
    """Train in `run`, measure, and write embeddings.safetensors and names.json in the home of the member."""
    config = member.config
    model = train(config, tax, run, cluster)

    def conclude() -> dict[str, Any]:
        save(model, tax, member.home)
        logged = losses(run)
        epochs = logged[-1]["step"] * loop_over(config, len(tax)).batch_size / len(tax)
        seconds = sum(record["time"]["seconds"] for record in logged) / epochs
        scores = {"geometry": config.geometry, "seed": config.loop.seed, **measure(config, tax, model)}
        return finite({**scores, "time": {"seconds_per_epoch": seconds}})

    return cluster.on_main(conclude)


def losses(run: RunDirectory) -> list[dict[str, Any]]:
    """The records of a run that hold a training loss."""
    return [record for record in run.metrics() if "train/loss" in record]


def train(config: Config, tax: Taxonomy, run: RunDirectory, cluster: Cluster | None = None) -> TaxonomyEmbedding:
    """Train in `run`, from its newest checkpoint if it has one."""
    cluster = cluster or Cluster(device=device_of(config.loop.device))
    model, closure = untrained(config, tax), Closure(tax)
    task = _Task(closure) if config.loop.eval_every is None else _Watched(closure, config, tax)
    optim = replace(config.optim, lr=config.optim.lr or RATES[config.objective])
    train_loop(model, task, loop_over(config, len(tax)), optim, run, cluster)
    return model.cpu().eval()


def untrained(config: Config, tax: Taxonomy) -> TaxonomyEmbedding:
    """The embedding as its training begins."""
    return TaxonomyEmbedding(
        len(tax),
        config.dim,
        config.geometry,
        config.objective,
        c=config.c,
        temperature=config.temperature,
        margin=config.margin,
        seed=config.loop.seed,
        # In the plane a node cannot get past another one; in more dimensions a random start is as good.
        start=fan(tax, config.loop.seed) if config.dim == 2 else None,
    )


def loop_over(config: Config, nodes: int) -> LoopConfig:
    """The loop over a taxonomy of so many nodes, all of which are one batch where they are fewer than one."""
    return replace(config.loop, batch_size=min(config.loop.batch_size, nodes))


def save(model: TaxonomyEmbedding, tax: Taxonomy, folder: Path) -> None:
    """embeddings.safetensors (tangent vectors at the origin, as long as the radius) and names.json, row by row."""
    from safetensors.torch import save_file

    with replacing(folder / EMBEDDINGS) as temporary:
        save_file({"tangent": model.weight.detach().contiguous()}, temporary)
    write_json(folder / NAMES, list(tax.names))


@torch.no_grad()
def measure(config: Config, tax: Taxonomy, model: TaxonomyEmbedding) -> dict[str, float]:
    """Ranks of the ancestors by the objective's own score, distortion of the distances, order of the radii."""
    rng = np.random.default_rng(config.loop.seed)
    nodes = None if len(tax) <= config.eval_nodes else rng.choice(len(tax), config.eval_nodes, replace=False)
    found = reconstruction(proper_ancestors(tax), model.scores, nodes)
    first, second = some_pairs(len(tax), rng)
    points = model.points()
    stretched = distortion(model.manifold.dist(points[first], points[second]), tax.distance(first, second))
    below, above, labels = entailment_pairs(tax, rng)
    outside = model.pair_scores(torch.from_numpy(below), torch.from_numpy(above))
    return {
        "mean_average_precision": found.mean_average_precision,
        "mean_rank": found.mean_rank,
        "distortion": stretched.mean,
        "worst_distortion": stretched.worst,
        "radius_tau": metrics.taxonomy_tau(tax, model.manifold.dist0(points)),
        "entailment_auc": metrics.entailment_auc(-outside, labels),
        "entailment_ap": metrics.entailment_ap(-outside, labels),
    }


def some_pairs(count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """All pairs of different nodes where they are few, else a random sample of them."""
    if count * (count - 1) // 2 <= PAIRS:
        return np.triu_indices(count, 1)
    first = rng.integers(0, count, PAIRS)
    return first, (first + rng.integers(1, count, PAIRS)) % count


def entailment_pairs(tax: Taxonomy, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Nodes, each with one of its ancestors or, as often, with a random node that is none; and which it is."""
    below, above = proper_ancestors(tax).expand(np.arange(len(tax)))
    chosen = rng.permutation(len(below))[:PAIRS]
    first, second = rng.integers(0, len(tax), (2, len(chosen)))
    wrong = ~tax.entails(second, first)
    if not wrong.any():  # so few nodes that chance drew none
        first, second = np.indices((len(tax), len(tax))).reshape(2, -1)
        wrong = ~tax.entails(second, first)
    return (
        np.concatenate([below[chosen], first[wrong]]),
        np.concatenate([above[chosen], second[wrong]]),
        np.repeat([1, 0], [len(chosen), int(wrong.sum())]),
    )
