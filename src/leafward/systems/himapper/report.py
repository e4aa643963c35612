"""What a Hi-Mapper run found: scores with those of the flat twin beside, paired differences, curves, and the page."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from leafward.config import to_dict
from leafward.files import read_record
from leafward.report import SERIES, Estimate, Number, Page, legend, new_figure
from leafward.report.number import with_twins_named
from leafward.systems.vision.report import NAMES, ONE_SEED, difference, estimate, scored

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from leafward.systems.himapper.config import Config

Record = Mapping[str, Any]
Curves = Mapping[str, Sequence[Record]]
Units = Sequence[np.ndarray | None]
LOGGED = {
    "train/loss": "Training loss",
    "train/contrast": "Contrast of the hierarchy, in nats",
    "train/kl": "Divergence of the top level, in nats per coordinate",
    "train/curvature": "Learned curvature",
}


def result(monitor: str, results: Sequence[Record], units: Units) -> dict[str, Any]:
    """What result.json holds. `units` are the held-out images' own scores, one array for each of `results`."""
    arms: dict[str, list[int]] = {}
    for index, each in enumerate(results):
        arms.setdefault(each["arm"], []).append(index)
    first, *others = arms
    twin = next((arm for arm in others if arm in ("lorentz", "euclidean")), None)
    images = 0 if units[0] is None else len(units[0])
    numbers = scored([results[i] for i in arms[first]], [results[i] for i in arms.get(twin or "", [])], images)
    numbers = with_twins_named(numbers, first)
    numbers += [_difference(monitor, first, arm, arms, results, units) for arm in others]
    numbers += [_added(results, arms[first], arms["plain"])] if "plain" in others else []
    notes = [] if len(arms[first]) > 1 else [ONE_SEED]
    return {
        "headline": [number.to_json() for number in numbers],
        "members": list(results),
        "held_out_images": images,
        "notes": notes,
    }


def _difference(
    monitor: str, first: str, other: str, arms: Mapping[str, list[int]], results: Sequence[Record], units: Units
) -> Number:
    """Ours − theirs at the same budget."""
    pairs = list(zip(arms[first], arms[other], strict=True))
    value, interval, over = difference(monitor, results, units, pairs)
    name = f"{NAMES[monitor]}: {first} − {other}"
    return Number(name, value, interval, better="higher", note=f"paired over {over}; same steps, data and order")


def _added(results: Sequence[Record], ours: Sequence[int], plain: Sequence[int]) -> Number:
    extra = results[ours[0]]["parameters"] - results[plain[0]]["parameters"]
    note = f"{100 * extra / results[plain[0]]['parameters']:.1f} % of the plain model's"
    return Number("added parameters", float(extra), better="lower", note=note)


def write(config: Config, monitor: str, result: Record, curves: Curves, out: Path) -> None:
    """report.html of a run."""
    first = result["members"][0]
    page = Page(f"Hi-Mapper on {first['backbone']}: {config.data.task}", subtitle=str(config.data.source))
    for note in result["notes"]:
        page.note(note)
    page.headline([Number.from_json(record) for record in result["headline"]])
    page.section("Arms")
    page.text(
        "Every arm was trained with the same steps, data order and augmentation from the same backbone: the tree in "
        "each geometry, with or without noise, and the backbone without a tree (plain)."
    )
    scores, images = [name for name in NAMES if name in first["scores"]], result["held_out_images"]
    arms = list(dict.fromkeys(member["arm"] for member in result["members"]))
    by_arm = {arm: [member for member in result["members"] if member["arm"] == arm] for arm in arms}
    rows = [
        [arm, len(members), members[0]["parameters"], *(Estimate(*estimate(name, members, images)) for name in scores)]
        for arm, members in by_arm.items()
    ]
    page.table(
        ["arm", "seeds", "parameters", *(NAMES[name] for name in scores)],
        rows,
        "Mean over seeds (one seed: accuracies over the held-out images), 95 % intervals",
    )
    page.section("Training")
    further = {f"train/{name}": f"Loss {name}" for name in config.losses.__struct_fields__}
    for key, title in {**further, **LOGGED, f"eval/{monitor}": f"Held-out {NAMES[monitor]}"}.items():
        if any(key in record for records in curves.values() for record in records):
            page.figure(_curve(curves, key), title)
    page.section("How it was run")
    environment = read_record(out / "env.json")
    page.command(shlex.join(environment["argv"]))
    page.details("Configuration", to_dict(config))
    page.environment(environment)
    page.write(out / "report.html")


def _curve(curves: Curves, key: str) -> Figure:
    figure, axes = new_figure()
    for index, (name, records) in enumerate(curves.items()):
        points = [(record["step"], record[key]) for record in records if record.get(key) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), label=name, color=SERIES[index % len(SERIES)], marker=".")
    axes.set(xlabel="step", ylabel=key.partition("/")[2])
    if len(curves) > 1:
        legend(axes)
    return figure
