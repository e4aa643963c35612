"""Embeddings of a taxonomy: every node a point, its ancestors the nearest points to it or the cones it lies in."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from leafward.errors import UsageError, need

if TYPE_CHECKING:
    from leafward.hierarchy.embedding import Geometry

SUMMARY = "Lorentz, Poincaré or Euclidean embeddings of a taxonomy, by distances or entailment cones."
MAY_CHANGE = ("device",)
"""Fields that a resumed run may change."""


@dataclass(frozen=True)
class Config:
    """What is embedded, in what space, and how it is trained."""

    data: str = ""
    """The taxonomy: .csv of child,parent; .json; .txt; wordnet (its nouns); wordnet:NODE (the nouns under NODE)."""
    root: str | None = None
    """Name of a root to put above a taxonomy that has several."""
    geometry: Literal["lorentz", "poincare", "euclidean"] = "lorentz"
    """The space."""
    objective: Literal["distance", "cones"] = "distance"
    """distance: every node nearest to its ancestors. cones: every node inside its ancestors' entailment cones."""
    dim: int = 10
    """Dimension of the space."""
    c: float = 1.0
    """Curvature constant c > 0 (sectional curvature −c); Euclidean space has none."""
    epochs: int = 100
    """Passes over all pairs of a node and its ancestor."""
    batch: int = 256
    """Nodes of a batch; all their ancestors are compared with all of them."""
    lr: float | None = None
    """Peak learning rate; None: 0.2 for distances, 0.03 for cones."""
    temperature: float = 0.4
    """Distances are divided by it before the softmax (objective distance)."""
    margin: float = 1.0
    """Angle by which a node must stay outside the cones it does not belong to (objective cones)."""
    seed: int = 0
    """Seed of the first replicate; the others follow it."""
    seeds: int = 1
    """Replicates; two or more give intervals."""
    twin: bool = False
    """Train the Euclidean twin too, of the same size, seeds and order of the data."""
    eval_nodes: int = 10_000
    """Nodes from which all others are ranked, at most; a taxonomy with more is measured on a random sample."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto takes cuda if there is one."""

    def __post_init__(self) -> None:
        for name in ("dim", "epochs", "batch", "seeds", "eval_nodes"):
            need(getattr(self, name) >= 1, name, "an integer ≥ 1", getattr(self, name))
        for name in ("c", "lr", "temperature", "margin"):
            value = getattr(self, name)
            need(value is None or (math.isfinite(value) and value > 0), name, "a positive number", value)
        need(self.seed >= 0, "seed", "an integer ≥ 0", self.seed)
        need(
            not (self.twin and self.geometry == "euclidean"),
            "twin",
            "left out, as euclidean is its own twin",
            self.twin,
        )


def default() -> Config:
    """Ten dimensions."""
    return Config()


def disk() -> Config:
    """Two dimensions, for the picture."""
    return Config(dim=2)


PRESETS: dict[str, Callable[[], Config]] = {"default": default, "disk": disk}


def run(config: Config, out: Path, *, resume: bool = False, overwrite: bool = False) -> dict[str, Any]:
    """Embed the taxonomy of `config` in the run directory `out`: embeddings, names, result, report.

    The first seed trains in `out` itself, further seeds and the twin each in a directory under `out`/members. Returns
    what result.json holds. Raises `engine.Interrupted` after SIGTERM or SIGINT, once everything is saved.
    """
    from leafward.engine import RunDirectory
    from leafward.recipes import _taxonomy_report as report
    from leafward.recipes._taxonomy_inputs import read_taxonomy
    from leafward.recipes._taxonomy_training import embed

    if not config.data:
        raise UsageError("data is missing; name the taxonomy: --data FILE.csv (or .json, .txt, wordnet:NODE)")
    tax = read_taxonomy(config.data, config.root)
    if len(tax) < 3:
        raise UsageError(f"data: {config.data} has {len(tax)} nodes; at least three are needed to rank one")

    def directory(path: Path, settings: Config) -> RunDirectory:
        return RunDirectory.create(
            path, settings, resume=resume, overwrite=overwrite, may_change=MAY_CHANGE, recipe="taxonomy"
        )

    whole = directory(out, config)
    members = []
    for geometry, seed in plan(config):
        settings = replace(config, geometry=geometry, seed=seed, seeds=1, twin=False)
        where = directory(out / "members" / f"{geometry}-seed{seed}", settings) if members else whole
        members.append(embed(settings, tax, where))
    result = report.summarise(config, tax, members)
    whole.finish(result)
    report.write(config, tax, result, members, whole)
    return result


def plan(config: Config) -> list[tuple[Geometry, int]]:
    """(geometry, seed) of every embedding, the one that the run is named for first."""
    geometries: list[Geometry] = [config.geometry, "euclidean"] if config.twin else [config.geometry]
    return [(geometry, config.seed + k) for geometry in geometries for k in range(config.seeds)]
