"""The audit of every matrix of a target: on screen, as a page, and as files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from leafward.measure.measured import Measured
    from leafward.measure.survey_report import MatrixRow, Survey
    from leafward.report import Result

EXACT_SHOWN = ("norm_mean", "overlap", "overlap_centred", "effective_rank", "stable_rank", "alpha")
SAMPLED_SHOWN = ("delta", "curvature", "ricci", "dimension", "dimension_wide", "duplicates")
MOST_SHOWN = 60  # matrices of the table on screen
PLAIN = (
    "Every matrix is a cloud of points: one for each of its rows (a token, a neuron, a class). The table says how the "
    "points lie: along how many directions (participation ratio, effective rank, stable rank), how much they overlap "
    "(m⟨o²⟩: 1 where directions are random), how tree-like their distances are (δ: 0 for a tree), which curvature "
    "holds "
    "them best (κ, negative where they branch), and how many coordinates they use locally (dimension). Each figure is "
    "read against the same rows with their structure taken out. Something is said of a matrix only where the whole "
    "interval of a figure lies beyond those of all these nulls; of noise, and of a network before training, nothing is."
)


def survey_target(target: str, args: Any) -> Survey:
    from leafward.engine import Progress
    from leafward.measure import survey
    from leafward.registry import register

    if args.against:
        register()
    with Progress(100, "audit", unit="%") as progress:
        return survey(
            target,
            tensor=args.tensor,
            quick=args.quick,
            sample=args.rows,
            against=args.against,
            seed=args.seed,
            progress=lambda done, total, name: progress.update(100 * done // total, {"matrix": name}),
        )


def show_survey(console: Console, report: Survey) -> None:
    """The figures of all matrices, their verdicts, near-duplicate clusters and notes."""
    from leafward.report import show_rows

    rows: list[list[str]] = []
    for keys in (EXACT_SHOWN, SAMPLED_SHOWN):
        columns, rows = table(report, keys)
        if len(columns) > 2:
            shown = [(row[0], *row[1:]) for row in rows[:MOST_SHOWN]]
            show_rows(console, columns, shown, report.heading if keys is EXACT_SHOWN else "of sampled rows")
    if len(rows) > MOST_SHOWN:
        console.print(f"… and {len(rows) - MOST_SHOWN} more matrices, which are in the page and the files")
    for row in report.rows:
        if row.calls or row.problem or len(report.rows) == 1:
            console.print(f"{row.name}: {row.verdict}", markup=False)
        for cluster in row.clusters[:3]:
            console.print(f"  near-duplicates: {cluster.title}", markup=False)
        for note in row.notes[:3] if len(report.rows) <= 8 else ():
            console.print(f"  note: {note}", markup=False)
    for note in (*report.notes, *extra_lines(report)):
        console.print(f"note: {note}", markup=False)
    quiet = sum(1 for row in report.rows if row.nulls and not row.calls)
    if quiet and len(report.rows) > 1:
        console.print(f"{quiet} of {len(report.rows)} matrices are not told apart from their nulls")


def table(report: Survey, keys: tuple[str, ...] | None = None) -> tuple[list[str], list[list[str]]]:
    """Columns and cells; a matrix with near-duplicates has a second line without them."""
    from leafward.measure.columns import COLUMNS, SHOWN

    wanted = [key for key in keys or SHOWN if any(key in row.values for row in report.rows)]
    rows = []
    for row in report.rows:
        shape = f"{row.rows:,} × {row.shape[1]:,}"
        rows.append([row.name, shape, *(cell(row.values.get(key)) for key in wanted)])
        if row.without is not None:
            shape = f"{row.rows_without:,} × {row.shape[1]:,}"
            rows.append(["  without near-duplicates", shape, *(cell(row.without.get(key)) for key in wanted)])
    return ["matrix", "shape", *(COLUMNS[key].title for key in wanted)], rows


def cell(found: Measured | None) -> str:
    return "–" if found is None or not math.isfinite(found.value) else f"{found.value:.3g}"


def extra_lines(report: Survey) -> list[str]:
    """What a sparse autoencoder adds."""
    found = report.extra.get("sae")
    if not isinstance(found, dict):
        return []
    lines = [
        f"{found['features']:,} features: {found['dead']} dead, {found['duplicates']} with a duplicate (cosine ≥ .95), "
        f"{found['antipodes']} with an antipode (≤ −.95)"
    ]
    angle = found.get("angle")
    if angle and angle["value"] is not None:
        ends = angle["interval"]
        within = "" if ends is None else f" [{ends[0]:.1f}, {ends[1]:.1f}]"
        lines.append(f"angle of encoder and decoder: {angle['value']:.1f}°{within}, at most {angle['most']:.1f}°")
    return lines


def survey_page(report: Survey) -> Result:
    """Plain words first, then the table, then each matrix that is told apart beside its nulls."""
    from leafward.measure.columns import COLUMNS
    from leafward.report import Estimate, Result

    page = Result("Audit", report.heading, run=True)
    told = [row for row in report.rows if row.calls]
    numbers = [
        Estimate(len(report.rows), name="matrices"),
        Estimate(len(told), name="told apart from their nulls"),
    ]
    page.headline(numbers)
    page.text(PLAIN)
    for row in told[:8]:
        page.text(f"{row.name}: {row.verdict}.")
    for line in extra_lines(report):
        page.text(line)
    columns, rows = table(report)
    page.section("Every matrix")
    page.table(columns, rows)
    for note in report.notes:
        page.note(note)
    for row in [row for row in report.rows if row.nulls][:40]:
        add_matrix(page, row)
    page.section("What the columns mean")
    page.table(["column", "meaning"], [[each.title, each.meaning] for each in COLUMNS.values()])
    return page


def add_matrix(page: Result, row: MatrixRow) -> None:
    """One matrix beside its nulls, with intervals."""
    from leafward.measure.columns import COLUMNS

    page.section(f"{row.name} · {row.rows:,} × {row.shape[1]:,}")
    page.text(row.verdict)
    for cluster in row.clusters[:5]:
        page.note(f"near-duplicates: {cluster.title}")
    for note in row.notes:
        page.note(note)
    kinds = list(row.nulls)
    keys = [key for key in COLUMNS if key in row.values]
    rows = [
        [
            COLUMNS[key].title,
            estimate(row.values[key]),
            *([estimate(row.without.get(key))] if row.without is not None else []),
            *(estimate(row.nulls[kind].get(key)) for kind in kinds),
        ]
        for key in keys
    ]
    apart = ["without near-duplicates"] if row.without is not None else []
    page.table(["", "here", *apart, *(f"null: {kind}" for kind in kinds)], rows)


def estimate(found: Measured | None) -> str:
    """A value with its 95 % interval."""
    if found is None or not math.isfinite(found.value):
        return "–"
    ends = found.interval()
    return f"{found.value:.4g}" + ("" if ends is None else f" [{ends[0]:.4g}, {ends[1]:.4g}]")


def write_files(report: Survey, out: Path) -> list[Path]:
    """matrices.csv, and matrices.parquet where pyarrow is there."""
    from leafward.errors import LeafwardError

    paths = [out / "matrices.csv"]
    report.write_csv(paths[0])
    try:
        report.write_parquet(out / "matrices.parquet")
        paths.append(out / "matrices.parquet")
    except LeafwardError:  # pyarrow belongs to an extra
        pass
    return paths
