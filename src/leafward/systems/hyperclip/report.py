"""What a HyperCLIP run found: every method under one budget, and the radius of the features."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from leafward.report import Estimate, Result
from leafward.report.figures import SERIES
from leafward.stats.estimate import PERCENT
from leafward.stats.intervals import over_seeds
from leafward.systems.hyperclip.figures import sweep_figure

if TYPE_CHECKING:
    from leafward.systems.hyperclip.config import Config
    from leafward.systems.hyperclip.methods import Data

Row = dict[str, Any]


def result(config: Config, data: Data, rows: Sequence[Row]) -> Result:
    """What was found; the rows of a method follow one another, one for each seed."""
    methods = by_method(rows)
    over = means_over(config.arms.seeds)
    intervals = over or "Intervals are those of the test images (Wilson); one seed was trained."
    seen = "The hyperbolic radius is twice the norm of a feature; a cosine score cannot see it."
    counts = {"classes": len(data.names), "train": len(data.train), "test": len(data.test)}
    made = Result(
        "Block-diagonal adapters in CLIP",
        f"{config.model}: {counts['classes']} classes, {counts['train']} training and {counts['test']} test images, "
        f"{config.loop.length}, {config.arms.seeds} seed{'s' * (config.arms.seeds > 1)}",
        _headline(config, methods),
        notes=[intervals, seen],
        values={"data": counts, "methods": list(rows)},
    )
    made.section("Methods under the same budget")
    made.table(
        ["method", "trained parameters", "accuracy before, %", "accuracy after, %"],
        [[label, found[0]["trainable"], _before(found), _accuracy(found)] for label, found in methods.items()],
    )
    _radii(made, [found[0] for found in methods.values()], config.loop.seed)
    return made


def by_method(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each method, one for each seed."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["method"], []).append(row)
    return found


def means_over(count: int) -> str:
    """What intervals are over; nothing of one seed."""
    return f"Means over {count} seeds with Student's 95 % interval." if count > 1 else ""


def _headline(config: Config, methods: dict[str, list[Row]]) -> list[Estimate]:
    numbers = []
    for label, rows in methods.items():
        first = rows[0]
        if first["score"] == config.adapt.score:
            # A method with the cosine is called by its name alone.
            beside = methods.get(first["name"]) if label != first["name"] else None
            note = f"before {_before(rows):.2f}; {first['trainable']:,} trained parameters"
            twin = _accuracy(beside) if beside else None
            found = _accuracy(rows).named(f"{label}: accuracy", unit="%", better="higher", note=note, twin=twin)
            numbers.append(found)
    return numbers


def _radii(made: Result, firsts: Sequence[Row], seed: int) -> None:
    made.section("Hyperbolic radius of the features")
    made.table(
        ["method", "side", "before", "after", "5 % to 95 % after"],
        [
            [row["method"], side, each["before"]["mean"], each["after"]["mean"], _range(each["after"])]
            for row in firsts
            for side, each in row["radius"].items()
        ],
        f"Rad(exp₀(z)) = 2‖z‖ for every curvature; means over test images and classes, seed {seed}",
    )
    names = list(dict.fromkeys(row["name"] for row in firsts))
    looks = {
        row["method"]: {
            "color": SERIES[names.index(row["name"]) % len(SERIES)],
            "linestyle": "-" if row["score"] == "cosine" else "--",
        }
        for row in firsts
    }
    for score in firsts[0]["sweep"]:
        swept = {row["method"]: row["sweep"][score] for row in firsts}
        caption = f"Score {score}: accuracy when the texts are brought to another radius, seed {seed}"
        made.figure(partial(sweep_figure, swept, looks), caption)


def _accuracy(rows: Sequence[Row]) -> Estimate:
    """The mean accuracy over seeds with its interval; of one seed, that of the test images."""
    return over_seeds([row["accuracy"] for row in rows], PERCENT, samples=rows[0]["images"], of="test images")


def _before(rows: Sequence[Row]) -> float:
    return sum(row["accuracy_before"] for row in rows) / len(rows)


def _range(summary: Row) -> str:
    return f"{summary['low']:.3g} to {summary['high']:.3g}"
