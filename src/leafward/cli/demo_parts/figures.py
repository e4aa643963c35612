"""Figures of the demo that no system has of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure

    from leafward.hierarchy import Taxonomy

COLUMNS = 5


def shares(table: Sequence[dict[str, Any]], parts: Sequence[str]) -> Figure:
    """One bar for each row of a table, divided into the shares of its `parts`."""
    from leafward.report import SERIES, legend, new_figure
    from leafward.report.figures import LIGHT

    figure, axes = new_figure(5.6, 0.9 + 0.42 * len(table))
    left = [0.0] * len(table)
    for part, colour in zip(parts, (SERIES[2], SERIES[5], LIGHT["rule"], SERIES[1]), strict=True):
        widths = [row[part] for row in table]
        axes.barh([row["method"] for row in table], widths, left=left, color=colour, label=part, height=0.62)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set(xlabel="% of the photos", xlim=(0, 100))
    legend(axes, loc="lower center", bbox_to_anchor=(0.35, 1.0), ncols=2)
    return figure


def album(tax: Taxonomy, truth: np.ndarray, before: np.ndarray, after: np.ndarray) -> Figure:
    """The first test photo of each class, with its true class and the answers before and after; all (photos)."""
    import numpy as np
    from matplotlib.figure import Figure

    from leafward.data.image_files import read_image
    from leafward.data.samples import photos
    from leafward.report import style

    shown = np.unique(truth, return_index=True)[1]
    files = [photo for photo in photos() if photo.split == "test"]
    rows = -(-len(shown) // COLUMNS)
    with style():
        figure = Figure(figsize=(5.4, 1.65 * rows), layout="constrained")
        for place, index in enumerate(shown, start=1):
            axes = figure.add_subplot(rows, COLUMNS, place)
            axes.imshow(np.asarray(read_image(files[index].jpeg, files[index].name)))
            axes.set_axis_off()
            axes.set_title(tax.names[truth[index]], fontsize=9, pad=3)
            lines = [_said(tax, int(answers[index]), int(truth[index])) for answers in (before, after)]
            axes.text(0.5, -0.04, "\n".join(lines), transform=axes.transAxes, ha="center", va="top", fontsize=8)
    return figure


def _said(tax: Taxonomy, answer: int, truth: int) -> str:
    return f"{tax.names[answer]} {'✓' if tax.entails(answer, truth) else '✗'}"
