"""What a training, an evaluation or a comparison found: one object, which `render` turns into the page, the terminal's
tables, JSON and CSV."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from leafward.errors import DataError, UsageError
from leafward.stats.estimate import Estimate

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console

_IMAGE_TYPES = {b"\x89PNG\r\n\x1a\n": "image/png", b"\xff\xd8\xff": "image/jpeg"}
Record = Mapping[str, Any]
Draw = Callable[[], "Figure"]


@dataclass
class Section:
    title: str
    blocks: list[dict[str, Any]] = field(default_factory=list)


class Result:
    """Estimates, notes, and sections of text, tables, curves and figures that are filled from top to bottom.

    `subtitle` says in a line what was run. `values` holds all else that JSON keeps, by name: per-sample or per-seed
    arrays too. `run` (a run directory, or True for this process) says how it was made, at the end of the page.
    """

    def __init__(
        self,
        title: str,
        subtitle: str = "",
        estimates: Sequence[Estimate] = (),
        *,
        notes: Sequence[str] = (),
        values: Mapping[str, Any] | None = None,
        run: str | os.PathLike[str] | bool = False,
    ) -> None:
        self.title, self.subtitle = title, subtitle
        self.estimates, self.notes = list(estimates), list(notes)
        self.values = dict(values or {})
        self.run = run if isinstance(run, bool) else Path(run)
        self._here = Section("")
        self.sections = [self._here]

    @classmethod
    def of(cls, found: Record, title: str = "", subtitle: str = "", *, run: Any = False, source: Any = "") -> Self:
        """From what `to_json` gave: the object in a result.json or evaluation.json. `source`: the file, for errors."""
        values = {key: value for key, value in found.items() if key not in ("headline", "notes")}
        return cls(title, subtitle, read_headline(source, found), notes=found.get("notes", ()), values=values, run=run)

    def section(self, title: str) -> None:
        """Begin a section; four or more of them give the page a table of contents."""
        self._here = Section(title)
        self.sections.append(self._here)

    def go_on(self, title: str) -> None:
        """Go on with the section of that title."""
        self._here = next(each for each in self.sections if each.title == title)

    def headline(self, numbers: Sequence[Estimate]) -> None:
        """Numbers that matter, within a section."""
        self._add("headline", numbers=list(numbers))

    def text(self, text: str) -> None:
        """Plain text; an empty line begins a new paragraph."""
        self._add("text", paragraphs=[part for part in text.split("\n\n") if part.strip()])

    def note(self, text: str) -> None:
        """A remark that must not be overlooked, such as a run that did not finish."""
        self._add("note", text=text)

    def table(
        self,
        columns: Sequence[str],
        rows: Sequence[Sequence[Any]],
        caption: str = "",
        *,
        terminal: bool | Sequence[str] = False,
    ) -> None:
        """A table of text, numbers, `Estimate`s and None; columns of numbers are set flush right.

        terminal: shown there too, with these names of its columns, for those that fit less.
        """
        for index, row in enumerate(rows):
            if len(row) != len(columns):
                raise UsageError(f"row {index} of the table has {len(row)} cells for {len(columns)} columns")
        self._add("table", caption=caption, columns=list(columns), rows=[list(row) for row in rows], terminal=terminal)

    def scores(self, found: Record, terminal: bool = True) -> None:
        """The estimates with intervals beside each other, and a table of everything in `found`, nested ones by their
        dotted names."""
        from leafward.report.figures import dots
        from leafward.report.render import flatten

        shown = {each.name: each for each in self.estimates if each.interval and not each.unit}
        if len(shown) > 1:
            self.section("Side by side")
            self.figure(lambda: dots(shown), "The numbers above, with their 95 % confidence intervals.")
        self.section("All scores")
        self.table(["", "value"], list(flatten(found).items()), terminal=terminal)

    def figure(self, figure: Figure | Draw, caption: str, *, alt: str = "") -> None:
        """A matplotlib figure, or what draws it when it is needed; `alt` (else the caption) describes it."""
        self._add_figure(figure=figure, caption=caption, alt=alt or caption)

    def image(self, data: bytes, *, alt: str, caption: str = "") -> None:
        """A PNG or JPEG image, held in the page itself."""
        kind = next((kind for magic, kind in _IMAGE_TYPES.items() if data.startswith(magic)), None)
        if kind is None:
            raise UsageError(f"an image must be PNG or JPEG data; these {len(data)} bytes are neither")
        self._add_figure(image=data, type=kind, alt=alt, caption=caption)

    def picture(self, file: Path, data: bytes, *, alt: str, caption: str = "") -> str:
        """An image that is a file of its own, too; gives its path."""
        from leafward.files import replacing

        with replacing(file) as temporary:
            temporary.write_bytes(data)
        self.image(data, alt=alt, caption=caption)
        return str(file)

    def curves(
        self, records: Mapping[str, Sequence[Record]], shown: Mapping[str, str], x: str = "step", **axes: Any
    ) -> None:
        """A figure for each name in `shown`, which gives its caption, that was logged: one curve for each model.

        records: the lines of metrics.jsonl by model; one in a `shown` name of several, "a, b", draws them together,
        the first thin. `axes` go to `Axes.set`.
        """
        from leafward.report.figures import course

        for names, caption in shown.items():
            wanted = names.split(", ")
            series = {
                model: [{line[x]: line[name] for line in lines if line.get(name) is not None} for name in wanted]
                for model, lines in records.items()
            }
            if any(several[-1] for several in series.values()):
                label = wanted[-1].partition("/")[2].replace("_", " ")
                self.figure(partial(course, series, **{"xlabel": x, "ylabel": label, **axes}), caption)

    def command(self, command: str) -> None:
        """The exact command line; the folder that the program lies in is left out, as it is that of one machine."""
        program, space, rest = command.partition(" ")
        self._add("command", command=os.path.basename(program) + space + rest)

    def details(self, title: str, values: Record) -> None:
        """A nested mapping (an environment, a configuration) as a list of dotted keys, folded away."""
        self._add("details", title=title, values=values)

    def how(self) -> None:
        """The last section of a page: the command, the configuration and the environment of what was run."""
        from leafward.engine.run import ENV, RunDirectory, environment
        from leafward.files import read_record

        self.section("How it was run")
        made = environment({}) if isinstance(self.run, bool) else read_record(self.run / ENV)
        self.command(shlex.join(made["argv"]))
        if not isinstance(self.run, bool):
            self.details("Configuration", RunDirectory.open(self.run).config)
        self.details("Environment", made)

    def to_json(self) -> dict[str, Any]:
        """Numbers as numbers: what result.json and evaluation.json hold."""
        from leafward.files import finite

        return finite({"headline": [each.to_json() for each in self.estimates], **self.values, "notes": self.notes})

    def to_csv(self, table: str | None = None) -> str:
        """The estimates, or the table of that caption, as comma-separated values with numbers as numbers."""
        from leafward.report.render import csv

        return csv(self, table)

    def html(self) -> str:
        """The page as text."""
        from leafward.report.render import html

        return html(self)

    def show(self, console: Console, title: str = "") -> None:
        """The estimates, the tables that are meant for it, and the notes, in a terminal."""
        from leafward.report.render import show

        show(self, console, title)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the page, or JSON or CSV where the name ends so, in one step: a reader sees the old file or the new."""
        from leafward.files import write_json, write_text

        ending = Path(path).suffix.lower()
        if ending == ".json":
            write_json(path, self.to_json())
        else:
            text = self.to_csv() if ending == ".csv" else self.html()
            # a name from the file system can hold bytes that are no text; they become question marks
            write_text(path, text.encode("utf-8", "replace").decode("utf-8"))

    def __repr__(self) -> str:
        numbers = "; ".join(f"{each.name} {each} {each.unit}".strip() for each in self.estimates[:4])
        more = f"; {len(self.estimates) - 4} more" if len(self.estimates) > 4 else ""
        return f"Result({self.title!r}{': ' * bool(numbers)}{numbers}{more})"

    def _repr_html_(self) -> str:
        from html import escape

        return f'<iframe srcdoc="{escape(self.html())}" style="width:100%;height:40em;border:0"></iframe>'

    def _add(self, kind: str, **block: Any) -> None:
        self._here.blocks.append({"kind": kind, **block})

    def _add_figure(self, **figure: Any) -> None:
        """Figures that follow one another form one grid."""
        blocks = self._here.blocks
        if not blocks or blocks[-1]["kind"] != "figures":
            self._add("figures", figures=[])
        blocks[-1]["figures"].append(figure)


def read_headline(source: Any, found: Record) -> list[Estimate]:
    """The headline numbers in the object of the JSON file `source`."""
    records = found.get("headline", [])
    if not isinstance(records, list):
        raise DataError(f"{source}: headline must be a list, not {type(records).__name__}")
    numbers: dict[str, Estimate] = {}
    for index, record in enumerate(records):
        try:
            number = Estimate.from_json(record)
        except UsageError as error:
            raise DataError(f"{source}: headline[{index}]: {error}") from error
        if number.name in numbers:
            raise DataError(f"{source}: headline[{index}]: the name {number.name!r} occurs twice")
        numbers[number.name] = number
    return list(numbers.values())
