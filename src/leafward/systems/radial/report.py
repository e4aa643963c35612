"""What a radial run found: means over seeds with intervals and twin, and the page with every score before and after."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leafward.config import to_dict
from leafward.report import Estimate, Number, Page, legend, line_with_band, new_figure
from leafward.stats.intervals import Interval, mean_interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from leafward.systems.radial.config import Config


Record = Mapping[str, Any]
SHOWN = {
    "tau": ("τ_d: radius against level", "higher"),
    "precision": ("path precision", "higher"),
    "recall": ("path recall", "higher"),
    "hyperlex_all": ("HyperLex ρ", "higher"),
    "retrieval_image_to_text@1": ("retrieval R@1", "higher"),
    "validation_tau": ("τ_d of the captions kept from training", "higher"),
}
"""Name of a score -> what it is called on the page, and which way is better."""
KEPT = ("name", "geometry", "seed", "before", "after", "steps")
"""What result.json holds of each model."""
ONE_SEED = "One seed: intervals are over the test's items, not over seeds."


def summarise(geometry: str, results: Sequence[Record]) -> dict[str, Any]:
    """What result.json holds: means over seeds of the models in `geometry`, with those of the twin beside them."""
    ours = [each for each in results if each["geometry"] == geometry]
    twins = [each for each in results if each["geometry"] != geometry]
    after, intervals = _means(ours)
    found = {
        "headline": [number.to_json() for number in _headline(geometry, ours, twins)],
        "before": _means(ours, "before")[0],
        "after": after,
        "intervals": intervals,
        **{name: ours[0][name] for name in ("captions", "parameters", "validation", "steps")},
        "members": [{name: each[name] for name in KEPT} for each in results],
        "notes": [] if len(ours) > 1 else [ONE_SEED],
    }
    return found | ({"twin": _means(twins)[0]} if twins else {})


def _means(members: Sequence[Record], when: str = "after") -> tuple[dict[str, float], dict[str, Interval]]:
    """Every score before or after the training and its interval: over seeds, of one seed over the items of the test."""
    if len(members) == 1:
        return members[0][when], members[0]["intervals"]
    found = {name: mean_interval([each[when][name] for each in members], *_range(name)) for name in members[0][when]}
    intervals = {name: interval for name, (_, interval) in found.items() if interval is not None}
    return {name: value for name, (value, _) in found.items()}, intervals


def _range(name: str) -> tuple[float, float]:
    """Between which numbers a score always lies."""
    if name in ("precision", "recall") or name.startswith("retrieval"):
        return 0.0, 1.0
    return (-1.0, 1.0) if name in ("tau", "validation_tau") or name.startswith("hyperlex") else (-math.inf, math.inf)


def _headline(geometry: str, ours: Sequence[Record], twins: Sequence[Record]) -> list[Number]:
    """The numbers that matter, with what they were before, and over several seeds their differences to the twin's."""
    (after, intervals), (twin, twin_intervals) = _means(ours), _means(twins) if twins else ({}, {})
    before = _means(ours, "before")[0]
    over = f"{len(ours)} seeds" if len(ours) > 1 else "the test's items"
    numbers = [
        Number(
            label,
            after[name],
            intervals.get(name),
            twin.get(name),
            twin_intervals.get(name),
            better=better,
            note=f"before: {before[name]:.3f}; interval over {over}",
            twin_name="hyperbolic twin" if geometry == "euclidean" else "Euclidean twin",
        )
        for name, (label, better) in SHOWN.items()
        if name in after
    ]
    return [*numbers, *(_differences(geometry, ours, twins) if len(twins) > 1 else [])]


def _differences(geometry: str, ours: Sequence[Record], twins: Sequence[Record]) -> list[Number]:
    """Lorentz − Euclidean of every headline score, paired by seed."""
    pairs = list(zip(*((ours, twins) if geometry == "lorentz" else (twins, ours)), strict=True))
    note = f"paired, lorentz − euclidean, over {len(pairs)} seeds"
    return [
        Number(
            f"difference in {label}",
            *mean_interval([curved["after"][name] - flat["after"][name] for curved, flat in pairs]),
            better=better,
            note=note,
        )
        for name, (label, better) in SHOWN.items()
        if name in ours[0]["after"]
    ]


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
    for note in result["notes"]:
        page.note(note)
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
            [
                name,
                before,
                Estimate(value, result["intervals"].get(name)),
                value - before,
                *([twin[name]] if twin else []),
            ]
            for (name, value), before in zip(result["after"].items(), result["before"].values(), strict=True)
        ],
        "All scores; angles and radii are taken about the root"
        + ("; the twin learned in the other geometry, with equal parameters and data" if twin else ""),
    )
    if len(result["members"]) > 1:
        page.section("Models")
        names = list(result["after"])
        rows = [[each["name"], each["steps"], *(each["after"][name] for name in names)] for each in result["members"]]
        page.table(["model", "steps", *names], rows, "Scores of each model after its training")
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
