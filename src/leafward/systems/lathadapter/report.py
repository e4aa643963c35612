"""What a few-shot run found: means over seeds with intervals, paired differences, and the page that shows them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from leafward.config import to_dict
from leafward.data.fewshot import FeatureSet, harmonic_mean
from leafward.report import Estimate, Number, Page, legend, line_with_band, new_figure
from leafward.report.figures import LIGHT, SERIES
from leafward.stats.intervals import Interval, mean_interval, share_interval

if TYPE_CHECKING:
    from leafward.systems.lathadapter.config import Config

Row = dict[str, Any]
Key = tuple[str, int, str]
"""Method, shots, test."""
HM = "harmonic mean"
MISTAKES = {
    "mistake_severity": "severity",
    "lca_height": "LCA height",
    "f1": "F1",
    "decided_lca_height": "height, decided",
    "decided_f1": "F1, decided",
    "backed_f1": "F1, backed off",
    "backed_true": "true, %",
}


def with_harmonic_means(rows: Sequence[Row]) -> list[Row]:
    """The rows and, for each training that was scored on base and new, one with the harmonic mean of the two."""
    found: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        found.setdefault((row["method"], row["shots"], row["seed"]), {})[row["test"]] = row
    means = [
        {**scores["base"], "test": HM, "images": None, "hierarchy": None}
        | {"accuracy": harmonic_mean(scores["base"]["accuracy"], scores["new"]["accuracy"])}
        for scores in found.values()
        if {"base", "new"} <= scores.keys()
    ]
    return [*rows, *means]


def summarise(config: Config, data: FeatureSet, rows: Sequence[Row]) -> dict[str, Any]:
    """The content of result.json: headline numbers, a table of means, paired differences, and every score."""
    rows = with_harmonic_means(rows)
    by_key: dict[Key, dict[int, Row]] = {}
    for row in rows:
        by_key.setdefault((row["method"], row["shots"], row["test"]), {})[row["seed"]] = row
    cells = {key: Estimate(*_accuracy(list(by_seed.values()))) for key, by_seed in by_key.items()}
    table = [
        {"method": method, "shots": shots, "test": test, "accuracy": cell.value, "interval": cell.interval}
        for (method, shots, test), cell in cells.items()
    ]
    differences = []
    for host in config.hosts:
        ours = f"{host} + LatHAdapter"
        for other, meaning in ((host, "over the host alone"), (f"{host} + Euclidean twin", "over the Euclidean twin")):
            for (method, shots, test), scores in by_key.items():
                against = by_key.get((other, shots, test))
                if method != ours or against is None:
                    continue
                paired = [row["accuracy"] - against[seed]["accuracy"] for seed, row in scores.items()]
                value, interval = mean_interval(paired)
                differences.append(
                    {
                        "host": host,
                        "gain": meaning,
                        "shots": shots,
                        "test": test,
                        "difference": value,
                        "interval": interval,
                    }
                )
    return {
        "headline": [number.to_json() for number in _headline(config, cells)],
        "protocol": config.data.protocol,
        "data": {"name": data.name, "images": len(data.images), "classes": len(data.texts)},
        "table": table,
        "differences": differences,
        "scores": rows,
        "notes": _notes(config, rows),
    }


def _headline(config: Config, cells: dict[Key, Estimate]) -> list[Number]:
    """The last number of shots; the harmonic mean where there is one, else every test."""
    shots = config.data.shots[-1]
    tests = list(dict.fromkeys(test for _, _, test in cells))
    numbers = []
    for host in config.hosts or config.baselines:
        for test in [HM] if HM in tests else tests:
            label = f"{host} + LatHAdapter" if host in config.hosts else host
            ours, twin = cells[label, shots, test], cells.get((f"{host} + Euclidean twin", shots, test))
            alone = cells[host, shots, test].value
            numbers.append(
                Number(
                    f"{label}: {test}",
                    ours.value,
                    interval=ours.interval,
                    twin=twin.value if twin else None,
                    twin_interval=twin.interval if twin else None,
                    unit="%",
                    better="higher",
                    note=f"{shots} shots; {host} alone {alone:.2f}" if label != host else f"{shots} shots",
                )
            )
    return numbers


def _notes(config: Config, rows: Sequence[Row]) -> list[str]:
    notes = []
    if config.arms.seeds < 2:
        notes.append(
            "One seed: accuracies have Wilson's interval over the test images, differences and harmonic means none."
        )
    if config.data.images is None:
        notes.append(
            "Prompts act on cached features, as one step of attention to learned tokens, not inside the encoder."
        )
    measured = {row["test"] for row in rows if row.get("hierarchy")}
    foreign = sorted({row["test"] for row in rows} - measured - {HM})
    if measured and foreign:
        notes.append(f"The taxonomy lacks classes of {', '.join(foreign)}: no hierarchical metrics there.")
    chosen = sorted({row["attributes"] for row in rows if row["attributes"] is not None})
    if len(config.attributes) > 1:
        notes.append(f"Numbers of attributes chosen on validation images: {', '.join(map(str, chosen))}.")
    return notes


def page(config: Config, data: FeatureSet, result: dict[str, Any], environment: dict[str, Any]) -> Page:
    """The page of a run, not yet written."""
    made = scores_page(
        "Few-shot prompt learning with a latent hierarchy",
        f"{data.name}: {len(data.texts)} classes, {config.data.protocol}, "
        f"{', '.join(map(str, config.data.shots))} shots, {config.arms.seeds} seed{'s' * (config.arms.seeds > 1)}",
        result,
    )
    made.section("How it was run")
    made.command(shlex.join(environment["argv"]))
    made.details("Configuration", to_dict(config))
    made.environment(environment)
    return made


def scores_page(title: str, subtitle: str, result: dict[str, Any]) -> Page:
    """A page with all that was scored, of a training or of an evaluation."""
    made = Page(title, subtitle=subtitle)
    for note in result["notes"]:
        made.note(note)
    made.headline([Number.from_json(number) for number in result["headline"]])
    _accuracies(made, result["table"])
    _differences(made, result["differences"])
    _mistakes(made, result["scores"])
    return made


def _accuracies(made: Page, table: Sequence[Row]) -> None:
    made.section("Accuracy")
    tests = list(dict.fromkeys(row["test"] for row in table))
    shots = list(dict.fromkeys(row["shots"] for row in table))
    cells = {(row["method"], row["shots"], row["test"]): row for row in table}
    methods = list(dict.fromkeys(row["method"] for row in table))
    for count in shots:
        made.table(
            ["method", *tests],
            [[method, *(_estimate(cells[method, count, test]) for test in tests)] for method in methods],
            f"Per cent, mean over seeds with its 95 % interval (one seed: over the test images); {count} shots",
        )
    if len(shots) < 2:
        return
    for test in tests:
        figure, axes = new_figure(height=4.4)
        for method, look in _looks(methods).items():
            values = [cells[method, count, test]["accuracy"] for count in shots]
            line_with_band(axes, shots, values, label=method, **look)
        axes.set(xlabel="shots", ylabel="accuracy, %", xscale="log")
        axes.set_xticks(shots, [str(count) for count in shots])
        axes.set_xticks([], minor=True)
        legend(axes, ncols=2, loc="upper center", bbox_to_anchor=(0.45, -0.18), handlelength=3)
        made.figure(figure, f"Accuracy on {test} against the number of shots")


def _looks(methods: Sequence[str]) -> dict[str, dict[str, Any]]:
    """A colour for each host, broken with the hierarchy and dotted with its twin; what has neither is grey."""
    styles = ("-", "--", ":")
    hosts = [method for method in methods if f"{method} + LatHAdapter" in methods]
    looks: dict[str, dict[str, Any]] = {}
    plain = [method for method in methods if method.partition(" + ")[0] not in hosts]
    for place, method in enumerate(plain):
        looks[method] = {"color": LIGHT["muted"], "linestyle": styles[place % len(styles)]}
    for place, host in enumerate(hosts):
        for top, line in zip(("", " + LatHAdapter", " + Euclidean twin"), styles, strict=True):
            if host + top in methods:
                looks[host + top] = {"color": SERIES[place % len(SERIES)], "linestyle": line, "marker": "o"}
    return looks


def _differences(made: Page, differences: Sequence[Row]) -> None:
    if not differences:
        return
    made.section("What the hierarchy adds")
    tests = list(dict.fromkeys(row["test"] for row in differences))
    cells = {
        (row["host"], row["gain"], row["shots"], row["test"]): Estimate(row["difference"], row["interval"])
        for row in differences
    }
    rows = dict.fromkeys(key[:3] for key in cells)
    made.table(
        ["host", "gain", "shots", *tests],
        [[*row, *(cells.get((*row, test)) for test in tests)] for row in rows],
        "Points that LatHAdapter adds, paired by seed, with the 95 % interval of the mean",
    )


def _mistakes(made: Page, scores: Sequence[Row]) -> None:
    found = mistakes(scores)
    if not found:
        return
    made.section("Mistakes in the taxonomy")
    made.text(
        "Means over seeds. LCA height is that of the lowest common ancestor of an answer and the truth, severity the "
        "same over wrong answers, F1 that of their ancestors; decided: the node of least expected distance, which may "
        "be an inner one; backed off: the deepest node with a probability of at least ½, true where it is the class or "
        "stands above it."
    )
    for shots, test in dict.fromkeys(key[1:] for key in found):
        made.table(
            ["method", *MISTAKES.values()],
            [[key[0], *means.values()] for key, means in found.items() if key[1:] == (shots, test)],
            f"Test on {test}; {shots} shots",
        )


def mistakes(scores: Sequence[Row]) -> dict[Key, dict[str, float | None]]:
    """The measures of the mistakes in the taxonomy, means over seeds, of every method and test that has them."""
    found: dict[Key, list[Row]] = {}
    for row in scores:
        if row.get("hierarchy"):
            found.setdefault((row["method"], row["shots"], row["test"]), []).append(row["hierarchy"])
    return {key: {name: _average([each[name] for each in rows]) for name in MISTAKES} for key, rows in found.items()}


def _estimate(row: Row) -> Estimate:
    return Estimate(row["accuracy"], row["interval"])


def _average(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None and value == value]
    return sum(present) / len(present) if present else None


def _accuracy(by_seed: Sequence[Row]) -> tuple[float, Interval | None]:
    """An accuracy in per cent with its interval over seeds; that of one seed over the test images."""
    value, ends = mean_interval([row["accuracy"] for row in by_seed])
    images = by_seed[0]["images"]
    if len(by_seed) == 1 and images is not None:
        low, high = share_interval(round(value / 100.0 * images), images)
        return value, (100.0 * low, 100.0 * high)
    return value, None if ends is None else (max(0.0, ends[0]), min(100.0, ends[1]))
