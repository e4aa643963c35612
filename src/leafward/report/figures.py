"""Figures in one style: matplotlib `Figure` objects, without pyplot and its global state, written as SVG.

The SVG carries the light colours as plain attributes, so that any viewer shows it; `figure_css()` recolours
the same elements on a dark page, because a CSS rule goes before an attribute. Text stays text. Symbols such
as φ½, α or γ are written in Unicode rather than in TeX.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from leafward.errors import UsageError
from leafward.files import write_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    from leafward.stats.estimate import Estimate

# name: (light, dark). The series keep a contrast of 3:1 with the paper and stay apart under protanopia,
# deuteranopia and tritanopia; the tests measure both.
COLOURS = {
    "ink": ("#1f2328", "#e6e9ee"),
    "muted": ("#59636e", "#a3adba"),
    "rule": ("#d9dee4", "#363e49"),
    "paper": ("#ffffff", "#14181d"),
    "series-1": ("#2a4fc4", "#5b8cff"),
    "series-2": ("#e06a00", "#ec7a3c"),
    "series-3": ("#0b7754", "#2fd18a"),
    "series-4": ("#cb73ae", "#cf7fc0"),
    "series-5": ("#754a0c", "#f0d84a"),
    "series-6": ("#2b98ea", "#bfe6f7"),
}
LIGHT = {name: light for name, (light, _) in COLOURS.items()}
SERIES = tuple(light for name, light in LIGHT.items() if name.startswith("series-"))
"""The categorical palette, for `color=`; colours from here (and black and white) follow the page."""

# matplotlib measures with a font that it always has; the SVG asks for the reader's own, which is no wider
_MEASURED_FONT, _SHOWN_FONT = "DejaVu Sans", "system-ui,sans-serif"
_STYLE: dict[Any, Any] = {
    "font.family": [_MEASURED_FONT],
    "font.size": 9.5,
    "text.color": LIGHT["ink"],
    "axes.edgecolor": LIGHT["muted"],
    "axes.facecolor": LIGHT["paper"],
    "axes.labelcolor": LIGHT["ink"],
    "axes.titlesize": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LIGHT["rule"],
    "grid.linewidth": 0.6,
    "xtick.color": LIGHT["muted"],
    "ytick.color": LIGHT["muted"],
    "lines.linewidth": 1.8,
    "lines.markersize": 5.0,
    "legend.edgecolor": LIGHT["rule"],
    "legend.framealpha": 0.85,
    "legend.fontsize": 9.0,
    "image.cmap": "viridis",
    "svg.fonttype": "none",
    "svg.hashsalt": "leafward",
}
_SVG = "http://www.w3.org/2000/svg"
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@contextmanager
def style() -> Iterator[None]:
    """The house style, for plotting calls beyond the helpers of this module."""
    import matplotlib
    from cycler import cycler

    with matplotlib.rc_context({**_STYLE, "axes.prop_cycle": cycler(color=SERIES)}):
        yield


def new_figure(width: float = 5.2, height: float = 3.3) -> tuple[Figure, Axes]:
    """A figure of `width` × `height` inches with one pair of axes.

    The default fits a phone; up to 6.5 inches two figures share a row of a wide page.
    """
    from matplotlib.figure import Figure

    for name, value in (("width", width), ("height", height)):
        if not 0.5 <= value <= 50:
            raise UsageError(f"{name} of a figure must be between 0.5 and 50 inches, not {value!r}")
    with style():
        figure = Figure(figsize=(width, height), layout="constrained")
        return figure, figure.add_subplot()


def line_with_band(
    axes: Axes, x: Any, y: Any, low: Any = None, high: Any = None, *, label: str | None = None, **line: Any
) -> Line2D:
    """A line through (x, y) and, with `low` and `high`, the band of its interval; `line` goes to `plot`."""
    _both_or_none(low, high)
    with style():
        (drawn,) = axes.plot(x, y, label=label, **line)
        if low is not None:
            axes.fill_between(x, low, high, color=drawn.get_color(), alpha=0.18, linewidth=0)
    return drawn


def points_with_bars(
    axes: Axes, x: Any, y: Any, low: Any = None, high: Any = None, *, label: str | None = None, **line: Any
) -> Line2D:
    """Points at (x, y) and, with `low` and `high`, a bar over each interval; `line` goes to `plot`.

    The interval may lie to one side of the point, as a bootstrap interval can. To draw a fit through the
    points, give its line the colour of the result: ``axes.plot(..., color=drawn.get_color())``.
    """
    _both_or_none(low, high)
    with style():
        (drawn,) = axes.plot(x, y, label=label, **{"marker": "o", "linestyle": "none", **line})
        if low is not None:
            axes.vlines(x, low, high, color=drawn.get_color(), linewidth=1.2)
    return drawn


def dots(estimates: Mapping[str, Estimate]) -> Figure:
    """Numbers of one scale by name, under one another in that order, each with its interval where it has one."""
    figure, axes = new_figure(height=0.8 + 0.35 * len(estimates))
    rows = range(len(estimates))
    with style():
        values = [each.number for each in estimates.values()]
        (drawn,) = axes.plot(values, rows, marker="o", linestyle="none")
        for row, each in zip(rows, estimates.values(), strict=True):
            if each.interval is not None:
                axes.hlines(row, *each.interval, color=drawn.get_color(), linewidth=1.2)
        axes.set_yticks(rows, [literal(name) for name in estimates])
        axes.set_ylim(len(estimates) - 0.5, -0.5)
    return figure


Points = Mapping[float, float]
MOST_POINTS = 400  # of one curve; beyond it the line shows means and the band the range
_LOG_RANGE = 20.0  # a positive series that spans more than this factor gets a logarithmic axis


def course(series: Mapping[str, Sequence[Points]], *, by_range: bool = False, **options: Any) -> Figure:
    """What was logged, one curve for each model, which looks the same in every figure. options: for `Axes.set`.

    Of several curves of a model the last has the label; those before it are thin. by_range: a series of a great range
    gets a logarithmic axis.
    """
    figure, axes = new_figure()
    for index, (model, several) in enumerate(series.items()):
        # dashes tell more models apart than there are colours
        line: dict[str, Any] = {"color": SERIES[index % len(SERIES)]}
        line["linestyle"] = ("-", "--", ":")[index // len(SERIES) % 3]
        for points in filter(None, several):
            last = points is several[-1]
            x, mean, low, high = thinned(points)
            band = (low, high) if len(points) > MOST_POINTS else (None, None)
            look: dict[str, Any] = (
                {"label": literal(model), "marker": "." if len(points) <= 60 else None} if last else {"linewidth": 0.8}
            )
            line_with_band(axes, x, mean, *band, **line, **look)
    values = [value for several in series.values() for points in several for value in points.values()]
    if by_range and min(values) > 0 and max(values) > _LOG_RANGE * min(values):
        log_axis(axes, "y")
    axes.set(**options)
    if sum(map(len, series.values())) > 1:
        legend(axes)
    return figure


def thinned(points: Points) -> tuple[list[float], ...]:
    """Steps, means, minima and maxima of at most `MOST_POINTS` groups of neighbouring steps."""
    import numpy as np

    steps, values = (np.array(list(column), float) for column in (points, points.values()))
    groups = min(len(steps), MOST_POINTS)
    starts = np.arange(groups) * len(steps) // groups
    sizes = np.diff(starts, append=len(steps))
    columns = (
        np.add.reduceat(steps, starts) / sizes,
        np.add.reduceat(values, starts) / sizes,
        np.minimum.reduceat(values, starts),
        np.maximum.reduceat(values, starts),
    )
    return tuple(column.tolist() for column in columns)


def log_axis(axes: Axes, which: str = "xy") -> None:
    """Make the x axis, the y axis or both logarithmic, with labels in plain text (0.01, 100, 10⁶)."""
    from matplotlib.ticker import LogFormatter

    class PlainLogFormatter(LogFormatter):
        """Labels the ticks that `LogFormatter` would, in the house's way of writing numbers."""

        def __call__(self, x: float, pos: int | None = None) -> str:
            return _tick(x) if super().__call__(x, pos) else ""

    if which not in ("x", "y", "xy"):
        raise UsageError(f"which must be 'x', 'y' or 'xy', not {which!r}")
    with style():
        for name in which:
            axes.set(**{f"{name}scale": "log"})
            axis = getattr(axes, f"{name}axis")
            axis.set_major_formatter(PlainLogFormatter())
            axis.set_minor_formatter(PlainLogFormatter(labelOnlyBase=False, minor_thresholds=(1.2, 0.5)))


def whole_numbers(axes: Axes) -> None:
    """Ticks of the x axis at whole numbers only: levels, ranks, seeds."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def legend(axes: Axes, **options: Any) -> None:
    """The legend in the house style; `options` go to `Axes.legend`."""
    with style():
        axes.legend(**options)


def literal(text: str) -> str:
    """A user's text as a label: no dollar sign starts a formula, and what no font or file can hold is replaced."""
    return _NOT_XML.sub("\ufffd", text).replace("$", r"\$")


def to_svg(figure: Figure, *, alt: str = "", prefix: str | None = None) -> str:
    """The figure as an `<svg>` element for a page with `figure_css()`; one figure always gives the same text.

    All ids begin with `prefix` (by default a hash of the content), so that figures on one page do not clash.
    """
    root = _svg_tree(figure)
    if prefix is None:
        prefix = f"f{hashlib.sha256(ElementTree.tostring(root)).hexdigest()[:10]}-"
    for element in root.iter():
        for name, value in element.attrib.items():
            element.set(name, _with_prefix(name, value, prefix))
    if alt:
        root.set("role", "img")
        root.set("aria-label", _NOT_XML.sub("\ufffd", alt))
    return ElementTree.tostring(root, encoding="unicode")


def save_svg(figure: Figure, path: str | os.PathLike[str], *, alt: str = "") -> None:
    """Write a standalone SVG file that follows the reader's light or dark setting."""
    root = ElementTree.fromstring(to_svg(figure, alt=alt))
    sheet = ElementTree.Element("style")
    # its own paper, because a browser shows a bare SVG on white also when the reader's setting is dark
    sheet.text = colour_css() + figure_css() + "svg{background:var(--paper)}\n"
    root.insert(0, sheet)
    root.set("xmlns", _SVG)
    write_text(path, ElementTree.tostring(root, encoding="unicode") + "\n")


def colour_css() -> str:
    """The palette as CSS variables (`--ink`, `--paper`, `--series-1` …), light, and dark on a dark screen."""
    light, dark = ("".join(f"--{name}:{pair[shade]};" for name, pair in COLOURS.items()) for shade in (0, 1))
    return f":root{{{light}}}\n@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}\n"


def figure_css() -> str:
    """Rules that give the elements of our SVGs the colours of the page's variables.

    The selectors name no ancestor: a marker that is drawn by `<use>` has none.
    """
    return "".join(
        f'[{kind}="{light}"]{{{kind}:var(--{name})}}\n' for name, light in LIGHT.items() for kind in ("fill", "stroke")
    )


def _both_or_none(low: Any, high: Any) -> None:
    if (low is None) != (high is None):
        raise UsageError("low and high go together: give both ends of the interval or neither")


def _tick(x: float) -> str:
    from leafward.stats.digits import format_value

    return format_value(float(x)).removeprefix("1×")


def _svg_tree(figure: Figure) -> ElementTree.Element:
    """Matplotlib's SVG as a tree without namespaces, metadata and style sheet, colours as attributes."""
    buffer = io.StringIO()
    with style(), warnings.catch_warnings():
        # text stays text, so it is the reader's fonts that must have the glyph
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    # a label that did not come through `literal` can hold what XML cannot, for instance a control character
    root = ElementTree.fromstring(_NOT_XML.sub("\ufffd", buffer.getvalue()))
    for parent in root.iter():
        for child in list(parent):
            if _local(child.tag) in ("metadata", "style"):
                parent.remove(child)
    for element in root.iter():
        element.tag = _local(element.tag)
        attributes = {_local(name): value for name, value in element.attrib.items()}
        element.attrib.clear()
        element.attrib.update(_tidied(attributes))
    # what matplotlib sets by its style sheet, and the black that it leaves out as the default fill
    root.attrib.update({"fill": LIGHT["ink"], "stroke-linejoin": "round", "stroke-linecap": "butt"})
    return root


def _local(name: str) -> str:
    return name.rpartition("}")[2]


def _tidied(attributes: dict[str, str]) -> dict[str, str]:
    """One element's attributes: no outside references, short coordinates, colours out of `style`."""
    kept = {}
    for name, value in attributes.items():
        if name == "href" and not value.startswith(("#", "data:image/png;")):
            continue
        if name in ("d", "x", "y"):
            value = re.sub(r"-?\d+\.\d{3,}", lambda match: f"{float(match[0]):.2f}", value)
        if name != "style":
            kept[name] = value
    rest = []
    for declaration in filter(None, map(str.strip, attributes.get("style", "").split(";"))):
        name, _, value = map(str.strip, declaration.partition(":"))
        if name in ("fill", "stroke"):
            kept[name] = LIGHT["ink"] if value == "#000000" else value
        else:
            rest.append(f"{name}:{value}".replace(f"'{_MEASURED_FONT}'", _SHOWN_FONT))
    if rest:
        kept["style"] = ";".join(rest)
    return kept


def _with_prefix(name: str, value: str, prefix: str) -> str:
    if name == "id":
        return prefix + value
    if name == "href" and value.startswith("#"):
        return f"#{prefix}{value[1:]}"
    return re.sub(r"url\(#", f"url(#{prefix}", value)
