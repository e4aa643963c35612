"""What a HyperCLIP run found, and the page that shows it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from leafward.config import to_dict
from leafward.report import Estimate, Number, Page
from leafward.report.figures import SERIES
from leafward.stats.intervals import mean_interval, share_interval
from leafward.systems.hyperclip.figures import sweep_figure

if TYPE_CHECKING:
    from leafward.systems.hyperclip.config import Config
    from leafward.systems.hyperclip.methods import Data

Row = dict[str, Any]


def summarise(config: Config, data: Data, rows: Sequence[Row]) -> dict[str, Any]:
    """The content of result.json; the rows of a method follow one another, one for each seed."""
    methods = by_method(rows)
    headline = []
    for label, several in methods.items():
        first = several[0]
        if first["score"] != config.adapt.score:
            continue
        # A method with the cosine is called by its name alone.
        twin = _estimate(methods[first["name"]]) if label != first["name"] and first["name"] in methods else None
        found = _estimate(several)
        headline.append(
            Number(
                f"{label}: accuracy",
                found.value,
                interval=found.interval,
                twin=twin.value if twin else None,
                twin_interval=twin.interval if twin else None,
                unit="%",
                better="higher",
                note=f"before {_before(several):.2f}; {first['trainable']:,} trained parameters",
            )
        )
    several = over_seeds(config.arms.seeds)
    intervals = several or "Intervals are those of the test images (Wilson); one seed was trained."
    return {
        "headline": [number.to_json() for number in headline],
        "data": {"classes": len(data.names), "train": len(data.train), "test": len(data.test)},
        "methods": list(rows),
        "notes": [
            intervals,
            "The hyperbolic radius is twice the norm of a feature; a cosine score cannot see it.",
        ],
    }


def page(config: Config, result: dict[str, Any], environment: dict[str, Any]) -> Page:
    """The page of a run, not yet written."""
    data, seed = result["data"], config.loop.seed
    made = Page(
        "Block-diagonal adapters in CLIP",
        subtitle=f"{config.model}: {data['classes']} classes, {data['train']} training and {data['test']} test images, "
        f"{config.loop.length}, {config.arms.seeds} seed{'s' * (config.arms.seeds > 1)}",
    )
    for note in result["notes"]:
        made.note(note)
    made.headline([Number.from_json(number) for number in result["headline"]])
    methods = by_method(result["methods"])
    made.section("Methods under the same budget")
    made.table(
        ["method", "trained parameters", "accuracy before, %", "accuracy after, %"],
        [[label, rows[0]["trainable"], _before(rows), _estimate(rows)] for label, rows in methods.items()],
    )
    made.section("Hyperbolic radius of the features")
    firsts = [rows[0] for rows in methods.values()]
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
        figure = sweep_figure({row["method"]: row["sweep"][score] for row in firsts}, looks)
        made.figure(figure, f"Score {score}: accuracy when the texts are brought to another radius, seed {seed}")
    made.section("How it was run")
    made.command(shlex.join(environment["argv"]))
    made.details("Configuration", to_dict(config))
    made.environment(environment)
    return made


def over_seeds(count: int) -> str:
    """What intervals are over; nothing of one seed."""
    return f"Means over {count} seeds with Student's 95 % interval." if count > 1 else ""


def by_method(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each method, one for each seed."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["method"], []).append(row)
    return found


def _estimate(rows: Sequence[Row]) -> Estimate:
    """The mean accuracy over seeds with its interval; of one seed, that of the test images."""
    values = [row["accuracy"] for row in rows]
    mean, ends = mean_interval(values)
    if ends is None:
        images = rows[0]["images"]
        low, high = share_interval(round(mean * images / 100.0), images)
        return Estimate(mean, (100.0 * low, 100.0 * high))
    return Estimate(mean, (max(0.0, ends[0]), min(100.0, ends[1])))


def _before(rows: Sequence[Row]) -> float:
    return sum(row["accuracy_before"] for row in rows) / len(rows)


def _range(summary: Row) -> str:
    return f"{summary['low']:.3g} to {summary['high']:.3g}"
