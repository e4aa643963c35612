"""``leafward audit TARGET…``: how superposed, how hierarchical and how curved is every matrix of a checkpoint?

Several targets are a family: overlap against width and, with losses, the width exponent.
"""

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
    from leafward.report import Result


@dataclass
class Args:
    targets: Annotated[tuple[str, ...], tyro.conf.Positional]
    """A hub name (org/name[@revision]), a Hugging Face folder, a run, a PEFT adapter, a folder of a sparse autoencoder,
    .safetensors, .bin, .gguf, .npy or .npz, timm:NAME or open_clip:NAME[@FILE, @TAG or @random]; one or several."""
    tensor: str | None = None
    """Measure this matrix only, in detail; of a feature file text_features or image_features."""
    quick: bool = False
    """Only the exact columns: superposition and spectrum."""
    rows: int = 4096
    """Rows sampled for the columns that need distances."""
    against: Literal["init"] | None = None
    """Also compare with the weights as the architecture initialises them."""
    activations: Path | None = None
    """Text file, or folder of images: measure the hidden states of every layer of the model on it instead."""
    by: str | None = None
    """With --taxonomy: the level, 0 at the root, below which radius is compared (or "depth": all levels)."""
    taxonomy: Path | None = None
    """A taxonomy whose nodes the rows are, by name: does the radius order general and specific?"""
    text: tuple[Path, ...] = ()
    """With several models: corpora on which their bits per byte are measured first, for the width exponent."""
    fold_norm: bool = False
    """Multiply the rows by the gain of the final norm first."""
    token_counts: Path | None = None
    """Counts, one for each row (.npy, .txt or .json): weighted overlaps and the frequency-norm correlation."""
    sample: int = 1024
    """Rows sampled for the estimated figures of one matrix in detail."""
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
        raise UsageError("TARGET is missing; give a folder, a file, a hub name, timm:NAME or open_clip:NAME")
    if len(set(args.targets)) < len(args.targets):
        raise UsageError(f"TARGET: one of them is there twice: {' '.join(args.targets)}")
    need(args.c > 0, "--c", "a positive number", args.c)
    need(args.radius_weight >= 0, "--radius-weight", "a number ≥ 0", args.radius_weight)
    need((args.by is None) == (args.taxonomy is None), "--by", "given together with --taxonomy", args.by)
    out = args.out or Path("runs") / f"audit-{_slug(args.targets[0])}"
    check_writable(out)
    if len(args.targets) > 1 and not args.radius:
        from leafward.cli.audit_family import run_family

        return run_family(args, out, console)
    _no_family(args)
    if args.activations is not None:
        from leafward.cli.audit_activations import run_activations

        return run_activations(args, out, console)
    if args.radius or not _surveyed(args):
        return _in_detail(args, out, console)
    return _run_survey(args, out, console)


def _no_family(args: Args) -> None:
    for name in ("losses", "text"):
        if getattr(args, name) and len(args.targets) < 2:
            raise UsageError(f"--{name} needs a family: give two or more targets, the models that it is about")


DETAILS = ("exact", "fold_norm", "token_counts")


def _surveyed(args: Args) -> bool:
    """Whether the table of matrices is wanted: not where a flag asks for the details of one."""
    return not any(getattr(args, name) for name in DETAILS)


def _run_survey(args: Args, out: Path, console: Console) -> dict[str, Any]:
    """Every matrix; of a single one the details of its overlaps too."""
    from leafward.cli.audit_survey import show_survey, survey_page, survey_target, write_files

    report = survey_target(args.targets[0], args)
    show_survey(console, report)
    page = survey_page(report)
    result: dict[str, Any] = {**report.to_dict()}
    if args.taxonomy is not None:
        from leafward.cli.audit_levels import add_levels

        result["levels"] = add_levels(args, report, console, page)
    if len(report.rows) == 1 and not args.quick:
        detail = audit_one(args.targets[0], args)
        show(console, detail)
        add_audit(page, detail)
        result["audits"] = [detail.to_dict()]
    write_result(out, result, page)
    written = [out / "report.html", out / "audit.json", *write_files(report, out)]
    console.print("wrote " + ", ".join(map(str, written)), markup=False)
    return {"out": str(out), **result}


def _in_detail(args: Args, out: Path, console: Console) -> dict[str, Any]:
    """The overlaps of one matrix of each target, with estimates of all that pairs tell."""
    reports = [audit_one(target, args) for target in args.targets]
    for report in reports:
        show(console, report)
    result: dict[str, Any] = {"audits": [report.to_dict() for report in reports]}
    page = audit_page(reports)
    if args.radius:
        from leafward.cli.audit_radius import add_radius

        result |= add_radius(reports, short_names(args.targets), args.c, args.radius_weight, console, page)
    if len(reports) > 1:
        from leafward.cli.audit_family import add_family

        result["family"] = add_family(reports, short_names(args.targets), None, console, page)
    write_result(out, result, page)
    console.print(f"wrote {out / 'report.html'} and {out / 'audit.json'}")
    return {"out": str(out), **result}


def audit_one(target: str, args: Args) -> AuditReport:
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


def write_result(out: Path, result: dict[str, Any], page: Result) -> None:
    """audit.json and report.html."""
    from leafward.files import write_json

    write_json(out / "audit.json", result)
    page.write(out / "report.html")


def short_names(targets: tuple[str, ...]) -> list[str]:
    """Short names that tell the targets apart."""
    names = [_slug(target) for target in targets]
    return names if len(set(names)) == len(names) else list(targets)


def _slug(target: str) -> str:
    """A short name for a target: the last part of its path, in letters, digits, dots and dashes."""
    name = Path(target.partition("@")[0]).name
    for ending in (".npy", ".npz", ".safetensors"):
        name = name.removesuffix(ending)
    return re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-") or "matrix"
