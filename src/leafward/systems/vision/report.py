"""What a vision run found: headline numbers with intervals and twin, the paired difference, curves, and the page."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from leafward.config import to_dict
from leafward.files import read_record
from leafward.report import SERIES, Number, Page, legend, new_figure
from leafward.report.number import with_twins_named
from leafward.stats.intervals import Interval, mean_interval, share_interval

if TYPE_CHECKING:
    from leafward.systems.vision.config import Config

Record = Mapping[str, Any]
NAMES = {
    "top1": "top-1 accuracy",
    "top5": "top-5 accuracy",
    "hierarchical_f1": "hierarchical F1",
    "mistake_severity": "mistake severity (LCA height)",
    "miou": "mean IoU",
    "pixel_accuracy": "pixel accuracy",
    "box_ap": "box AP",
    "mask_ap": "mask AP",
    "box_ap50": "box AP at IoU 0.5",
    "mask_ap50": "mask AP at IoU 0.5",
}
LOWER = ("mistake_severity",)
ONE_SEED = "One seed: the scores have no interval over seeds."
SHARES = ("top1", "top5")
"""Scores that are a share of the held-out images, so that one model has an interval over those."""


def result(
    geometry: str, monitor: str, results: Sequence[Record], units: Sequence[np.ndarray | None]
) -> dict[str, Any]:
    """What result.json holds. `units` are the held-out images' own scores, one array for each of `results`."""
    ours = [i for i, each in enumerate(results) if each["geometry"] == geometry]
    twins = [i for i, each in enumerate(results) if each["geometry"] != geometry]
    images = 0 if units[0] is None else len(units[0])
    found = with_twins_named(scored([results[i] for i in ours], [results[i] for i in twins], images), geometry)
    if twins:
        pairs = list(zip(ours, twins, strict=True))
        if geometry != "lorentz":
            pairs = [(b, a) for a, b in pairs]
        value, interval, over = difference(monitor, results, units, pairs)
        note = f"paired, lorentz − euclidean, over {over}"
        found.append(Number(f"difference in {NAMES[monitor]}", value, interval, better="higher", note=note))
    notes = [] if len(ours) > 1 else [ONE_SEED]
    return {"headline": [number.to_json() for number in found], "members": list(results), "notes": notes}


def scored(ours: Sequence[Record], twins: Sequence[Record], images: int) -> list[Number]:
    """Every score of one arm with that of its twin beside it. `images`: how many were held out, 0: not known."""
    numbers = []
    for name in (name for name in NAMES if name in ours[0]["scores"]):
        value, interval = estimate(name, ours, images)
        twin, twin_interval = estimate(name, twins, images) if twins else (None, None)
        note = f"{len(ours)} seeds" if len(ours) > 1 else "one seed"
        if len(ours) == 1 and interval is not None:
            note += f", Wilson's interval over {images:,} held-out images"
        better = "lower" if name in LOWER else "higher"
        numbers.append(Number(NAMES[name], value, interval, twin, twin_interval, better=better, note=note))
    return numbers


def estimate(name: str, members: Sequence[Record], images: int) -> tuple[float | None, Interval | None]:
    """Mean and interval of a score over seeds; that of one model over the held-out images where it is a share."""
    values = [member["scores"][name] for member in members]
    if None in values:
        return None, None
    value, interval = mean_interval(values, 0.0, float("inf") if name in LOWER else 1.0)
    if len(values) == 1 and images and name in SHARES:
        interval = share_interval(round(value * images), images)
    return value, interval


def difference(
    monitor: str, results: Sequence[Record], units: Sequence[np.ndarray | None], pairs: Sequence[tuple[int, int]]
) -> tuple[float, Interval | None, str]:
    """First − second of each pair over seeds; with one seed over the held-out images where they have own scores.

    Returns the mean, its interval and what it is taken over, in words.
    """
    a, b = (units[i] for i in pairs[0])
    if len(pairs) == 1 and a is not None and b is not None:
        return *mean_interval(a - b), f"{len(a)} held-out images, one seed"
    gaps = [results[i]["scores"][monitor] - results[j]["scores"][monitor] for i, j in pairs]
    return *mean_interval(gaps), f"{len(pairs)} seed{'s' * (len(pairs) > 1)}"


def write(config: Config, monitor: str, result: Record, curves: Mapping[str, Sequence[Record]], out: Path) -> None:
    """report.html of a run."""
    page = Page(f"{config.model}: {config.data.task}", subtitle=str(config.data.source))
    page.headline([Number.from_json(record) for record in result["headline"]])
    for note in result["notes"]:
        page.note(note)
    scores: list[str] = sorted({name for member in result["members"] for name in member["scores"]})
    page.section("Models")
    rows = [[m["name"], m["parameters"], m["step"], *(m["scores"].get(s) for s in scores)] for m in result["members"]]
    page.table(["model", "parameters", "step", *(NAMES.get(s, s) for s in scores)], rows)
    page.section("Training")
    for key, title in (("train/loss", "Training loss"), (f"eval/{monitor}", f"Held-out {NAMES[monitor]}")):
        figure, axes = new_figure()
        for index, (name, records) in enumerate(curves.items()):
            points = [(r["step"], r[key]) for r in records if r.get(key) is not None]
            if points:
                axes.plot(*zip(*points, strict=True), label=name, color=SERIES[index % len(SERIES)], marker=".")
        axes.set_xlabel("step")
        axes.set_ylabel(title.lower())
        if len(curves) > 1:
            legend(axes)
        page.figure(figure, title)
    page.section("How")
    environment = read_record(out / "env.json")
    page.command(shlex.join(environment["argv"]))
    page.details("Configuration", to_dict(config))
    page.environment(environment)
    page.write(out / "report.html")
