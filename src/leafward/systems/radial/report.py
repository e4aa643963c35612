"""What a radial run found: means over seeds with intervals and twin, every score before and after, and the training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from leafward.report import Estimate, Result
from leafward.stats.estimate import ANY, SHARE, Direction
from leafward.stats.intervals import over_seeds

if TYPE_CHECKING:
    from leafward.systems.radial.config import Config

Record = Mapping[str, Any]
SHOWN: dict[str, tuple[str, Direction]] = {
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
PARTS = ("pull", "contrast", "hardest")


def result(config: Config, results: Sequence[Record], curves: Mapping[str, Sequence[Record]]) -> Result:
    """Means over seeds of the models in the geometry of `config`, with those of the twin beside them."""
    objective = config.objective
    geometry = objective.geometry
    ours, twins = ([each for each in results if (each["geometry"] == geometry) == own] for own in (True, False))
    after, before, twin = _means(ours), _means(ours, "before"), _means(twins) if twins else {}
    first = ours[0]
    values = {
        "before": {name: each.value for name, each in before.items()},
        "after": {name: each.value for name, each in after.items()},
        "intervals": {name: each.interval for name, each in after.items() if each.interval},
        **{name: first[name] for name in ("captions", "parameters", "validation", "steps")},
        "members": [{name: each[name] for name in KEPT} for each in results],
    }
    values |= {"twin": {name: each.value for name, each in twin.items()}} if twins else {}
    made = Result(
        "Radial Embedding",
        f"{config.model}: {objective.loss} loss, {geometry} angles, {config.train} text side, "
        f"{first['captions']['learned']} captions, {first['steps']} steps",
        _headline(geometry, ours, twins),
        notes=[] if len(ours) > 1 else [ONE_SEED],
        values=values,
    )
    made.section("Before and after")
    if "validation_tau" in after:
        made.text(f"{first['captions']['validation']} captions were kept from training, and scored as well.")
    if not after:
        made.note("Nothing was scored: --test, --hyperlex or --validation say on what, before and after.")
    made.table(
        ["", "before", "after", "difference", *(["twin"] if twins else [])],
        [
            [name, before[name].value, each, each.number - before[name].number, *([twin[name].value] if twins else [])]
            for name, each in after.items()
        ],
        "All scores; angles and radii are taken about the root"
        + ("; the twin learned in the other geometry, with equal parameters and data" if twins else ""),
    )
    if len(results) > 1:
        made.section("Models")
        rows = [[each["name"], each["steps"], *(each["after"][name] for name in after)] for each in results]
        made.table(["model", "steps", *after], rows, "Scores of each model after its training")
    _course(made, next(iter(curves.values())))
    return made


def _means(members: Sequence[Record], when: str = "after") -> dict[str, Estimate]:
    """Every score before or after the training: over seeds, of one seed with its interval over the test's items."""
    names = members[0][when]
    if len(members) == 1:
        intervals = members[0]["intervals"] if when == "after" else {}
        return {name: Estimate.of(value, intervals.get(name)) for name, value in names.items()}
    return {name: over_seeds([each[when][name] for each in members], _range(name)) for name in names}


def _range(name: str) -> tuple[float, float]:
    """Between which numbers a score always lies."""
    if name in ("precision", "recall") or name.startswith("retrieval"):
        return SHARE
    return (-1.0, 1.0) if name in ("tau", "validation_tau") or name.startswith("hyperlex") else ANY


def _headline(geometry: str, ours: Sequence[Record], twins: Sequence[Record]) -> list[Estimate]:
    """The numbers that matter, with what they were before, and over several seeds their differences to the twin's."""
    after, before, twin = _means(ours), _means(ours, "before"), _means(twins) if twins else {}
    over = "" if len(ours) > 1 else "; interval over the test's items"
    name_of_twin = "hyperbolic twin" if geometry == "euclidean" else "Euclidean twin"
    numbers = [
        after[name].named(
            label,
            better=better,
            note=f"before: {before[name].number:.3f}{over}",
            twin=twin.get(name),
            twin_name=name_of_twin,
        )
        for name, (label, better) in SHOWN.items()
        if name in after
    ]
    if len(twins) > 1:
        pairs = list(zip(*((ours, twins) if geometry == "lorentz" else (twins, ours)), strict=True))
        for name, (label, better) in SHOWN.items():
            if name in after:
                found = over_seeds([curved["after"][name] - flat["after"][name] for curved, flat in pairs])
                note = "paired, lorentz − euclidean"
                numbers.append(found.named(f"difference in {label}", better=better, note=note))
    return numbers


def _course(made: Result, records: Sequence[Record]) -> None:
    rows = [record for record in records if f"train/{PARTS[0]}" in record]
    if len(rows) > 1:
        made.section("Training")
        lines = {name: [{"step": row["step"], "train/part": row[f"train/{name}"]} for row in rows] for name in PARTS}
        caption = "Parts of the loss, means between log lines, before they are weighted"
        made.curves(lines, {"train/part": caption}, ylabel="radians (pull: half of one minus the cosine)")
