"""What a HELM run found: headline numbers with intervals and twin, curves, samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from leafward.report import Result
from leafward.stats.estimate import Estimate, with_twins_named
from leafward.stats.intervals import over_seeds
from leafward.systems.helm.scoring import Scores, paired

if TYPE_CHECKING:
    from leafward.systems.helm.config import Config

Record = dict[str, Any]
Curves = Mapping[str, Sequence[Record]]
SCORED = {"loss": "held-out loss", "perplexity": "perplexity", "bits_per_byte": "bits per byte"}
SPEEDS = {"tokens_per_second": "tokens per second", "mfu": "model FLOPs utilisation"}
LOSSES = {"train/loss, eval/loss": "Loss in nats per token: training (thin) and held out (dots)"}
WATCHED = {
    "train/radius_mean": "Mean geodesic radius of the token embeddings",
    "train/load_max": "Load of the busiest expert (1: an even share)",
    "train/curvature_max": "Largest curvature of an expert",
    "train/lr": "Learning rate",
}


def result(
    config: Config, counts: Mapping[str, Any], results: Sequence[Record], scores: Sequence[Scores], curves: Curves
) -> Result:
    """What a run found; `counts`: the data by split."""
    first = results[0]
    subtitle = (
        f"{first['parameters']:,} weights, {config.geometry}{' and its twin' if config.arms.twin else ''}, "
        f"{config.arms.seeds} seed{'s' * (config.arms.seeds > 1)}, {first['tokens']:,} tokens in {config.loop.length}"
    )
    numbers = headline(config.geometry, results, scores)
    values = {"members": list(results), "data": dict(counts)}
    made = Result(f"HELM: {config.model}", subtitle, numbers, values=values)
    made.section("Curves")
    made.curves(curves, LOSSES, ylabel="nats per token")
    made.curves(curves, WATCHED)
    # The loop looks at every step and would have ended the run.
    steps = sum(records[-1]["step"] for records in curves.values() if records)
    made.text(f"Time to the first NaN or infinity in a loss or gradient: never, in {steps:,} steps.")
    if len(results) > 1:
        caption = f"Each model on the held-out text, with 95 % confidence intervals over {first['unit']}"
        show_models(made, {each["name"]: each for each in results}, {"tokens_per_second": "tokens per second"}, caption)
    made.section("Samples")
    for each in results:
        made.text(f"{each['name']} {'goes on from ' + repr(config.prompt) if config.prompt else 'begins'}:")
        made.text(each["sample"] or "(the document ended at once)")
    made.section("Data")
    rows = [[name, each["documents"], each["tokens"], each["bytes"]] for name, each in counts.items()]
    made.table(["split", "documents", "tokens", "bytes"], rows, str(config.data.source))
    return made


def show_models(made: Result, models: Mapping[str, Record], more: Mapping[str, str], caption: str) -> None:
    """A row for each model: its scores, and `more` of its record under these names."""
    made.section("Models")
    made.table(
        ["model", *SCORED.values(), *more.values()],
        [
            [
                name,
                *(Estimate.of(each[key]["value"], each[key]["interval"]) for key in SCORED),
                *(each[key] for key in more),
            ]
            for name, each in models.items()
        ],
        caption,
    )


def headline(geometry: str | None, results: Sequence[Record], scores: Sequence[Scores]) -> list[Estimate]:
    """Scores of the models of `geometry` with those of the twin beside, the paired difference, and the speed."""
    ours, twins = ([i for i, each in enumerate(results) if (each["geometry"] == geometry) == own] for own in (1, 0))
    numbers = []
    for name, words in SCORED.items():
        found, twin = (_score(name, [scores[i] for i in side]) for side in (ours, twins))
        note = "" if found and found.interval else f"no interval: too few held-out {scores[0].unit}"
        unit = {"loss": "nats"}.get(name, "")
        numbers += [found.named(words, unit=unit, better="lower", note=note, twin=twin)] if found else []
    if twins:
        pairs = [[scores[i] for i in side] for side in (ours, twins)]
        found = paired(*(pairs if geometry == "lorentz" else pairs[::-1]))
        note = "paired, lorentz − euclidean" + ", one seed" * (len(ours) == 1)
        numbers.append(found.named("difference in held-out loss", unit="nats", better="lower", note=note))
    for name, words in SPEEDS.items():
        if results[ours[0]].get(name) is not None:
            sides = [[results[i][name] for i in side] for side in (ours, twins)]
            value, twin = (Estimate(over_seeds(side).value) if side else None for side in sides)
            numbers += [value.named(words, better="higher", note="median over training", twin=twin)] if value else []
    return with_twins_named(numbers, geometry)


def _score(name: str, members: Sequence[Scores]) -> Estimate | None:
    """The mean over seeds with its interval; of one seed the interval over documents."""
    found = [each.headline()[name] for each in members]
    if len(found) > 1:
        return over_seeds([each.value for each in found])
    return found[0] if found else None
