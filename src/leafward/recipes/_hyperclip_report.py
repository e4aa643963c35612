"""What a HyperCLIP run found, and the page that shows it."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from leafward.engine.config import to_dict
from leafward.report import Estimate, Number, Page, legend, line_with_band, new_figure

if TYPE_CHECKING:
    from leafward.recipes._hyperclip_training import Data
    from leafward.recipes.hyperclip import Config

Row = dict[str, Any]


def wilson(percent: float, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share of `count` images, in per cent: the spread of the test set, not of seeds."""
    z, p = 1.96, percent / 100.0
    centre = (p + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(p * (1 - p) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return 100.0 * max(0.0, centre - half), 100.0 * min(1.0, centre + half)


def summarise(config: Config, data: Data, rows: Sequence[Row]) -> dict[str, Any]:
    """The content of result.json."""
    twins = {row["name"]: row for row in rows if row["score"] == "cosine" and config.score != "cosine"}
    headline = []
    for row in rows:
        if row["score"] != config.score:
            continue
        twin = twins.get(row["name"])
        headline.append(
            Number(
                f"{row['method']}: accuracy",
                row["accuracy"],
                interval=wilson(row["accuracy"], row["images"]),
                twin=twin["accuracy"] if twin else None,
                twin_interval=wilson(twin["accuracy"], twin["images"]) if twin else None,
                unit="%",
                better="higher",
                note=f"before {row['accuracy_before']:.2f}; {row['trainable']:,} trained parameters",
            )
        )
    return {
        "headline": [number.to_json() for number in headline],
        "data": {"classes": len(data.names), "train": len(data.train), "test": len(data.test)},
        "methods": list(rows),
        "notes": [
            "Intervals are those of the test images (Wilson); one seed was trained.",
            "The hyperbolic radius is twice the norm of a feature; a cosine score cannot see it.",
        ],
    }


def page(config: Config, result: dict[str, Any], environment: dict[str, Any]) -> Page:
    """The page of a run, not yet written."""
    data = result["data"]
    made = Page(
        "Block-diagonal adapters in CLIP",
        subtitle=f"{config.model}: {data['classes']} classes, {data['train']} training and {data['test']} test images, "
        f"{config.steps} steps",
    )
    for note in result["notes"]:
        made.note(note)
    made.headline([Number.from_json(number) for number in result["headline"]])
    rows = result["methods"]
    made.section("Methods under the same budget")
    made.table(
        ["method", "trained parameters", "accuracy before, %", "accuracy after, %"],
        [[row["method"], row["trainable"], row["accuracy_before"], _estimate(row)] for row in rows],
    )
    made.section("Hyperbolic radius of the features")
    made.table(
        ["method", "side", "before", "after", "5 % to 95 % after"],
        [
            [row["method"], side, each["before"]["mean"], each["after"]["mean"], _range(each["after"])]
            for row in rows
            for side, each in row["radius"].items()
        ],
        "Rad(exp₀(z)) = 2‖z‖ for every curvature; means over test images and classes",
    )
    for row in rows:
        figure, axes = new_figure()
        for score, points in row["sweep"].items():
            x, y = [point["radius"] for point in points], [100.0 * point["accuracy"] for point in points]
            line_with_band(axes, x, y, label=score, marker="o")
        axes.set(xlabel="mean radius of the texts", ylabel="accuracy, %")
        legend(axes)
        made.figure(figure, f"{row['method']}: accuracy when the texts are brought to another radius, by score")
    made.section("How it was run")
    made.command(shlex.join(environment["argv"]))
    made.details("Configuration", to_dict(config))
    made.environment(environment)
    return made


def _estimate(row: Row) -> Estimate:
    return Estimate(row["accuracy"], wilson(row["accuracy"], row["images"]))


def _range(summary: Row) -> str:
    return f"{summary['low']:.3g} to {summary['high']:.3g}"
