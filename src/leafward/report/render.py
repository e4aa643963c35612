"""The one renderer: a `Result` as a self-contained HTML page, as a terminal's tables, and as CSV.

Everything that comes from outside is escaped by the template; the page needs no network and runs no script.
"""

from __future__ import annotations

import base64
import csv as csv_format
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from leafward.errors import UsageError, nearest
from leafward.report import figures
from leafward.stats.digits import exact, format_column, plain
from leafward.stats.estimate import Estimate

if TYPE_CHECKING:
    from jinja2 import Template
    from rich.console import Console

    from leafward.report.result import Result, Section

_WIDE_INCHES = 6.5  # a wider figure gets a row of the page to itself
# a YAML file can refer to itself, so a mapping may have no end
_MOST_ENTRIES, _DEEPEST = 5_000, 30


def html(result: Result) -> str:
    """The whole page as text."""
    from leafward.report.result import Result, Section

    whole = Result(result.title, result.subtitle, run=result.run)
    whole.sections = [Section(each.title, list(each.blocks)) for each in result.sections]  # the result stays as it is
    if result.run:
        whole.how()
    numbers = iter(range(1, 1_000_000))
    sections = [
        {"title": each.title, "blocks": [_block(block, numbers) for block in each.blocks]}
        for each in _with_head(result, whole.sections)
        if each.blocks or each.title
    ]
    return _template().render(
        title=result.title,
        subtitle=result.subtitle,
        sections=sections,
        contents=[(index, each["title"]) for index, each in enumerate(sections) if each["title"]],
        css=figures.colour_css() + _resource("page.css") + figures.figure_css(),
    )


def show(result: Result, console: Console, title: str = "") -> None:
    """The estimates, the tables that are meant for a terminal, and the notes."""
    tables = [block for each in result.sections for block in each.blocks if block.get("terminal")]
    if result.estimates:
        twins = any(number.twin is not None for number in result.estimates)
        twin_names = dict.fromkeys(number.twin_name for number in result.estimates if number.twin is not None)
        rows = [
            (
                number.name,
                f"{number} {number.unit}".strip(),
                *([str(number.twin or "–")] if twins else []),
                "; ".join(filter(None, (number.note, _over(number)))),
            )
            for number in result.estimates
        ]
        show_rows(console, ["", "value [95 % CI]", *([", ".join(twin_names)] if twins else []), "note"], rows, title)
    for block in tables:
        names = block["columns"] if block["terminal"] is True else block["terminal"]
        cells = zip(*(format_column(column) for column in zip(*block["rows"], strict=True)), strict=True)
        show_rows(console, names, list(cells), block["caption"] if block["terminal"] is True else "")
    for note in result.notes:
        console.print(f"note: {note}", markup=False)


def show_rows(console: Console, columns: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
    """A plain table; the cells are text, not markup, and in a narrow window they are folded, never cut."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(title) if title else None)
    for column in columns:
        table.add_column(escape(column), overflow="fold")
    for row in rows:
        table.add_row(*(escape(str(cell)) for cell in row))
    console.print(table)


_CSV = ("name", "value", "low", "high", "over", "twin", "twin low", "twin high", "unit", "better", "note")


def csv(result: Result, table: str | None = None) -> str:
    """The estimates, or where there are none the tables for a terminal; or the tables of that caption. An estimate in
    a table becomes three columns; an empty line comes between tables."""
    tables = [block for each in result.sections for block in each.blocks if "rows" in block]
    if table is not None and table not in (captions := {block["caption"] for block in tables}):
        raise UsageError(f"there is no table {table!r}; {nearest(table, captions)}")
    if table is None and result.estimates:
        lines: list[list[Any]] = [list(_CSV)]
        for each in result.estimates:
            value, twin = _three(each), _three(each.twin)
            lines.append([each.name, *value, str(each.over), *twin, each.unit, each.better, each.note])
        parts = [lines]
    else:
        chosen = [block for block in tables if (block["terminal"] if table is None else block["caption"] == table)]
        parts = [_spread(block["columns"], block["rows"]) for block in chosen]
    text = io.StringIO()
    writer = csv_format.writer(text, lineterminator="\n")
    for place, part in enumerate(parts):
        text.write("\n" * (place > 0))
        writer.writerows(part)
    return text.getvalue()


def _spread(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """A header and rows for CSV."""
    wide = [any(isinstance(row[index], Estimate) for row in rows) for index in range(len(columns))]
    names: list[str] = []
    for name, three in zip(columns, wide, strict=True):
        names += [name, f"{name} low", f"{name} high"] if three else [name]
    cells = [
        [part for cell, three in zip(row, wide, strict=True) for part in (_three(cell) if three else [plain(cell)])]
        for row in rows
    ]
    return [names, *cells]


def _three(cell: Any) -> list[Any]:
    if isinstance(cell, Estimate):
        return [cell.value, *(cell.interval or (None, None))]
    return [cell, None, None]


def _over(number: Estimate) -> str:
    """What the interval is over, where the note does not say it."""
    words = str(number.over)
    return f"95 % over {words}" if words and words not in number.note else ""


def _with_head(result: Result, sections: Sequence[Section]) -> list[Section]:
    """The sections, the first with the notes and the estimates on top."""
    from leafward.report.result import Section

    head: list[dict[str, Any]] = [{"kind": "note", "text": note} for note in result.notes]
    head += [{"kind": "headline", "numbers": result.estimates}] if result.estimates else []
    first, *rest = sections
    return [Section(first.title, head + first.blocks), *rest]


def _block(block: dict[str, Any], numbers: Iterator[int]) -> dict[str, Any]:
    """A block as the template takes it."""
    kind = block["kind"]
    if kind == "headline":
        shown = [(number, _over(number)) for number in block["numbers"]]
        return block | {"numbers": shown, "intervals": any(number.interval for number in block["numbers"])}
    if kind == "table":
        by_column = [[row[index] for row in block["rows"]] for index in range(len(block["columns"]))]
        texts = [format_column(cells) for cells in by_column]
        return block | {
            "columns": [(name, is_numeric(cells)) for name, cells in zip(block["columns"], by_column, strict=True)],
            "rows": [[column[index] for column in texts] for index in range(len(block["rows"]))],
        }
    if kind == "figures":
        return block | {"figures": [_figure(figure, numbers) for figure in block["figures"]]}
    if kind == "details":
        return block | {"entries": [(key, exact(value)) for key, value in flatten(block["values"]).items()]}
    return block


def _figure(figure: Mapping[str, Any], numbers: Iterator[int]) -> dict[str, Any]:
    if "image" in figure:
        source = f"data:{figure['type']};base64,{base64.b64encode(figure['image']).decode()}"
        return {"source": source, "alt": figure["alt"], "caption": figure["caption"], "wide": False}
    drawn: Any = figure["figure"]
    drawn = drawn() if callable(drawn) else drawn
    svg = figures.to_svg(drawn, alt=figure["alt"], prefix=f"f{next(numbers)}-")
    return {"svg": svg, "caption": figure["caption"], "wide": drawn.get_figwidth() > _WIDE_INCHES}


def is_numeric(values: Iterable[Any]) -> bool:
    """Whether a column holds numbers only (missing values aside), so that it is set flush right."""
    present = [plain(value) for value in values]
    present = [value for value in present if value is not None]
    return bool(present) and all(
        isinstance(value, int | float | Estimate) and not isinstance(value, bool) for value in present
    )


def flatten(values: Mapping[Any, Any]) -> dict[str, Any]:
    """A nested mapping as one level with dotted keys; lists of plain values become one text."""
    flat: dict[str, Any] = {}
    for key, value in _leaves(values, ()):
        if len(flat) == _MOST_ENTRIES:
            flat["…"] = f"more than {_MOST_ENTRIES} entries; the rest is left out"
            break
        flat[key] = value
    return flat


def _leaves(value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    nested = (Mapping, list, tuple)
    if isinstance(value, Mapping) and value:
        items = value.items()
    elif isinstance(value, list | tuple) and any(isinstance(item, nested) for item in value):
        items = enumerate(value)
    else:
        text = ", ".join(map(exact, value)) if isinstance(value, nested) else value
        yield ".".join(path), text
        return
    for key, item in items:
        if len(path) < _DEEPEST:
            yield from _leaves(item, (*path, str(key)))
        else:
            yield ".".join(path), "…"


def _resource(name: str) -> str:
    return files("leafward.report").joinpath(name).read_text(encoding="utf-8")


@cache
def _template() -> Template:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.from_string(_resource("page.html"))
