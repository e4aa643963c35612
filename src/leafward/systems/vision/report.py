"""What a run of vision models found: scores with those of the twin beside, paired differences, and curves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from leafward.report import Result
from leafward.stats.estimate import SHARE, Estimate, with_twins_named
from leafward.stats.intervals import over_samples, over_seeds

Record = Mapping[str, Any]
Units = Sequence[np.ndarray | None]
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
SHARES = ("top1", "top5")
"""Scores that are a share of the held-out images, so that one model has an interval over those."""
ONE_SEED = "One seed: the scores have no interval over seeds."
HELD_OUT = "held-out images"


def result(title: str, subtitle: str, geometry: str, monitor: str, results: Sequence[Record], units: Units) -> Result:
    """What a run found. `units` are the held-out images' own scores, one array for each of `results`."""
    ours, twins = ([i for i, each in enumerate(results) if (each["geometry"] == geometry) == own] for own in (1, 0))
    numbers = scored([results[i] for i in ours], [results[i] for i in twins], images(units))
    numbers = with_twins_named(numbers, geometry)
    if twins:
        pairs = list(zip(ours, twins, strict=True))
        pairs = pairs if geometry == "lorentz" else [(b, a) for a, b in pairs]
        found = difference(monitor, results, units, pairs)
        numbers.append(found.named(f"difference in {NAMES[monitor]}", note="paired, lorentz − euclidean"))
    notes = [] if len(ours) > 1 else [ONE_SEED]
    return Result(title, subtitle, numbers, notes=notes, values={"members": list(results)})


def images(units: Units) -> int:
    """How many were held out; 0: not known."""
    return 0 if units[0] is None else len(units[0])


def scored(ours: Sequence[Record], twins: Sequence[Record], held_out: int) -> list[Estimate]:
    """Every score of one arm with that of its twin beside it."""
    numbers = []
    for name in (name for name in NAMES if name in ours[0]["scores"]):
        twin = estimate(name, twins, held_out) if twins else None
        better = "lower" if name in LOWER else "higher"
        note = "" if len(ours) > 1 else "one seed"
        numbers.append(estimate(name, ours, held_out).named(NAMES[name], better=better, note=note, twin=twin))
    return numbers


def estimate(name: str, members: Sequence[Record], held_out: int) -> Estimate:
    """Mean and interval of a score over seeds; that of one model over the held-out images where it is a share."""
    possible = (0.0, math.inf) if name in LOWER else SHARE
    samples = held_out if name in SHARES else 0
    return over_seeds([member["scores"][name] for member in members], possible, samples=samples, of=HELD_OUT)


def difference(monitor: str, results: Sequence[Record], units: Units, pairs: Sequence[tuple[int, int]]) -> Estimate:
    """First − second of each pair over seeds; with one seed over the held-out images where they have own scores."""
    a, b = (units[i] for i in pairs[0])
    if len(pairs) == 1 and a is not None and b is not None:
        found = over_samples(a - b, of=HELD_OUT)
    else:
        found = over_seeds([results[i]["scores"][monitor] - results[j]["scores"][monitor] for i, j in pairs])
    return found.named("", better="higher")


def show_models(made: Result, members: Sequence[Record], *more: str, terminal: bool = False) -> None:
    """A row for each model of the run, with `more` of its record, and what was measured of it."""
    scores = list(dict.fromkeys(name for member in members for name in member["scores"]))
    made.section("Models")
    made.table(
        ["model", *more, *(NAMES.get(name) or name for name in scores)],
        [[m["name"], *(m[key] for key in more), *(m["scores"].get(name) for name in scores)] for m in members],
        terminal=terminal,
    )


def show_training(made: Result, monitor: str, curves: Mapping[str, Sequence[Record]], **more: str) -> None:
    """The course of the training; `more`: other names of train/ with their captions."""
    made.section("Training")
    logged = {"train/loss": "Training loss", **{f"train/{name}": caption for name, caption in more.items()}}
    made.curves(curves, logged | {f"eval/{monitor}": f"Held-out {NAMES[monitor]}"})
