"""What a radial run found: every score before and after, and the course of the training."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from leafward.report import Estimate, Result
from leafward.stats.estimate import Direction, sound

if TYPE_CHECKING:
    from leafward.systems.radial.config import Config

Record = dict[str, Any]
SHOWN: dict[str, tuple[str, Direction]] = {
    "tau": ("τ_d: radius against level", "higher"),
    "precision": ("path precision", "higher"),
    "recall": ("path recall", "higher"),
    "hyperlex_all": ("HyperLex ρ", "higher"),
    "retrieval_image_to_text@1": ("retrieval R@1", "higher"),
    "validation_tau": ("τ_d of the captions kept from training", "higher"),
}
"""Name of a number -> what it is called on the page, and which way is better."""
PARTS = ("pull", "contrast", "hardest")


def result(config: Config, results: Sequence[Record], curves: Mapping[str, Sequence[Record]]) -> Result:
    """What was found of the model, and of its twin in the other geometry where there is one."""
    found, objective = results[0], config.objective
    numbers, *others = ([Estimate.from_json(each) for each in member["headline"]] for member in results)
    values = {key: value for key, value in found.items() if key != "headline"}
    twin = results[1]["after"] if len(results) > 1 else None
    if twin:
        name = "hyperbolic twin" if objective.geometry == "euclidean" else "Euclidean twin"
        pairs = zip(numbers, others[0], strict=True)
        numbers = [dataclasses.replace(own, twin=other, twin_name=name) for own, other in pairs]
        values["twin"] = twin
    made = Result(
        "Radial Embedding",
        f"{config.model}: {objective.loss} loss, {objective.geometry} angles, {config.train} text side, "
        f"{found['captions']['learned']} captions, {found['steps']} steps",
        numbers,
        values=values,
    )
    made.section("Before and after")
    if "validation_tau" in found["after"]:
        made.text(f"{found['captions']['validation']} captions were kept from training, and scored as well.")
    if not found["after"]:
        made.note("Nothing was scored: --test, --hyperlex or --validation say on what, before and after.")
    made.table(
        ["", "before", "after", "difference", *(["twin"] if twin else [])],
        [
            [name, before, value, value - before, *([twin[name]] if twin else [])]
            for (name, value), before in zip(found["after"].items(), found["before"].values(), strict=True)
        ],
        "All scores; angles and radii are taken about the root"
        + ("; the twin learned in the other geometry, with equal parameters and data" if twin else ""),
    )
    _course(made, next(iter(curves.values())))
    return made


def headline(found: Record) -> list[Estimate]:
    """The numbers that matter, with what they were before; intervals are over the items of the test, not over seeds."""
    return [
        Estimate(
            found["after"][name],
            sound(found["intervals"].get(name)),
            label,
            better=better,
            note=f"before: {found['before'][name]:.3f}; interval over the test's items",
        )
        for name, (label, better) in SHOWN.items()
        if name in found["after"]
    ]


def _course(made: Result, records: Sequence[Record]) -> None:
    rows = [record for record in records if f"train/{PARTS[0]}" in record]
    if len(rows) > 1:
        made.section("Training")
        lines = {name: [{"step": row["step"], "train/part": row[f"train/{name}"]} for row in rows] for name in PARTS}
        caption = "Parts of the loss, means between log lines, before they are weighted"
        made.curves(lines, {"train/part": caption}, ylabel="radians (pull: half of one minus the cosine)")
