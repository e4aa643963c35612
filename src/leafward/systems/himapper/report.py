"""What a Hi-Mapper run found: scores with those of the flat twin beside, and what the tree adds, arm by arm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from leafward.report import Result
from leafward.stats.estimate import Estimate, with_twins_named
from leafward.systems.vision.report import NAMES, ONE_SEED, Units, difference, estimate, images, scored

Record = Mapping[str, Any]
LOGGED = {
    "contrast": "Contrast of the hierarchy, in nats",
    "kl": "Divergence of the top level, in nats per coordinate",
    "curvature": "Learned curvature",
}


def result(title: str, subtitle: str, monitor: str, results: Sequence[Record], units: Units) -> Result:
    """What a run found. `units` are the held-out images' own scores, one array for each of `results`."""
    arms: dict[str, list[int]] = {}
    for index, each in enumerate(results):
        arms.setdefault(each["arm"], []).append(index)
    first, *others = arms
    twin = next((arm for arm in others if arm in ("lorentz", "euclidean")), None)
    held_out = images(units)
    numbers = scored([results[i] for i in arms[first]], [results[i] for i in arms.get(twin or "", [])], held_out)
    numbers = with_twins_named(numbers, first)
    for arm in others:
        found = difference(monitor, results, units, list(zip(arms[first], arms[arm], strict=True)))
        note = "paired; same steps, data and order" + ", one seed" * (len(arms[first]) == 1)
        numbers.append(found.named(f"{NAMES[monitor]}: {first} − {arm}", note=note))
    numbers += [_added(results[arms[first][0]], results[arms["plain"][0]])] if "plain" in others else []
    notes = [] if len(arms[first]) > 1 else [ONE_SEED]
    values = {"members": list(results), "held_out_images": held_out}
    made = Result(title, subtitle, numbers, notes=notes, values=values)
    _arms(made, {arm: [results[i] for i in own] for arm, own in arms.items()}, held_out)
    return made


def _added(ours: Record, plain: Record) -> Estimate:
    extra = ours["parameters"] - plain["parameters"]
    note = f"{100 * extra / plain['parameters']:.1f} % of the plain model's"
    return Estimate(float(extra), name="added parameters", better="lower", note=note)


def _arms(made: Result, arms: Mapping[str, Sequence[Record]], held_out: int) -> None:
    first = next(iter(arms.values()))[0]
    if "parameters" not in first:  # of an evaluation
        return
    scores = [name for name in NAMES if name in first["scores"]]
    made.section("Arms")
    made.text(
        "Every arm was trained with the same steps, data order and augmentation from the same backbone: the tree in "
        "each geometry, with or without noise, and the backbone without a tree (plain)."
    )
    made.table(
        ["arm", "seeds", "parameters", *(NAMES[name] for name in scores)],
        [
            [arm, len(members), members[0]["parameters"], *(estimate(name, members, held_out) for name in scores)]
            for arm, members in arms.items()
        ],
        "Mean over seeds (one seed: accuracies over the held-out images), 95 % confidence intervals",
    )
