"""The page of a radial run: every score before and after, and the course of the training."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leafward.config import to_dict
from leafward.report import Number, Page, legend, line_with_band, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from leafward.systems.radial.config import Config


def write(
    config: Config, result: dict[str, Any], environment: dict[str, Any], records: list[dict[str, Any]], out: Path
) -> None:
    """Write report.html in the run directory `out`; `records`: the metrics of the training."""
    objective = config.objective
    page = Page(
        "Radial Embedding",
        subtitle=f"{config.model}: {objective.loss} loss, {objective.geometry} angles, {config.train} text side, "
        f"{result['captions']['learned']} captions, {result['steps']} steps",
    )
    page.headline([Number.from_json(number) for number in result["headline"]])
    page.section("Before and after")
    if "validation_tau" in result["after"]:
        page.text(f"{result['captions']['validation']} captions were kept from training, and scored as well.")
    twin = result.get("twin")
    if not result["after"]:
        page.note("Nothing was scored: --test, --hyperlex or --validation say on what, before and after.")
    page.table(
        ["", "before", "after", "difference", *(["twin"] if twin else [])],
        [
            [name, before, value, value - before, *([twin[name]] if twin else [])]
            for (name, value), before in zip(result["after"].items(), result["before"].values(), strict=True)
        ],
        "All scores; angles and radii are taken about the root"
        + ("; the twin learned in the other geometry, with equal parameters and data" if twin else ""),
    )
    figure = _course(records)
    if figure is not None:
        page.section("Training")
        page.figure(figure, "Parts of the loss, means between log lines, before they are weighted")
    page.section("How it was run")
    page.command(shlex.join(environment["argv"]))
    page.details("Configuration", to_dict(config))
    page.environment(environment)
    page.write(out / "report.html")


def _course(records: list[dict[str, Any]]) -> Figure | None:
    rows = [record for record in records if "train/pull" in record]
    if len(rows) < 2:
        return None
    figure, axes = new_figure()
    for name in ("pull", "contrast", "hardest"):
        line_with_band(axes, [row["step"] for row in rows], [row[f"train/{name}"] for row in rows], label=name)
    axes.set(xlabel="step", ylabel="radians (pull: half of one minus the cosine)")
    legend(axes)
    return figure
