"""``leafward audit MODEL --activations TEXT``: the hidden states of every layer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def run_activations(args: Any, out: Path, console: Console) -> dict[str, Any]:
    """A row for each layer, and of text the rank correlation of a state's length and its token's frequency."""
    from leafward.cli.audit import write_result
    from leafward.cli.audit_survey import show_survey, survey_page, write_files
    from leafward.engine import Progress
    from leafward.measure.activations import hidden_states, survey_states
    from leafward.registry import register
    from leafward.report import show_rows

    register()
    done = 0
    with Progress(0, "hidden states", unit="position") as progress:

        def advance(count: int) -> None:
            nonlocal done
            done += count
            progress.update(done)

        states = hidden_states(args.targets[0], args.activations, args.rows, args.seed, advance)
    report = survey_states(args.targets[0], states, args.rows, args.seed)
    show_survey(console, report)
    page = survey_page(report)
    found = report.extra.get("frequency")
    if isinstance(found, dict):
        columns = ["layer", "ρ of length and frequency", "95 % interval over tokens"]
        rows = [(name, _number(each["rho"]), _interval(each["interval"])) for name, each in found.items()]
        show_rows(console, columns, rows, "token frequency")
        page.section("Token frequency")
        page.table(columns, [list(row) for row in rows])
    result = report.to_dict()
    write_result(out, result, page)
    written = [out / "report.html", out / "audit.json", *write_files(report, out)]
    console.print("wrote " + ", ".join(map(str, written)), markup=False)
    return {"out": str(out), **result}


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _interval(ends: tuple[float, float] | None) -> str:
    return "–" if ends is None else f"[{ends[0]:.3f}, {ends[1]:.3f}]"
