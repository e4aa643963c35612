"""What a HELM run found: headline numbers with intervals and twin, curves, samples, and the page that shows them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leafward.config import to_dict
from leafward.files import read_record
from leafward.report import SERIES, Estimate, Number, Page, legend, line_with_band, new_figure
from leafward.report.number import with_twins_named
from leafward.stats.intervals import Interval, mean_interval
from leafward.systems.helm.scoring import Scores, paired

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from leafward.systems.helm.config import Config

Record = dict[str, Any]
Curves = Mapping[str, Sequence[Record]]
SCORED = {"loss": "held-out loss", "perplexity": "perplexity", "bits_per_byte": "bits per byte"}
SPEEDS = {"tokens_per_second": "tokens per second", "mfu": "model FLOPs utilisation"}
WATCHED = {
    "train/radius_mean": "Mean geodesic radius of the token embeddings",
    "train/load_max": "Load of the busiest expert (1: an even share)",
    "train/curvature_max": "Largest curvature of an expert",
    "train/lr": "Learning rate",
}


def result(
    config: Config, counts: Mapping[str, Any], results: Sequence[Record], scores: Sequence[Scores]
) -> dict[str, Any]:
    """What result.json holds."""
    return {
        "headline": [number.to_json() for number in headline(config.geometry, results, scores)],
        "members": list(results),
        "data": dict(counts),
        "notes": [],
    }


def headline(geometry: str | None, results: Sequence[Record], scores: Sequence[Scores]) -> list[Number]:
    """Scores of the models of `geometry` with those of the twin beside, the paired difference, and the speed."""
    ours = [each for each in results if each["geometry"] == geometry]
    twins = [each for each in results if each["geometry"] != geometry]
    numbers = [_scored(name, ours, twins) for name in SCORED]
    if twins:
        numbers.append(_difference(str(geometry), scores[: len(ours)], scores[len(ours) :]))
    numbers += [_speed(name, ours, twins) for name in SPEEDS if ours[0].get(name) is not None]
    return with_twins_named(numbers, geometry)


def _difference(geometry: str, ours: Sequence[Scores], twins: Sequence[Scores]) -> Number:
    """Lorentz − Euclidean in held-out loss, paired."""
    lorentz, euclidean = (ours, twins) if geometry == "lorentz" else (twins, ours)
    value, interval, over = paired(lorentz, euclidean)
    note = f"paired, lorentz − euclidean, over {over}"
    return Number("difference in held-out loss", value, interval, unit="nats", better="lower", note=note)


def _scored(name: str, ours: Sequence[Record], twins: Sequence[Record]) -> Number:
    value, interval, over = _over(name, ours)
    twin, twin_interval, _ = _over(name, twins) if twins else (None, None, "")
    unit = {"loss": "nats"}.get(name, "")
    note = f"interval over {over}" if interval is not None else f"no interval: too few {over}"
    return Number(SCORED[name], value, interval, twin, twin_interval, unit, "lower", note)


def _over(name: str, members: Sequence[Record]) -> tuple[float, Interval | None, str]:
    """The mean over seeds with its interval; of one seed the interval over documents."""
    if len(members) > 1:
        return *mean_interval([each[name]["value"] for each in members]), f"{len(members)} seeds"
    return members[0][name]["value"], members[0][name]["interval"], f"held-out {members[0]['unit']}"


def _speed(name: str, ours: Sequence[Record], twins: Sequence[Record]) -> Number:
    value = mean_interval([each[name] for each in ours])[0]
    twin = mean_interval([each[name] for each in twins])[0] if twins else None
    return Number(SPEEDS[name], value, twin=twin, better="higher", note="median over training")


def write(config: Config, result: dict[str, Any], curves: Curves, out: Path) -> None:
    """Write report.html in the run directory `out`."""
    environment = read_record(out / "env.json")
    page(config, result, curves, environment).write(out / "report.html")


def page(config: Config, result: dict[str, Any], curves: Curves, environment: Record) -> Page:
    """The page, not yet written."""
    first = result["members"][0]
    made = Page(
        f"HELM: {config.model}",
        subtitle=f"{first['parameters']:,} weights, {config.geometry}{' and its twin' if config.arms.twin else ''}, "
        f"{config.arms.seeds} seed{'s' * (config.arms.seeds > 1)}, {first['tokens']:,} tokens in {config.loop.length}",
    )
    for note in result["notes"]:
        made.note(note)
    made.headline([Number.from_json(number) for number in result["headline"]])
    made.section("Curves")
    made.figure(_losses(curves), "Loss in nats per token: training (thin) and held out (dots)")
    for name, caption in WATCHED.items():
        if any(name in record for records in curves.values() for record in records):
            made.figure(_curve(curves, name), caption)
    # The loop looks at every step and would have ended the run.
    steps = sum(records[-1]["step"] for records in curves.values() if records)
    made.text(f"Time to the first NaN or infinity in a loss or gradient: never, in {steps:,} steps.")
    if len(result["members"]) > 1:
        made.section("Models")
        made.table(
            ["model", *SCORED.values(), "tokens per second"],
            [
                [
                    each["name"],
                    *(Estimate(each[name]["value"], each[name]["interval"]) for name in SCORED),
                    each["tokens_per_second"],
                ]
                for each in result["members"]
            ],
            f"Each model on the held-out text, with 95 % intervals over {first['unit']}",
        )
    made.section("Samples")
    for each in result["members"]:
        made.text(f"{each['name']} {'goes on from ' + repr(config.prompt) if config.prompt else 'begins'}:")
        made.text(each["sample"] or "(the document ended at once)")
    made.section("Data")
    made.table(
        ["split", "documents", "tokens", "bytes"],
        [[name, each["documents"], each["tokens"], each["bytes"]] for name, each in result["data"].items()],
        str(config.data.source),
    )
    made.section("How it was run")
    made.command(shlex.join(environment["argv"]))
    made.details("Configuration", to_dict(config))
    made.environment(environment)
    return made


def _series(records: Sequence[Record], name: str) -> tuple[list[int], list[float]]:
    found = [(record["step"], record[name]) for record in records if record.get(name) is not None]
    return [step for step, _ in found], [value for _, value in found]


def _losses(curves: Curves) -> Figure:
    figure, axes = new_figure()
    for index, (member, records) in enumerate(curves.items()):
        colour = SERIES[index % len(SERIES)]
        line_with_band(axes, *_series(records, "train/loss"), color=colour, linewidth=0.8)
        line_with_band(axes, *_series(records, "eval/loss"), color=colour, marker="o", label=member)
    axes.set(xlabel="step", ylabel="nats per token")
    legend(axes)
    return figure


def _curve(curves: Curves, name: str) -> Figure:
    figure, axes = new_figure()
    for index, (member, records) in enumerate(curves.items()):
        line_with_band(axes, *_series(records, name), color=SERIES[index % len(SERIES)], label=member)
    axes.set(xlabel="step", ylabel=name.partition("/")[2].replace("_", " "))
    if len(curves) > 1:
        legend(axes)
    return figure
