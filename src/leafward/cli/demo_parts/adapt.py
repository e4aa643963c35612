"""Adapt: a latent hierarchy on an image–text encoder's features, few shots of a catalogue, and what it then answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leafward.config import replace
from leafward.data.samples import embedded
from leafward.systems.lathadapter import config as lathadapter
from leafward.systems.lathadapter import train as train_lathadapter

if TYPE_CHECKING:
    import numpy as np
    from rich.console import Console
    from torch import Tensor

    from leafward.cli.demo_parts.part import Part
    from leafward.hierarchy import Taxonomy
    from leafward.report import Estimate, Result

FEATURES, TAXONOMY = "clothing_features.npz", "clothing.csv"
BEFORE, AFTER, TWIN = "zero-shot", "coop + LatHAdapter", "coop + Euclidean twin"
THRESHOLD = 0.5
"""The back-off answers with the deepest node that is at least so probable."""
OUTCOMES = ("right class", "right group", "no more than “clothing”", "wrong")


def fewshot() -> lathadapter.Config:
    """Eight shots of each of the ten classes, three seeds; 1/τ is that of the encoder."""
    return replace(
        lathadapter.Config(),
        features=embedded(FEATURES),
        taxonomy=embedded(TAXONOMY),
        protocol="few-shot",
        shots=(8,),
        hosts=("coop",),
        baselines=("zero-shot", "tip-adapter"),
        attributes=(8,),
        epochs=60,
        lr=5e-3,
        scale=9.1,
    )


@dataclass(frozen=True)
class Answers:
    """What one method says of the test photos, by node; one array (photos) for each seed."""

    leaf: list[np.ndarray]
    """The most probable class."""
    node: list[np.ndarray]
    """The answer of the back-off."""


@dataclass(frozen=True)
class Asked:
    """The test photos and what every method says of them."""

    features: Tensor
    """(photos, d), the encoder's."""
    truth: np.ndarray
    """The node of each photo's class: (photos)."""
    answers: dict[str, Answers]


def run(out: Path, console: Console) -> Part:
    from leafward.cli.demo_parts import catalogue
    from leafward.cli.demo_parts.part import Part
    from leafward.data.samples import write_photos
    from leafward.hierarchy import Taxonomy
    from leafward.report import show_rows
    from leafward.stats.digits import format_value

    console.rule("adapt: few shots of a catalogue")
    config = fewshot()
    found = train_lathadapter.run(config, out / "lathadapter", overwrite=True)
    tax = Taxonomy.load(embedded(TAXONOMY))
    asked = ask(config, out / "lathadapter", tax)
    table = [row | scores(tax, asked.answers[row["method"]], asked.truth) for row in found["table"]]
    show_rows(
        console,
        ["method", *SHORT],
        [tuple(map(format_value, _cells(row))) for row in table],
        f"{len(asked.truth)} test photos; class … wrong: what the back-off answers, in %",
    )
    tree, tangent = catalogue.file(tax, asked.answers[AFTER].node[0], asked.features, out / "catalogue")
    result = {"methods": table, "catalogue": catalogue.summary(tree, tangent)}

    def draw(page: Result) -> None:
        _draw(page, tax, asked, table, config.data.shots[0])
        catalogue.draw(page, tree, tangent)

    write_photos(out / "photos")
    explore = catalogue.command(out / "catalogue", out / "photos")
    return Part(_headline(table), result, draw, explore, "the photos, filed where the adapted model puts them")


def ask(config: lathadapter.Config, run: Path, tax: Taxonomy) -> Asked:
    """What every trained method of the run `run` answers."""
    from leafward.data import fewshot as task
    from leafward.hierarchy import decide
    from leafward.systems.lathadapter import methods as training

    assert config.data.features is not None
    data = task.read_feature_set(config.data.features)
    seeds = range(config.loop.seed, config.loop.seed + config.arms.seeds)
    episodes = task.episodes(config.data.protocol, data, [], config.data.shots, seeds)
    exam, classes = episodes[0].exams[0], list(data.class_names)
    found: dict[str, Answers] = {}
    for method in training.methods(config):
        logits = [training.open_trained(config, method, episode, run).logits(exam) for episode in episodes]
        said = [each.softmax(dim=1).numpy() for each in logits]
        leaves = [decide.leaf(tax, each, classes) for each in said]
        found[method.label] = Answers(leaves, [decide.back_off(tax, each, THRESHOLD, classes) for each in said])
    truth = tax.ids([classes[label] for label in data.labels[exam.rows].tolist()])
    return Asked(data.images[exam.rows], truth, found)


COLUMNS = {
    "accuracy": "accuracy, %",
    "severity": "mistake severity",
    **{outcome: f"{outcome}, %" for outcome in OUTCOMES},
}
"""Field of a method's scores -> its column; the outcomes are those of the back-off."""
SHORT = ("accuracy, %", "severity", "class", "group", "root", "wrong")
"""The same columns where there is little room."""


def scores(tax: Taxonomy, answers: Answers, truth: np.ndarray) -> dict[str, float | None]:
    """What the mistakes and the answers of the back-off are like, means over seeds; no severity without a mistake."""
    import numpy as np

    from leafward.files import finite
    from leafward.hierarchy import metrics

    severity = np.mean([metrics.evaluate(tax, leaf, truth).mistake_severity for leaf in answers.leaf])
    shares = 100 * np.mean([outcomes(tax, node, truth) for node in answers.node], axis=0)
    return finite({"severity": float(severity), **dict(zip(OUTCOMES, shares.tolist(), strict=True))})


def outcomes(tax: Taxonomy, answers: np.ndarray, truth: np.ndarray) -> list[float]:
    """The share of answers (photos) that are of each of the `OUTCOMES`."""
    true = tax.entails(answers, truth)
    root = answers == tax.root
    kinds = (answers == truth, true & (answers != truth) & ~root, root, ~true)
    return [float(kind.mean()) for kind in kinds]


def _cells(row: dict[str, Any]) -> list[Any]:
    """A method's row of the table."""
    return [row["method"], _accuracy(row), *(row[key] for key in list(COLUMNS)[1:])]


def _accuracy(row: dict[str, Any]) -> Estimate:
    from leafward.report import Estimate

    return Estimate.of(row["accuracy"], row["interval"])


def _headline(table: Sequence[dict[str, Any]]) -> list[Estimate]:
    from leafward.report import Estimate
    from leafward.stats.digits import format_value

    by = {row["method"]: row | {"true": row["right class"] + row["right group"]} for row in table}
    before, after, twin = by[BEFORE], by[AFTER], by[TWIN]

    def was(key: str) -> str:
        return f"{format_value(before[key])} before"

    return [
        _accuracy(after).named(
            "accuracy after few shots", unit="%", better="higher", note=was("accuracy"), twin=_accuracy(twin)
        ),
        Estimate(
            after["severity"],
            name="mistake severity",
            twin=Estimate(twin["severity"]),
            better="lower",
            note=f"{was('severity')}; 1 where the group is right, 2 where it is not",
        ),
        Estimate(
            after["true"],
            name=f"right class or group, back-off at {THRESHOLD:g}",
            twin=Estimate(twin["true"]),
            unit="%",
            better="higher",
            note=f"{was('true')}; wrong: {format_value(after['wrong'])}, {was('wrong')}",
        ),
    ]


def _draw(page: Result, tax: Taxonomy, asked: Asked, table: Sequence[dict[str, Any]], shots: int) -> None:
    from leafward.cli.demo_parts import figures

    page.section("A catalogue and few shots")
    page.text(
        f"{len(asked.truth)} product photos of ten classes in five groups, and the features that a small image–text "
        "encoder has for them. The encoder was taught the groups (tops, bottoms …) from other photos, never the "
        f"classes, and knows these by their names alone. From {shots} photos of each class a prompt-learning host "
        "(CoOp) learns them: alone, with LatHAdapter's latent hierarchy, and with its Euclidean twin of equal size."
    )
    page.table(
        ["method", *COLUMNS.values()],
        [_cells(row) for row in table],
        "Means over seeds. Severity: height of the lowest common ancestor of a wrong class and the truth. The last "
        f"columns: answers of the back-off, the deepest node with probability ≥ {THRESHOLD:g}",
    )
    page.figure(figures.shares(table, OUTCOMES), "What the back-off answers, by method: share of the test photos.")
    page.figure(
        figures.album(tax, asked.truth, asked.answers[BEFORE].node[0], asked.answers[AFTER].node[0]),
        "The first test photo of each class: the truth, then the back-off's answer before and after. ✓ true, "
        "✗ false; a group may be true.",
    )
