"""The hyperbolic radius in an audit: of the rows of a matrix, or of both sides of a feature file with its sweep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from leafward.data.fewshot import FeatureSet
    from leafward.measure import AuditReport
    from leafward.report import Result

SHOWN = {"mean": "mean", "std": "std", "low": "5 %", "median": "median", "high": "95 %"}


def add_radius(
    reports: Sequence[AuditReport], names: Sequence[str], c: float, weight: float, console: Console, page: Result
) -> dict[str, Any]:
    """Radii of every target, and for feature files the radius sweep: on screen, on the page, and as a result.

    Vectors z are tangent at the origin of the Poincaré ball: Rad(exp₀(z)) = 2‖z‖, whatever the curvature is.
    """
    from leafward.report import show_rows

    rows: list[dict[str, Any]] = []
    swept: list[dict[str, Any]] = []
    for report, name in zip(reports, names, strict=True):
        data = _features(report)
        if data is None:
            rows.append({"name": name, "target": report.target, "side": report.tensor, **_of_rows(report)})
            continue
        sides = {"image": data.images, "text": data.texts}
        rows += [{"name": name, "target": report.target, "side": key, **_of(z)} for key, z in sides.items()]
        swept.append({"name": name, "target": report.target, **_sweep(data, c, weight)})
    columns = ["", "side", *SHOWN.values()]
    cells = [[row["name"], row["side"], *(f"{row[key]:.4g}" for key in SHOWN)] for row in rows]
    show_rows(console, columns, [tuple(row) for row in cells], "hyperbolic radius")
    page.section("Hyperbolic radius of the rows")
    page.table(
        columns,
        [[row["name"], row["side"], *(row[key] for key in SHOWN)] for row in rows],
        "Rad(exp₀(z)) = 2‖z‖ for every curvature; a cosine cannot see it",
    )
    if swept:
        _show_sweeps(swept, c, weight, console, page)
    return {"radius": rows} | ({"radius_sweep": swept} if swept else {})


def _features(report: AuditReport) -> FeatureSet | None:
    """The feature file of an audit; None where the target is something else."""
    from leafward.data.fewshot import ENDINGS, read_feature_set
    from leafward.measure.matrix_files import FEATURES

    of_features = report.tensor in FEATURES and report.target.endswith(ENDINGS)
    return read_feature_set(report.target) if of_features else None


def _of_rows(report: AuditReport) -> dict[str, float]:
    norms, at = report.norms, report.norms.quantiles
    lengths = {"mean": norms.mean, "std": norms.std, "low": at["0.05"], "median": at["0.5"], "high": at["0.95"]}
    return {name: 2.0 * length for name, length in lengths.items()}


def _of(features: Any) -> dict[str, float]:
    from leafward.encoders.scores import radii

    found = radii(features).to_dict()
    return {name: found["deviation" if name == "std" else name] for name in SHOWN}


def _sweep(data: FeatureSet, c: float, weight: float) -> dict[str, Any]:
    """The sweep over the test images, or over all where none are."""
    from leafward.data.fewshot import TEST
    from leafward.systems.hyperclip.figures import sweeps

    rows = data.part(TEST)
    chosen = (data.images[rows], data.labels[rows]) if len(rows) else (data.images, data.labels)
    found = sweeps(chosen[0], data.texts, chosen[1], c=c, weight=weight)
    return {"images": len(chosen[0]), "classes": len(data.texts), "sweep": found}


def _show_sweeps(swept: list[dict[str, Any]], c: float, weight: float, console: Console, page: Result) -> None:
    from leafward.report import show_rows
    from leafward.systems.hyperclip.figures import SWEEP, sweep_figure

    columns = ["", "score", *(f"× {factor:g}" for factor in SWEEP)]
    cells = [
        [each["name"], score, *(100.0 * point["accuracy"] for point in points)]
        for each in swept
        for score, points in each["sweep"].items()
    ]
    title = "accuracy, %, with the texts at multiples of their radius"
    show_rows(console, columns, [(name, score, *(f"{x:.2f}" for x in rest)) for name, score, *rest in cells], title)
    page.section("Radius sweep")
    page.table(columns, cells, f"{title}; Lorentz score at c = {c:g}, radius term of weight {weight:g}; test images")
    for score in swept[0]["sweep"]:
        lines = {each["name"]: each["sweep"][score] for each in swept}
        page.figure(sweep_figure(lines), f"Score {score}: accuracy when the texts are brought to another radius")
