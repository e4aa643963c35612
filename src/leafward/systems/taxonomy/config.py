"""Embeddings of a taxonomy: every node a point, its ancestors the nearest points to it or the cones it lies in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from leafward.config import Count, Natural, Place, Positive, Seeds, Settings
from leafward.errors import UsageError, need

SUMMARY = "Lorentz, Poincaré or Euclidean embeddings of a taxonomy, by distances or entailment cones."
MAY_CHANGE = ("device",)
"""Fields that a resumed run may change."""


class Config(Settings, frozen=True):
    """What is embedded, in what space, and how it is trained."""

    data: Place = ""
    """The taxonomy: .csv of child,parent; .json; .txt; wordnet (its nouns); wordnet:NODE (the nouns under NODE)."""
    root: str | None = None
    """Name of a root to put above a taxonomy that has several."""
    geometry: Literal["lorentz", "poincare", "euclidean"] = "lorentz"
    """The space."""
    objective: Literal["distance", "cones"] = "distance"
    """distance: every node nearest to its ancestors. cones: every node inside its ancestors' entailment cones."""
    dim: Count = 10
    """Dimension of the space."""
    c: Positive = 1.0
    """Curvature constant c > 0 (sectional curvature −c); Euclidean space has none."""
    epochs: Count = 100
    """Passes over all pairs of a node and its ancestor."""
    batch: Count = 256
    """Nodes of a batch; all their ancestors are compared with all of them."""
    lr: Positive | None = None
    """Peak learning rate; None: 0.2 for distances, 0.03 for cones."""
    temperature: Positive = 0.4
    """Distances are divided by it before the softmax (objective distance)."""
    margin: Positive = 1.0
    """Angle by which a node must stay outside the cones it does not belong to (objective cones)."""
    seed: Natural = 0
    """Seed of the first replicate; the others follow it."""
    seeds: Seeds = 1
    """Replicates; two or more give intervals."""
    twin: bool = False
    """Train the Euclidean twin too, of the same size, seeds and order of the data."""
    eval_nodes: Count = 10_000
    """Nodes from which all others are ranked, at most; a taxonomy with more is measured on a random sample."""
    precision: Literal["float32", "bfloat16", "float64"] = "float32"
    """bfloat16 is autocast of the forward pass over float32 parameters; float64 computes all in float64, for proofs."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto takes cuda if there is one."""

    def conditions(self) -> None:
        alone = not (self.twin and self.geometry == "euclidean")
        need(alone, "twin", "left out, as euclidean is its own twin", self.twin)


def default() -> Config:
    """Ten dimensions."""
    return Config()


def disk() -> Config:
    """Two dimensions, for the picture."""
    return Config(dim=2)


PRESETS: dict[str, Callable[[], Config]] = {"default": default, "disk": disk}


def check(config: Config) -> None:
    """Refuse what is missing, before anything heavy is imported."""
    if not config.data:
        raise UsageError("data is missing; name the taxonomy: --data FILE.csv (or .json, .txt, wordnet:NODE)")
