"""``leafward evaluate PREDICTIONS --task hierarchy --taxonomy FILE``: metrics and decisions over a taxonomy."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from leafward.errors import UsageError, named

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure
    from rich.console import Console

    from leafward.hierarchy import Taxonomy
    from leafward.hierarchy.decisions import RiskCoverage
    from leafward.report import Estimate, Result
    from leafward.systems.taxonomy.predictions import Predictions

SUMMARY = (
    "Hierarchical metrics of a classifier's labels or probabilities, and of every decision that can be made of them."
)
RANKS = 5
COLUMNS = {
    "coverage": "coverage",
    "accuracy": "accuracy",
    "precision": "precision",
    "recall": "recall",
    "f1": "F₁",
    "tree_induced_error": "distance",
    "lca_height": "LCA height",
    "mistake_severity": "severity",
}
"""Field of a metrics report -> its column."""

NARROW = ("cover", "acc.", "prec.", "recall", "F₁", "dist.", "LCA", "sever.")
"""The same columns in a terminal of 80 characters."""


@dataclass
class Args:
    target: Annotated[Path, tyro.conf.Positional]
    """CSV with columns true and predicted (predicted_2 … for lower ranks) or one of probabilities for each class; or
    .npy, .npz, .safetensors with probabilities or logits."""
    taxonomy: str
    """Taxonomy: .csv of child,parent; .json; .txt; wordnet; wordnet:NODE."""
    true: Path | None = None
    """True class of each row, for an array file: names (.txt, .json, .csv) or numbers of columns (.npy)."""
    classes: Path | None = None
    """Class of each column, for an array file (.txt, .json or .csv); default: the taxonomy's leaves in order."""
    logits: bool = False
    """The numbers are logits: take a softmax first."""
    threshold: float = 0.9
    """Probability that an answer of the back-off must reach."""
    abstain: float = 0.5
    """Probability below which the most probable leaf is not answered."""
    restrict: bool = False
    """Cut the taxonomy to the classes and what is above them, so that every class is a leaf."""
    root: str | None = None
    """Name of a root to put above a taxonomy that has several."""
    out: Path | None = None
    """Folder for hierarchy.json, decisions.csv and report.html (default: runs/hierarchy-NAME)."""


def run(args: Args, console: Console) -> dict[str, Any]:
    from leafward.data.taxonomy import read_taxonomy
    from leafward.report import Result
    from leafward.systems.taxonomy.predictions import read_predictions

    for flag in ("threshold", "abstain"):
        if not 0.0 <= getattr(args, flag) <= 1.0:
            raise UsageError(f"{flag} must lie between 0 and 1, got {getattr(args, flag)}")
    tax = read_taxonomy(args.taxonomy, args.root)
    given = read_predictions(args.target, tax, classes=args.classes, true=args.true, logits=args.logits)
    tax, given = _fitted(tax, given, args)
    answers, notes = _answers(tax, given, args)
    curves = {} if given.probabilities is None else _curves(tax, given, answers[ARG_MAX])
    values = {
        "taxonomy": repr(tax),
        "decisions": {name: _scores(tax, chosen, given.true) for name, chosen in answers.items()},
        "ranked": _ranked(tax, given),
        "risk_coverage": {name: _curve_json(curve) for name, curve in curves.items()},
    }
    numbers = _headline(values, tax, next(iter(answers.values())), given.true)
    of = f"{args.target} over {args.taxonomy}: {tax!r}"
    made = Result("Hierarchical evaluation", of, numbers, notes=notes, values=values, run=True)
    _fill(made, curves)
    out = args.out or Path("runs") / f"hierarchy-{args.target.stem}"
    _write_decisions(out / "decisions.csv", tax, given, answers)
    made.write(out / "hierarchy.json")
    made.write(out / "report.html")
    made.show(console)
    console.print(f"wrote {out / 'report.html'}, hierarchy.json and decisions.csv", markup=False)
    return {"out": str(out), **made.to_json()}


ARG_MAX = "most probable leaf"
GIVEN = "as predicted"


def _fitted(tax: Taxonomy, given: Predictions, args: Args) -> tuple[Taxonomy, Predictions]:
    """The taxonomy in which every class is a leaf, and the predictions in its numbers."""
    from leafward.errors import DataError

    if given.classes is None:
        if args.restrict:
            raise UsageError("--restrict belongs to probabilities, whose columns say what the classes are")
        return tax, given
    if not args.restrict:
        inner = given.classes[tax.height[given.classes] > 0]
        if inner.size:
            raise DataError(
                f"{args.target}: the class {tax.names[inner[0]]!r} is no leaf of {args.taxonomy}; --restrict cuts the "
                "taxonomy to the classes"
            )
        return tax, given
    part = tax.restrict(given.classes)
    names = [tax.names[node] for node in given.classes]
    with named(args.true or args.target):
        truth = part.ids([tax.names[node] for node in given.true], "true (after --restrict)")
    return part, given._replace(true=truth, classes=part.ids(names))


def _answers(tax: Taxonomy, given: Predictions, args: Args) -> tuple[dict[str, np.ndarray], list[str]]:
    """What each decision answers, by number of node: name -> (B); −1: no answer. And notes on what was left out."""
    import numpy as np

    from leafward.hierarchy import decide

    if given.answers is not None:
        return {GIVEN: given.answers[:, 0]}, []
    p, columns = given.probabilities, given.classes
    assert p is not None
    with named(args.target):
        ways = decide.path(tax, p, columns)
        answers = {
            ARG_MAX: decide.leaf(tax, p, columns),
            "path, child by child": ways[np.arange(len(ways)), (ways >= 0).sum(axis=1) - 1],
            f"back-off at {args.threshold:g}": decide.back_off(tax, p, args.threshold, columns),
            f"abstain below {args.abstain:g}": decide.abstain(tax, p, args.abstain, columns),
        }
    notes = []
    costs: dict[str, Callable[[], Any]] = {
        "least expected distance": lambda: decide.expected_cost(tax, p, "distance", columns),
        "least expected LCA height": lambda: decide.expected_cost(tax, p, "lca_height", columns),
        "least expected distance, any node": lambda: decide.expected_cost(
            tax, p, "distance", columns, np.arange(len(tax))
        ),
    }
    for name, choose in costs.items():
        try:
            answers[name] = choose()
        except UsageError as error:  # a DAG so large that the matrix of costs does not fit
            notes.append(f"“{name}” was left out: {error}")
    return answers, notes


def _scores(tax: Taxonomy, chosen: np.ndarray, truth: np.ndarray) -> dict[str, Any]:
    """The metrics of one decision; only its coverage where nothing was answered."""
    from leafward.hierarchy import metrics

    if (chosen < 0).all():
        return {"count": len(truth), "coverage": 0.0}
    return metrics.evaluate(tax, chosen, truth).to_dict()


def _ranked(tax: Taxonomy, given: Predictions) -> dict[str, float]:
    """Mean LCA height of the first k answers, for each k: hierarchical distance@k."""
    import numpy as np

    from leafward.hierarchy import metrics

    if given.answers is not None:
        ranks = given.answers
    else:
        assert given.probabilities is not None
        assert given.classes is not None
        ranks = given.classes[np.argsort(-given.probabilities, axis=1, kind="stable")[:, :RANKS]]
    if ranks.shape[1] < 2 or (ranks < 0).any():
        return {}
    return metrics.evaluate(tax, ranks, given.true).to_dict()["distance_at_k"]


def _curves(tax: Taxonomy, given: Predictions, chosen: np.ndarray) -> dict[str, RiskCoverage]:
    """Risk against coverage of the most probable leaf, as the bar for its probability falls."""
    from leafward.hierarchy import decide

    assert given.probabilities is not None
    sure = given.probabilities.max(axis=1)
    losses = {"error": chosen != given.true, "distance": tax.distance(chosen, given.true)}
    return {name: decide.risk_coverage(sure, loss) for name, loss in losses.items()}


def _curve_json(curve: RiskCoverage) -> dict[str, Any]:
    return {
        "area": curve.area,
        "threshold": curve.threshold.tolist(),
        "coverage": curve.coverage.tolist(),
        "risk": curve.risk.tolist(),
    }


def _headline(found: dict[str, Any], tax: Taxonomy, chosen: np.ndarray, truth: np.ndarray) -> list[Estimate]:
    """Scores of the first decision, over the answered samples (severity: over the wrong answers); F₁, a ratio of means,
    has no interval here."""
    from leafward.report import Estimate
    from leafward.stats.intervals import over_samples, share_interval

    name, first = next(iter(found["decisions"].items()))
    chosen, truth = chosen[chosen >= 0], truth[chosen >= 0]
    wrong, heights = chosen != truth, (0.0, float(tax.height.max()))
    nothing = Estimate(None)
    share = share_interval(int((~wrong).sum()), len(chosen), "answers") if len(chosen) else None
    far = (
        over_samples(tax.distance(chosen, truth), (0.0, 2.0 * tax.depth.max()), of="answers")
        if len(chosen)
        else nothing
    )
    mistakes = tax.height[tax.lca(chosen[wrong], truth[wrong])] if wrong.any() else []
    severe = over_samples(mistakes, heights, of="wrong answers") if len(mistakes) else nothing
    numbers = [
        Estimate(first.get("accuracy"), share, "accuracy", better="higher", note=name),
        Estimate(first.get("f1"), name="hierarchical F₁", better="higher", note=name),
        far.named("distance to the truth", unit="edges", better="lower", note=name),
        severe.named("mistake severity", better="lower", note="LCA height of the wrong answers"),
    ]
    if found["risk_coverage"]:
        area, note = found["risk_coverage"]["error"]["area"], "error of the most probable leaf"
        numbers.append(Estimate(area, name="area under risk–coverage", better="lower", note=note))
    return numbers


def _write_decisions(path: Path, tax: Taxonomy, given: Predictions, answers: dict[str, np.ndarray]) -> None:
    """One row for each sample: its truth and what each decision answers, by name."""
    from leafward.files import replacing

    def called(node: int) -> str:
        return tax.names[node] if node >= 0 else ""

    with replacing(path) as temporary, open(temporary, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["id", "true", *answers])
        for row, name in enumerate(given.ids):
            writer.writerow([name, called(given.true[row]), *(called(chosen[row]) for chosen in answers.values())])


def _fill(page: Result, curves: dict[str, RiskCoverage]) -> None:
    result = page.values
    page.section("Decisions")
    page.table(
        ["decision", *COLUMNS.values()],
        [[name, *(scores.get(field) for field in COLUMNS)] for name, scores in result["decisions"].items()],
        "Means over the answered samples. Precision and recall are of ancestor sets, the node itself in and the root "
        "out; distance in edges; severity is the LCA height of the wrong answers alone",
        terminal=("decision", *NARROW),
    )
    levels = {level for scores in result["decisions"].values() for level in scores.get("level_accuracy", {})}
    page.table(
        ["decision", *(f"level {level}" for level in sorted(levels, key=int))],
        [
            [name, *(scores.get("level_accuracy", {}).get(level) for level in sorted(levels, key=int))]
            for name, scores in result["decisions"].items()
        ],
        "Accuracy level by level: of the samples whose truth reaches it, those whose answer shares its ancestor there",
    )
    if result["ranked"]:
        page.table(
            [f"k = {k}" for k in result["ranked"]],
            [list(result["ranked"].values())],
            "Hierarchical distance@k: mean LCA height of the first k answers",
        )
    if curves:
        page.section("Risk and coverage")
        for name, curve in curves.items():
            page.figure(partial(_figure, name, curve), f"{RISKS[name]} against the share answered, most sure first.")


RISKS = {"error": "Share of wrong answers", "distance": "Mean distance to the truth, in edges,"}


def _figure(name: str, curve: RiskCoverage) -> Figure:
    from leafward.report import line_with_band, new_figure

    figure, axes = new_figure()
    line_with_band(axes, curve.coverage, curve.risk, drawstyle="steps-post")
    axes.set(xlabel="coverage", ylabel=RISKS[name].rstrip(",").lower(), xlim=(0, 1))
    axes.set_ylim(bottom=0)
    return figure
