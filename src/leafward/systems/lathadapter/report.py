"""What a few-shot run found: means over seeds with intervals, paired differences, and the page that shows them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from leafward.data.fewshot import FeatureSet, harmonic_mean
from leafward.report import Estimate, Result, legend, line_with_band, new_figure
from leafward.report.figures import LIGHT, SERIES
from leafward.stats.estimate import PERCENT
from leafward.stats.intervals import over_seeds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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


def result(config: Config, data: FeatureSet, rows: Sequence[Row], title: str = "", subtitle: str = "") -> Result:
    """Headline numbers, means over seeds, paired differences, and every score: of a training or an evaluation."""
    rows = with_harmonic_means(rows)
    by_key: dict[Key, dict[int, Row]] = {}
    for row in rows:
        by_key.setdefault((row["method"], row["shots"], row["test"]), {})[row["seed"]] = row
    cells = {key: _accuracy(list(by_seed.values())) for key, by_seed in by_key.items()}
    gains = _gains(config, by_key)
    counts = {"name": data.name, "images": len(data.images), "classes": len(data.texts)}
    values = {
        "protocol": config.data.protocol,
        "data": counts,
        "table": [
            {"method": method, "shots": shots, "test": test, "accuracy": cell.value, "interval": cell.interval}
            for (method, shots, test), cell in cells.items()
        ],
        "differences": [
            {"host": host, "gain": gain, "shots": shots, "test": test, "difference": each.value}
            | {"interval": each.interval}
            for (host, gain, shots, test), each in gains.items()
        ],
        "scores": rows,
    }
    made = Result(
        title or "Few-shot prompt learning with a latent hierarchy",
        subtitle
        or f"{data.name}: {counts['classes']} classes, {config.data.protocol}, "
        f"{', '.join(map(str, config.data.shots))} shots, {config.arms.seeds} seed{'s' * (config.arms.seeds > 1)}",
        _headline(config, cells),
        notes=_notes(config, rows),
        values=values,
    )
    _accuracies(made, cells)
    _differences(made, gains)
    _mistakes(made, rows)
    return made


def _gains(config: Config, by_key: dict[Key, dict[int, Row]]) -> dict[tuple[str, str, int, str], Estimate]:
    """What the hierarchy adds, paired by seed: over its host alone, and over its Euclidean twin."""
    found = {}
    for host in config.hosts:
        for other, meaning in ((host, "over the host alone"), (f"{host} + Euclidean twin", "over the Euclidean twin")):
            for (method, shots, test), scores in by_key.items():
                against = by_key.get((other, shots, test))
                if method == f"{host} + LatHAdapter" and against is not None:
                    paired = [row["accuracy"] - against[seed]["accuracy"] for seed, row in scores.items()]
                    found[host, meaning, shots, test] = over_seeds(paired)
    return found


def _headline(config: Config, cells: dict[Key, Estimate]) -> list[Estimate]:
    """The last number of shots; the harmonic mean where there is one, else every test."""
    shots = config.data.shots[-1]
    tests = list(dict.fromkeys(test for _, _, test in cells))
    numbers = []
    for host in config.hosts or config.baselines:
        for test in [HM] if HM in tests else tests:
            label = f"{host} + LatHAdapter" if host in config.hosts else host
            alone = cells[host, shots, test].value
            note = f"{shots} shots; {host} alone {alone:.2f}" if label != host else f"{shots} shots"
            twin = cells.get((f"{host} + Euclidean twin", shots, test))
            found = cells[label, shots, test]
            numbers.append(found.named(f"{label}: {test}", unit="%", better="higher", note=note, twin=twin))
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


def _accuracies(made: Result, cells: dict[Key, Estimate]) -> None:
    made.section("Accuracy")
    methods, shots, tests = (list(dict.fromkeys(column)) for column in zip(*cells, strict=True))
    for count in shots:
        made.table(
            ["method", *tests],
            [[method, *(cells[method, count, test] for test in tests)] for method in methods],
            f"Per cent, mean over seeds with its 95 % interval (one seed: over the test images); {count} shots",
            terminal=True,
        )
    for test in tests if len(shots) > 1 else ():
        made.figure(partial(_by_shots, cells, methods, shots, test), f"Accuracy on {test} against the number of shots")


def _by_shots(cells: dict[Key, Estimate], methods: Sequence[str], shots: Sequence[int], test: str) -> Figure:
    figure, axes = new_figure(height=4.4)
    for method, look in _looks(methods).items():
        line_with_band(axes, shots, [cells[method, count, test].value for count in shots], label=method, **look)
    axes.set(xlabel="shots", ylabel="accuracy, %", xscale="log")
    axes.set_xticks(shots, [str(count) for count in shots])
    axes.set_xticks([], minor=True)
    legend(axes, ncols=2, loc="upper center", bbox_to_anchor=(0.45, -0.18), handlelength=3)
    return figure


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


def _differences(made: Result, gains: dict[tuple[str, str, int, str], Estimate]) -> None:
    if not gains:
        return
    made.section("What the hierarchy adds")
    tests = list(dict.fromkeys(key[3] for key in gains))
    made.table(
        ["host", "gain", "shots", *tests],
        [[*row, *(gains.get((*row, test)) for test in tests)] for row in dict.fromkeys(key[:3] for key in gains)],
        "Points that LatHAdapter adds, paired by seed, with the 95 % interval of the mean",
    )


def _mistakes(made: Result, scores: Sequence[Row]) -> None:
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
            f"Mistakes in the taxonomy, test on {test}; {shots} shots",
            terminal=True,
        )


def mistakes(scores: Sequence[Row]) -> dict[Key, dict[str, float | None]]:
    """The measures of the mistakes in the taxonomy, means over seeds, of every method and test that has them."""
    found: dict[Key, list[Row]] = {}
    for row in scores:
        if row.get("hierarchy"):
            found.setdefault((row["method"], row["shots"], row["test"]), []).append(row["hierarchy"])
    return {key: {name: _average([each[name] for each in rows]) for name in MISTAKES} for key, rows in found.items()}


def _average(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None and value == value]
    return sum(present) / len(present) if present else None


def _accuracy(by_seed: Sequence[Row]) -> Estimate:
    """An accuracy in per cent with its interval over seeds; that of one seed over the test images."""
    samples = by_seed[0]["images"] or 0
    return over_seeds([row["accuracy"] for row in by_seed], PERCENT, samples=samples, of="test images")
