"""Taxonomy embeddings beside gensim's PoincareModel on the same graph, and how fast taxonomies load.

    python benchmarks/taxonomy.py --graph mammals --dim 5 10
    python benchmarks/taxonomy.py --graph nouns --dim 10 --gensim-epochs 5
    python benchmarks/taxonomy.py --graph load                               # 100,000 nodes: seconds to load

Graphs: the transitive closure of WordNet's mammals and of all its nouns (needs WordNet: Debian's wordnet-base or NLTK's
corpus). Both sides see the same pairs of a node and its ancestor, and both are measured by the same code: mean average
precision and mean rank of the ancestors among all nodes by distance. An epoch is one pass over all pairs; seconds per
epoch are of training alone. gensim (pip install gensim) is a peer to be compared with, not a dependency; it trains in
one thread, so run both with OMP_NUM_THREADS=1. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from leafward.config import replace
from leafward.engine import RunDirectory
from leafward.geometry import PoincareBall
from leafward.hierarchy import Taxonomy
from leafward.hierarchy.embedding import TaxonomyEmbedding, proper_ancestors
from leafward.hierarchy.reconstruction import reconstruction
from leafward.systems.taxonomy.config import Config
from leafward.systems.taxonomy.embed import train

MAMMALS = "mammal.n.01"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graph", choices=("mammals", "nouns", "load"), default="mammals")
    parser.add_argument(
        "--wordnet", type=Path, help="folder of data.noun and index.noun (default: where it is installed)"
    )
    parser.add_argument("--dim", type=int, nargs="+", default=[5, 10])
    parser.add_argument("--geometry", nargs="+", default=["lorentz", "euclidean"])
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--batch", type=int, default=Config().loop.batch_size)
    parser.add_argument("--gensim-epochs", type=int, default=50, help="0: leave gensim out")
    parser.add_argument(
        "--eval-nodes", type=int, default=10_000, help="nodes from which all others are ranked, at most"
    )
    parser.add_argument("--nodes", type=int, default=100_000, help="size of the taxonomy of --graph load")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    measured = load_times(arguments.nodes) if arguments.graph == "load" else embeddings(arguments)
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()}
    print(json.dumps({**settings, "cpus": os.cpu_count(), **measured}, indent=2))


def embeddings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Every geometry, and gensim, at every dimension."""
    tax = Taxonomy.from_wordnet(arguments.wordnet)
    tax = tax.subtree(MAMMALS) if arguments.graph == "mammals" else tax
    related = proper_ancestors(tax)
    nodes = np.random.default_rng(0).permutation(len(tax))[: arguments.eval_nodes]
    rows = []

    def note(name: str, dim: int, epochs: int, seconds: float, scores: Callable[[torch.Tensor], torch.Tensor]) -> None:
        found = reconstruction(related, scores, nodes)
        rows.append(
            {
                "model": name,
                "dim": dim,
                "epochs": epochs,
                "cpu_seconds_per_epoch": seconds / epochs,
                "mean_average_precision": found.mean_average_precision,
                "mean_rank": found.mean_rank,
            }
        )

    embed(tax.restrict(tax.order[:50]), config_of(epochs=1))  # so that no import is in the time
    for dim in arguments.dim:
        for geometry in arguments.geometry:
            config = config_of(geometry=geometry, dim=dim, epochs=arguments.epochs, batch_size=arguments.batch)
            model, seconds = timed(lambda config=config: embed(tax, config))
            with torch.no_grad():
                note(f"leafward {geometry}", dim, arguments.epochs, seconds, model.scores)
        if arguments.gensim_epochs:
            note(*gensim_model(tax, dim, arguments.gensim_epochs))
    return {"taxonomy": repr(tax), "pairs": len(related.items), "nodes_ranked": len(nodes), "results": rows}


def config_of(**changes: Any) -> Config:
    """The defaults of the recipe with some changes, on the CPU."""
    return replace(Config(), device="cpu", **changes)


def embed(tax: Taxonomy, config: Config) -> TaxonomyEmbedding:
    """What `leafward train taxonomy` trains, checkpoints and logs included."""
    with tempfile.TemporaryDirectory() as folder:
        return train(config, tax, RunDirectory.create(Path(folder) / "run", config))


def gensim_model(tax: Taxonomy, dim: int, epochs: int) -> tuple[str, int, int, float, Callable[..., torch.Tensor]]:
    """gensim's PoincareModel as it comes: 10 negatives, batches of 10. Its burn-in comes first, outside the time."""
    from gensim.models.poincare import PoincareModel

    below, above = proper_ancestors(tax).expand(np.arange(len(tax)))
    pairs = [(tax.names[child], tax.names[parent]) for child, parent in zip(below, above, strict=True)]
    model = PoincareModel(pairs, size=dim, negative=10, seed=0)
    model.burn_in = model.burn_in if epochs > model.burn_in else 0
    if model.burn_in:
        model.train(epochs=1)  # the burn-in comes before the first epoch
    rest = epochs - 1 if model.burn_in else epochs
    seconds = timed(lambda: model.train(epochs=rest))[1] / rest * epochs
    table = torch.from_numpy(np.stack([model.kv[name] for name in tax.names]))
    ball = PoincareBall(1.0)
    return "gensim", dim, epochs, seconds, lambda nodes: ball.cdist(table[nodes], table)


def load_times(count: int) -> dict[str, Any]:
    """Seconds from files of a random tree to a taxonomy, and to all that is computed on first use."""
    rng = np.random.default_rng(0)
    parent = (rng.random(count) * np.arange(count)).astype(int)
    source = Taxonomy.from_edges([(f"node {i}", f"node {parent[i]}" if i else None) for i in range(count)])
    first, second = rng.integers(0, count, (2, 100_000))
    seconds = {}
    with tempfile.TemporaryDirectory() as folder:
        for ending in (".csv", ".json"):
            path = Path(folder) / f"tree{ending}"
            source.save(path)
            tax, seconds[f"load {ending}"] = timed(lambda path=path: Taxonomy.load(path))
    tax = Taxonomy.from_edges(source.edges())
    seconds["ancestor matrix"] = timed(lambda: tax.ancestors)[1]
    seconds["heights"] = timed(lambda: tax.height)[1]
    seconds["100,000 distances, first"] = timed(lambda: tax.distance(first, second))[1]
    seconds["100,000 distances, again"] = timed(lambda: tax.distance(first, second))[1]
    seconds["100,000 lowest common ancestors"] = timed(lambda: tax.lca(first, second))[1]
    return {"taxonomy": repr(tax), "cpu_seconds": seconds}


def timed(job: Callable[[], Any]) -> tuple[Any, float]:
    """CPU seconds of this process, which other work on the machine disturbs less than a clock."""
    began = time.process_time()
    result = job()
    return result, time.process_time() - began


if __name__ == "__main__":
    main()
