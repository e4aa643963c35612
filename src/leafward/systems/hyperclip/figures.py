"""The radius sweep (HyperCLIP's Fig. 5): accuracy when the texts are brought to another radius, and its figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

from torch import Tensor

from leafward.encoders.scores import Score, radii, radius_sweep
from leafward.report import legend, line_with_band, log_axis, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SWEEP = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Radii of the texts, as multiples of their own."""
Points = list[dict[str, float]]
"""Radius and accuracy at each multiple."""


def sweeps(image: Tensor, text: Tensor, labels: Tensor, *, c: float, weight: float) -> dict[str, Points]:
    """The sweep with every score: images (B, d), texts (C, d), labels (B); the cosine's is flat by construction."""
    own = radii(text).mean
    return {
        score: radius_sweep(image, text, labels, [own * factor for factor in SWEEP], score, c=c, weight=weight)
        for score in get_args(Score)
    }


def sweep_figure(
    lines: Mapping[str, Sequence[Mapping[str, float]]], looks: Mapping[str, Mapping[str, Any]] | None = None
) -> Figure:
    """Accuracy against the radius, a line for each label."""
    figure, axes = new_figure(height=4.4 if len(lines) > 1 else 3.3)
    for label, points in lines.items():
        look = {"marker": "o", **(looks[label] if looks else {})}
        line_with_band(axes, SWEEP, [100.0 * point["accuracy"] for point in points], label=label, **look)
    log_axis(axes, "x")
    axes.set_xticks(SWEEP, [f"{factor:g}" for factor in SWEEP])
    axes.set_xticks([], minor=True)
    axes.set(xlabel="radius of the texts, times their own", ylabel="accuracy, %")
    legend(axes, ncols=2, loc="upper center", bbox_to_anchor=(0.45, -0.18), handlelength=3)
    return figure
