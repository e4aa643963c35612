"""What a taxonomy run found: scores over seeds beside the twin's, and the disk and the radii."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from leafward.report import Result
from leafward.stats.estimate import SHARE
from leafward.stats.intervals import over_seeds
from leafward.systems.taxonomy.figures import disk, disk_caption, radii

if TYPE_CHECKING:
    from leafward.hierarchy import Taxonomy
    from leafward.systems.taxonomy.config import Config
    from leafward.systems.taxonomy.embed import Embedded

SCORES = {
    "mean_average_precision": ("mean average precision", SHARE, "higher", "of the ancestors among all nodes"),
    "mean_rank": ("mean rank", (1.0, math.inf), "lower", "of an ancestor among the nodes that are none"),
    "distortion": ("mean distortion", (0.0, math.inf), "lower", "of distances against the taxonomy's, best scale"),
    "radius_tau": (
        *("τ of radius against level", (-1.0, 1.0), "higher"),
        "Kendall, along the ways from the root to the leaves",
    ),
    "entailment_auc": ("entailment AUC", SHARE, "higher", "pairs of a node and an ancestor against other pairs"),
}
"""Score -> its name, the least and the most that it can be, which direction is good, and what it is."""


def result(config: Config, tax: Taxonomy, members: Sequence[Embedded]) -> Result:
    """The scores of the geometry of `config`, with those of its twin and the paired differences."""
    own, twins = ([each for each in members if (each.geometry == config.geometry) == mine] for mine in (True, False))
    headline, paired = [], {}
    for key, (name, possible, better, note) in SCORES.items():
        values, others = ([member.scores[key] for member in side] for side in (own, twins))
        twin = over_seeds(others, possible) if twins else None
        headline.append(over_seeds(values, possible).named(name, better=better, note=note, twin=twin))
        if twins:
            paired[key] = over_seeds([value - other for value, other in zip(values, others, strict=True)])
    pairs = int(tax.ancestor_counts.sum()) - len(tax)
    values = {
        "taxonomy": repr(tax),
        "pairs": pairs,
        "parameters": members[0].tangent.numel(),
        "members": [member.to_json() for member in members],
        "paired": {key: {"difference": each.value, "interval": each.interval} for key, each in paired.items()},
    }
    subtitle = (
        f"{config.data.source}: {tax!r}, {pairs:,} pairs of a node and its ancestor; "
        f"{config.geometry}, {config.dim} dimensions, objective {config.objective}, {config.loop.length}"
    )
    made = Result("Taxonomy embedding", subtitle, headline, notes=_notes(config, tax, len(own)), values=values)
    _pictures(made, config, tax, members)
    made.section("Scores")
    made.table(
        ["geometry", "seed", *(name for name, *_ in SCORES.values()), "worst distortion", "seconds an epoch"],
        [
            [m.geometry, m.seed, *(m.scores[key] for key in SCORES), m.scores["worst_distortion"], m.seconds_per_epoch]
            for m in members
        ],
    )
    if paired:
        made.table(
            ["", f"{config.geometry} − euclidean"],
            [[SCORES[key][0], each] for key, each in paired.items()],
            "Paired differences to the Euclidean twin of as many parameters, over seeds",
        )
    return made


def _notes(config: Config, tax: Taxonomy, seeds: int) -> list[str]:
    notes = []
    if len(tax) > config.eval_nodes:
        notes.append(f"Ranks are from a random sample of {config.eval_nodes:,} of the {len(tax):,} nodes.")
    if seeds == 1:
        notes.append("One seed: there are no intervals; --seeds 3 gives them.")
    return notes


def _pictures(made: Result, config: Config, tax: Taxonomy, members: Sequence[Embedded]) -> None:
    made.section("Pictures")
    tangent = members[0].tangent * config.c**0.5
    made.figure(partial(disk, tax, tangent), disk_caption(tax, config, tangent))
    made.figure(partial(radii, tax, members), "Radius against level: mean, and the tenth to the ninetieth percentile.")
    losses = {
        f"{each.geometry}, seed {each.seed}": [{"epoch": epoch, "train/loss": loss} for epoch, loss in each.losses]
        for each in members
    }
    made.curves(losses, {"train/loss": "Training loss, mean over the pairs."}, "epoch")
