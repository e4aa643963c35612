"""What several commands print for a person."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def show_headline(console: Console, result: dict[str, Any]) -> None:
    """What a run found: its claims where it has them, else its headline numbers; of a sweep its variants first."""
    from leafward.report import Number

    if result.get("cells"):
        show_variants(console, result)

    if result.get("claims"):
        show_rows(console, list(CLAIM_COLUMNS), claim_rows(result["claims"]))
        return
    numbers = [Number.from_json(number) for number in result.get("headline", [])]
    if not numbers:
        console.print("no headline numbers: the run was given nothing to be scored on")
        return
    twins = any(number.twin is not None for number in numbers)
    rows = []
    for number in numbers:
        value = "–" if number.value is None else f"{number.value:.4g} {number.unit}".strip()
        ends = "–" if number.interval is None else "[{:.3g}, {:.3g}]".format(*number.interval)
        twin = "–" if number.twin is None else f"{number.twin:.4g}"
        rows.append((number.name, value, ends, *([twin] if twins else []), number.note))
    show_rows(console, ["", "value", "95 % interval", *(["twin"] if twins else []), "note"], rows)


def show_variants(console: Console, result: dict[str, Any]) -> None:
    """A row for each variant of a sweep, and what is to be said of them."""
    from leafward.engine.sweep_report import table
    from leafward.report.number import format_column

    columns, rows = table(result["cells"])
    texts = [format_column(column) for column in zip(*rows, strict=True)]
    show_rows(console, columns, list(zip(*texts, strict=True)))
    for note in result["notes"]:
        console.print(note, markup=False)


CLAIM_COLUMNS = ("claim", "here", "95 % interval", "verdict")


def claim_rows(claims: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """One row for each claim that a run tested or could not test."""
    return [
        (
            claim["claim"],
            "–" if claim["value"] is None else f"{claim['value']:.3g}",
            "–" if claim["interval"] is None else "[{:.3g}, {:.3g}]".format(*claim["interval"]),
            claim["verdict"],
        )
        for claim in claims
    ]


def show_rows(console: Console, columns: list[str], rows: list[tuple[str, ...]], title: str = "") -> None:
    """A plain table; the cells are text, not markup, and in a narrow window they are folded, never cut."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(title) if title else None)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(escape(str(cell)) for cell in row))
    console.print(table)
