"""``leafward audit TARGET…``: how superposed is this matrix? Several targets with a losses table give the width fit."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from leafward.errors import UsageError, need
from leafward.files import check_writable

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console

    from leafward.measure import AuditReport
    from leafward.measure.audit_family import Family, LossTable
    from leafward.report import Result


@dataclass
class Args:
    targets: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Hugging Face directory, .safetensors, .npy or .npz file (also one of leafward data features), timm:NAME[@FILE] or
    open_clip:NAME[@FILE]; one or several."""
    tensor: str | None = None
    """Which 2-D weight to read, where the target holds several; of a feature file text_features or image_features."""
    fold_norm: bool = False
    """Multiply the rows by the gain of the final norm first."""
    token_counts: Path | None = None
    """Counts, one for each row (.npy, .txt or .json): weighted overlaps and the frequency-norm correlation."""
    sample: int = 1024
    """Rows sampled for the estimated figures."""
    exact: bool = False
    """Compute the estimated figures from every pair instead (n² m work)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute."""
    seed: int = 0
    """Seed of the sampled rows."""
    radius: bool = False
    """Also the hyperbolic radius of the rows. Of feature files: of both their sides, and the accuracy with every score
    when the texts are brought to another radius; two files are the features before and after an adapter."""
    c: float = 0.1
    """With --radius: curvature −c of the Lorentz score."""
    radius_weight: float = 0.1
    """With --radius: weight of the radius term."""
    losses: Path | None = None
    """CSV with columns model, corpus, m, loss[, params, depth, tokens]: fit L = C/m^a + offsets over its models."""
    out: Path | None = None
    """Folder for audit.json and report.html (default: runs/audit-NAME)."""


def run(args: Args, console: Console) -> dict[str, Any]:
    if not args.targets:
        raise UsageError("TARGET is missing; give a directory, a file, timm:NAME or open_clip:NAME")
    if len(set(args.targets)) < len(args.targets):
        raise UsageError(f"TARGET: one of them is there twice: {' '.join(args.targets)}")
    need(args.c > 0, "--c", "a positive number", args.c)
    need(args.radius_weight >= 0, "--radius-weight", "a number ≥ 0", args.radius_weight)
    out = args.out or Path("runs") / f"audit-{_slug(args.targets[0])}"
    check_writable(out)
    losses = _losses(args)  # before the audits, which may take long
    reports = [_audit(target, args) for target in args.targets]
    for report in reports:
        show(console, report)
    names = _names(args.targets)
    result: dict[str, Any] = {"audits": [report.to_dict() for report in reports]}
    page = audit_page(reports)
    if args.radius:
        from leafward.cli.audit_radius import add_radius

        result |= add_radius(reports, names, args.c, args.radius_weight, console, page)
    if len(reports) > 1:
        result["family"] = _family(reports, names, losses, console, page)
    _write(out, result, page)
    console.print(f"wrote {out / 'report.html'} and {out / 'audit.json'}")
    return {"out": str(out), **result}


def _losses(args: Args) -> LossTable | None:
    if args.losses is None:
        return None
    from leafward.measure.audit_family import read_losses

    if len(args.targets) < 2:
        raise UsageError("--losses needs a family: give two or more targets, whose names are in its column model")
    return read_losses(args.losses)


def _audit(target: str, args: Args) -> AuditReport:
    from leafward.engine import Progress
    from leafward.measure import audit

    with Progress(100, f"audit {_slug(target)}", unit="%") as progress:
        return audit(
            target,
            tensor=args.tensor,
            fold_norm=args.fold_norm,
            token_counts=args.token_counts,
            sample=args.sample,
            exact=args.exact,
            device=None if args.device == "auto" else args.device,
            seed=args.seed,
            progress=lambda done, total: progress.update(100 * done // total),
        )


def show(console: Console, report: AuditReport) -> None:
    """Table, notes and verdict for a person."""
    from leafward.report import show_rows

    title = f"{report.target}: {report.tensor}"
    show_rows(console, ["", "value", "± s.e.", "reference"], [tuple(row) for row in report.table()], title)
    for note in report.notes:
        console.print(f"note: {note}", markup=False)
    console.print(f"verdict: {report.verdict}", markup=False)


def audit_page(reports: list[AuditReport]) -> Result:
    """The report page of one or several audits."""
    from leafward.report import Result

    page = Result("Superposition audit", ", ".join(report.target for report in reports), run=True)
    for report in reports:
        add_audit(page, report)
    return page


def add_audit(page: Result, report: AuditReport) -> None:
    """One audit as a section of a page."""
    from leafward.report import Estimate

    page.section(f"{Path(report.target).name} · {report.tensor}")
    numbers = [Estimate(report.scaled_overlap, name="m·⟨overlap²⟩, raw", note="1 for random directions")]
    if report.centred is not None:
        numbers.append(Estimate(report.centred.scaled_overlap, name="m·⟨overlap²⟩, mean removed"))
    numbers.append(Estimate(report.participation_ratio, name="participation ratio", note=f"at most {report.width}"))
    page.headline(numbers)
    page.text(str(report.verdict))
    for note in report.notes:
        page.note(note)
    page.table(["", "value", "standard error", "reference"], [list(row) for row in report.table()])
    page.figure(_overlap_figure(report), "Share of row pairs by overlap; dashed: what random directions would give.")


def _overlap_figure(report: AuditReport) -> Figure:
    import numpy as np

    from leafward.report import legend, line_with_band, new_figure

    figure, axes = new_figure()
    views = [("raw", report.raw)] + ([("mean removed", report.centred)] if report.centred is not None else [])
    for label, view in views:
        edges, width = view.histogram.edges, np.diff(view.histogram.edges)
        density, error = view.histogram.share / width, view.histogram.error / width
        line_with_band(axes, (edges[1:] + edges[:-1]) / 2, density, density - error, density + error, label=label)
    # A coordinate of a random unit vector: density ∝ (1 − o²)^((m−3)/2), close to a normal of variance 1/m.
    grid = np.linspace(-1, 1, 401)
    shape = np.maximum(1 - grid**2, 1e-12) ** ((report.width - 3) / 2)
    line_with_band(axes, grid, shape / np.trapezoid(shape, grid), label="random", linestyle="--")
    reach = 4 * max(report.raw.mean_squared_overlap, report.references.random_mean_squared_overlap) ** 0.5
    axes.set(xlabel="overlap of two rows", ylabel="density", xlim=(max(-1, -reach), min(1, reach)))
    legend(axes)
    return figure


def _family(
    reports: list[AuditReport], names: list[str], losses: LossTable | None, console: Console, page: Result
) -> dict[str, Any]:
    """Widths side by side and, with a losses table, the fit L = C/m^a + offsets."""
    from leafward.measure.audit_family import audit_family
    from leafward.report import show_rows

    family = audit_family(*reports, names=names, losses=losses)
    rows = [
        (name, str(width), f"{raw:.4g}", f"{centred:.4g}")
        for name, width, raw, centred in zip(
            family.names, family.width, family.scaled_overlap, family.centred_scaled_overlap, strict=True
        )
    ]
    columns = ["model", "m", "m·⟨o²⟩ raw", "mean removed"]
    show_rows(console, columns, rows, "family")
    page.section("The family")
    page.table(columns, [list(row) for row in rows])
    result: dict[str, Any] = {"models": [dict(zip(("model", "m", "raw", "centred"), row, strict=True)) for row in rows]}
    if family.losses is not None:
        result["width_fit"] = _width_fit(family, console, page)
    return result


def _width_fit(family: Family, console: Console, page: Result) -> dict[str, Any]:
    from leafward.report import Estimate
    from leafward.stats.power_laws import fit_width

    table = family.losses
    assert table is not None
    fit = fit_width(table.width, table.loss, models=table.model, corpora=table.corpus, params=table.params)
    console.print(f"width fit: {fit.summary()}", markup=False)
    page.headline([Estimate(fit.loss.exponent, fit.loss.interval, "α of L = C/m^α + offsets")])
    page.text(fit.summary())
    return fit.to_dict()


def _write(out: Path, result: dict[str, Any], page: Result) -> None:
    from leafward.files import write_json

    write_json(out / "audit.json", result)
    page.write(out / "report.html")


def _names(targets: tuple[str, ...]) -> list[str]:
    """Short names that tell the targets apart."""
    names = [_slug(target) for target in targets]
    return names if len(set(names)) == len(names) else list(targets)


def _slug(target: str) -> str:
    """A short name for a target: the last part of its path, in letters, digits, dots and dashes."""
    name = Path(target.partition("@")[0]).name
    for ending in (".npy", ".npz", ".safetensors"):
        name = name.removesuffix(ending)
    return re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-") or "matrix"
