"""Embeddings of a taxonomy: every node a point, its ancestors the nearest points to it or the cones it lies in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal

from leafward.config import Count, Place, Positive, Settings
from leafward.engine.config import Arms, LoopConfig, OptimConfig
from leafward.errors import UsageError, need

SUMMARY = "Lorentz, Poincaré or Euclidean embeddings of a taxonomy, by distances or entailment cones."
RATES = {"distance": 0.2, "cones": 0.03}
"""Objective -> peak learning rate where none is given."""


class Data(Settings, frozen=True):
    """The taxonomy."""

    MAIN: ClassVar[str] = "source"

    source: Place = ""
    """.csv of child,parent; .json; .txt; wordnet (its nouns); wordnet:NODE (the nouns under NODE)."""
    root: str | None = None
    """Name of a root to put above a taxonomy that has several."""


class EmbeddingOptim(OptimConfig, frozen=True):
    """AdamW and its learning-rate schedule, at a rate that follows the objective."""

    lr: Positive | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    """Peak learning rate; None: 0.2 for distances, 0.03 for cones."""


class Config(Settings, frozen=True):
    """What is embedded, in what space, and how it is trained."""

    EARLIER: ClassVar[dict[str, str]] = {"batch": "loop.batch_size"}

    data: Data = Data()
    geometry: Literal["lorentz", "poincare", "euclidean"] = "lorentz"
    """The space."""
    objective: Literal["distance", "cones"] = "distance"
    """distance: every node nearest to its ancestors. cones: every node inside its ancestors' entailment cones."""
    dim: Count = 10
    """Dimension of the space."""
    c: Positive = 1.0
    """Curvature constant c > 0 (sectional curvature −c); Euclidean space has none."""
    temperature: Positive = 0.4
    """Distances are divided by it before the softmax (objective distance)."""
    margin: Positive = 1.0
    """Angle by which a node must stay outside the cones it does not belong to (objective cones)."""
    eval_nodes: Count = 10_000
    """Nodes from which all others are ranked, at most; a taxonomy with more is measured on a random sample."""
    arms: Arms = Arms()
    loop: LoopConfig = LoopConfig(epochs=100.0, batch_size=256)
    """A sample is a node, compared with the others of its batch and with all their ancestors; an epoch is one pass over
    the nodes. A batch larger than the taxonomy is cut to it."""
    optim: EmbeddingOptim = EmbeddingOptim(
        betas=(0.9, 0.99), weight_decay=0.0, clip_norm=None, warmup_ratio=0.01, final_ratio=0.05
    )

    def conditions(self) -> None:
        loop = self.loop
        alone = not (self.arms.twin and self.geometry == "euclidean")
        need(alone, "arms.twin", "left out, as euclidean is its own twin", self.arms.twin)
        whole = loop.micro_batch is None
        need(whole, "loop.micro_batch", "None, as a node's negatives are the others of its batch", loop.micro_batch)
        light = not loop.checkpoint_activations
        need(light, "loop.checkpoint_activations", "off, as there are no blocks to recompute", True)
        apart = loop.strategy == "auto"
        need(apart, "loop.strategy", "auto, as each rank trains embeddings of its own", loop.strategy)
        watched = loop.patience is None or loop.eval_every is not None
        need(watched, "loop.patience", "None where loop.eval_every is", loop.patience)


def default() -> Config:
    """Ten dimensions."""
    return Config()


def disk() -> Config:
    """Two dimensions, for the picture."""
    return Config(dim=2)


PRESETS: dict[str, Callable[[], Config]] = {"default": default, "disk": disk}
ABLATIONS: dict[str, dict[str, dict[str, Any]]] = {
    "geometry": {name: {"geometry": name} for name in ("lorentz", "poincare", "euclidean")},
    "objective": {name: {"objective": name} for name in ("distance", "cones")},
    "dim": {f"dim={dim}": {"dim": dim} for dim in (2, 5, 10, 20, 50)},
}
"""The comparisons of Nickel and Kiela 2017 and of Ganea et al. 2018."""


def check(config: Config) -> None:
    """Refuse what is missing, before anything heavy is imported."""
    if not config.data.source:
        raise UsageError("data is missing; name the taxonomy: --data FILE.csv (or .json, .txt, wordnet:NODE)")
