"""One self-contained HTML page: headline numbers, text, tables, figures, images, command, environment.

Everything that comes from outside is escaped by the template; the page needs no network and runs no script.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from leafward.errors import UsageError
from leafward.files import write_text
from leafward.report import figures
from leafward.report.number import Number, exact, format_column, is_numeric

if TYPE_CHECKING:
    from jinja2 import Template
    from matplotlib.figure import Figure

_IMAGE_TYPES = {b"\x89PNG\r\n\x1a\n": "image/png", b"\xff\xd8\xff": "image/jpeg"}
_WIDE_INCHES = 6.5  # a wider figure gets a row of the page to itself
# a YAML file can refer to itself, so a mapping may have no end
_MOST_ENTRIES, _DEEPEST = 5_000, 30


@dataclass
class _Section:
    title: str
    blocks: list[dict[str, Any]] = field(default_factory=list)


class Page:
    """A report that is filled from top to bottom and then written; each method adds one block.

    `subtitle` says in a line what was run.
    """

    def __init__(self, title: str, *, subtitle: str = "") -> None:
        self.title = title
        self.subtitle = subtitle
        self._sections = [_Section("")]
        self._figures = 0

    def section(self, title: str) -> None:
        """Begin a section; four or more of them give the page a table of contents."""
        self._sections.append(_Section(title))

    def headline(self, numbers: Sequence[Number]) -> None:
        """The numbers that matter, each with its interval and the Euclidean twin beside it."""
        self._add("headline", numbers=list(numbers), intervals=any(n.interval for n in numbers))

    def text(self, text: str) -> None:
        """Plain text; an empty line begins a new paragraph."""
        self._add("text", paragraphs=[part for part in text.split("\n\n") if part.strip()])

    def note(self, text: str) -> None:
        """A remark that must not be overlooked, such as a run that did not finish."""
        self._add("note", text=text)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]], caption: str = "") -> None:
        """A table of text, numbers, `Estimate`s and None; columns of numbers are set flush right."""
        for index, row in enumerate(rows):
            if len(row) != len(columns):
                raise UsageError(f"row {index} of the table has {len(row)} cells for {len(columns)} columns")
        by_column = [[row[index] for row in rows] for index in range(len(columns))]
        texts = [format_column(cells) for cells in by_column]
        self._add(
            "table",
            caption=caption,
            columns=[(name, is_numeric(cells)) for name, cells in zip(columns, by_column, strict=True)],
            rows=[[column[index] for column in texts] for index in range(len(rows))],
        )

    def figure(self, figure: Figure, caption: str, *, alt: str = "") -> None:
        """A matplotlib figure as inline SVG; `alt` (else the caption) describes it to a screen reader."""
        self._figures += 1
        svg = figures.to_svg(figure, alt=alt or caption, prefix=f"f{self._figures}-")
        self._add_figure(svg=svg, caption=caption, wide=figure.get_figwidth() > _WIDE_INCHES)

    def image(self, data: bytes, *, alt: str, caption: str = "") -> None:
        """A PNG or JPEG image, held in the page itself."""
        kind = next((kind for magic, kind in _IMAGE_TYPES.items() if data.startswith(magic)), None)
        if kind is None:
            raise UsageError(f"an image must be PNG or JPEG data; these {len(data)} bytes are neither")
        source = f"data:{kind};base64,{base64.b64encode(data).decode()}"
        self._add_figure(source=source, alt=alt, caption=caption, wide=False)

    def command(self, command: str) -> None:
        """The exact command line; the folder that the program lies in is left out, as it is that of one machine."""
        program, space, rest = command.partition(" ")
        self._add("command", command=os.path.basename(program) + space + rest)

    def environment(self, environment: Mapping[str, Any]) -> None:
        """Versions, commit, seeds and hardware, folded away."""
        self.details("Environment", environment)

    def details(self, title: str, values: Mapping[str, Any]) -> None:
        """A nested mapping (an environment, a configuration) as a list of dotted keys, folded away."""
        entries = [(key, exact(value)) for key, value in flatten(values).items()]
        self._add("details", title=title, entries=entries)

    def html(self) -> str:
        """The whole page as text."""
        sections = [section for section in self._sections if section.blocks or section.title]
        return _template().render(
            title=self.title,
            subtitle=self.subtitle,
            sections=sections,
            contents=[(i, s.title) for i, s in enumerate(sections) if s.title],
            css=figures.colour_css() + _resource("page.css") + figures.figure_css(),
        )

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the page in one step: a reader sees the old file or the new one."""
        # a name from the file system can hold bytes that are no text; they become question marks
        write_text(path, self.html().encode("utf-8", "replace").decode("utf-8"))

    def _add(self, kind: str, **block: Any) -> None:
        self._sections[-1].blocks.append({"kind": kind, **block})

    def _add_figure(self, **figure: Any) -> None:
        """Figures that follow one another form one grid."""
        blocks = self._sections[-1].blocks
        if not blocks or blocks[-1]["kind"] != "figures":
            self._add("figures", figures=[])
        blocks[-1]["figures"].append(figure)


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
