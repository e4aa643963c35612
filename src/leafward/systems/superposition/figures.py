"""The figures of the superposition experiment, each a matplotlib figure with its caption."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from leafward.measure.theory import etf_overlap
from leafward.report import SERIES, legend, line_with_band, log_axis, new_figure, points_with_bars
from leafward.report.figures import LIGHT
from leafward.systems.superposition.analysis import cells, excess, reference_law
from leafward.systems.superposition.claims import signed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = dict[str, Any]
MUTED = LIGHT["muted"]
REFERENCE = {"color": MUTED, "linewidth": 1.2}  # lines of theory
SIZE = (5.6, 3.8)
STRONG_SHOWN, WEAK_SHOWN = -5 / 9, 1 / 3  # the γ shown where one is, or the nearest; those of the paper


class Drawn(NamedTuple):
    """A figure, the stem of its file name, and what it shows."""

    name: str
    figure: Figure
    caption: str


def draw(rows: Sequence[Row], result: dict[str, Any], features: int) -> list[Drawn]:
    """Every figure that this run has data for."""
    makers: tuple[Callable[[], Drawn | None], ...] = (
        lambda: represented(rows, features),
        lambda: losses(rows, result["fits"], "strong"),
        lambda: losses(rows, result["fits"], "weak"),
        lambda: exponents(result["fits"]),
        lambda: norms(result["norms"]),
        lambda: overlaps(rows, features),
        lambda: weak_theory(rows),
        lambda: joint(result["joint"]),
    )
    return [drawn for make in makers if (drawn := make()) is not None]


def represented(rows: Sequence[Row], features: int) -> Drawn | None:
    """φ_½ against γ, one line for each width."""
    law = reference_law(rows)
    chosen = [row for row in rows if row["law"] == law]
    decays = sorted({row["decay"] for row in chosen})
    if len(decays) < 2:
        return None
    figure, axes = new_figure(*SIZE)
    for colour, width in zip(SERIES, spread(sorted({row["width"] for row in chosen}), len(SERIES)), strict=False):
        values = [[r["phi_half"] for r in chosen if (r["width"], r["decay"]) == (width, decay)] for decay in decays]
        mean = [float(np.mean(each)) for each in values]
        band = [[min(each) for each in values], [max(each) for each in values]] if len(values[0]) > 1 else []
        line_with_band(axes, decays, mean, *band, label=f"m = {width}", marker="o", color=colour)
        axes.axhline(width / features, color=colour, linewidth=0.9, linestyle=":")
    axes.set(xlabel="decay γ", ylabel="represented features φ½", ylim=(-0.03, 1.03))
    legend(axes, title=law_words(law))
    seeds = "; bands: all seeds" if len({row["seed"] for row in chosen}) > 1 else ""
    return Drawn("represented", figure, f"Fraction of features with a row longer than ½. Dotted: m/n{seeds}.")


def losses(rows: Sequence[Row], fits: Sequence[dict[str, Any]], regime: str) -> Drawn | None:
    """Loss against width with the fitted lines, for several laws at one γ."""
    chosen = [fit for fit in fits if fit["regime"] == regime and fit["exponent"] is not None]
    if not chosen:
        return None
    decay = nearest({fit["decay"] for fit in chosen}, STRONG_SHOWN if regime == "strong" else WEAK_SHOWN)
    chosen = spread([fit for fit in chosen if fit["decay"] == decay], 5)
    table = cells(rows)
    figure, axes = new_figure(*SIZE)
    for colour, fit in zip(SERIES, chosen, strict=False):
        points = [(row["width"], excess(row)) for row in table[fit["law"], decay]]
        points = [(width, value) for width, value in points if value is not None]
        widths, values = zip(*points, strict=True)
        label = f"{law_words(fit['law'])}: {fit['exponent']:.2f} ± {fit['standard_error']:.2f}"
        points_with_bars(axes, widths, values, color=colour, label=label)
        ends = np.array([min(widths), max(widths)], dtype=float)
        axes.plot(ends, fit["coefficient"] * ends ** -fit["exponent"], color=colour, linewidth=1.3)
    log_axis(axes)
    _room(axes, below=0.6)
    axes.set(xlabel="width m", ylabel="loss")
    legend(axes, title=f"γ = {signed(decay)}: exponent ± s.e.", loc="lower left")
    caption = f"Loss against width, {regime} superposition (γ = {signed(decay)}), with straight fits in the logarithms."
    return Drawn(f"loss-{regime}", figure, caption)


def exponents(fits: Sequence[dict[str, Any]]) -> Drawn | None:
    """α_m against α with both theories."""
    powers = [fit for fit in fits if fit["alpha"] is not None and fit["exponent"] is not None]
    alphas = sorted({fit["alpha"] for fit in powers})
    if len(alphas) < 2:
        return None
    figure, axes = new_figure(*SIZE)
    for regime, marker, colours in (("strong", "o", SERIES[:3]), ("weak", "s", SERIES[3:6])):
        decays = sorted({fit["decay"] for fit in powers if fit["regime"] == regime}, key=abs, reverse=True)
        for place, (colour, decay) in enumerate(zip(colours, spread(decays, 3), strict=False)):
            group = sorted((fit for fit in powers if fit["decay"] == decay), key=lambda fit: fit["alpha"])
            # Set the groups a little apart, so that their bars do not hide one another.
            shift = (place - 1) * 0.06 * (alphas[1] - alphas[0])
            x = [fit["alpha"] + shift for fit in group]
            low, high = zip(*(fit["interval"] for fit in group), strict=True)
            label = f"γ = {signed(decay)}"
            y = [fit["exponent"] for fit in group]
            points_with_bars(axes, x, y, low, high, label=label, color=colour, marker=marker)
    line = np.linspace(min(alphas), max(alphas), 200)
    axes.plot(line, np.maximum(1, 2 * (line - 1)), **REFERENCE, label="strong: max(1, 2(α−1))")
    if max(alphas) > 1:
        rising = line[line >= 1]
        axes.plot(rising, rising - 1, **REFERENCE, linestyle="--", label="weak: α−1")
    shown = [fit["exponent"] for fit in powers]
    axes.set(xlabel="exponent α of the frequencies", ylabel="exponent of the loss in m")
    axes.set_ylim(min(-0.1, *shown) - 0.1, 1.25 * max(2.0, *shown))
    legend(axes, ncols=2, loc="upper left", fontsize=8)
    return Drawn("exponents", figure, "Fitted exponents with 95 % intervals, and what the paper expects.")


def norms(histogram: dict[str, Any] | None) -> Drawn | None:
    """Histograms of the row norms at a few γ."""
    if histogram is None or not histogram["decays"]:
        return None
    figure, axes = new_figure(*SIZE)
    edges = np.array(histogram["edges"])
    pairs = list(zip(histogram["decays"], histogram["counts"], strict=True))
    for colour, (decay, counts) in zip(SERIES, spread(pairs, 4), strict=False):
        axes.stairs(np.array(counts) / sum(counts), edges, color=colour, label=f"γ = {signed(decay)}", linewidth=1.5)
    axes.set_yscale("symlog", linthresh=0.01)
    log_ticks = [0, 0.01, 0.1, 1]
    axes.set_yticks(log_ticks, [f"{tick:g}" for tick in log_ticks])
    axes.set(xlabel="norm of a row of W", ylabel="fraction of the rows", ylim=(0, 1.1))
    legend(axes, title=f"m = {histogram['width']}, {law_words(histogram['law'])}")
    return Drawn("norms", figure, "How long the rows of W are: near 1 for γ < 0, near 0 or 1 for γ > 0.")


def overlaps(rows: Sequence[Row], features: int) -> Drawn | None:
    """Mean squared overlap of the rows with norm > 1 against the width, with 1/m and the Welch bound."""
    law = reference_law(rows)
    chosen = [row for row in rows if row["law"] == law and row["strong_overlap_mean"] and row["decay"] <= 0]
    if not chosen:
        return None
    figure, axes = new_figure(*SIZE)
    decays = spread(sorted({row["decay"] for row in chosen}), 2)
    for colour, decay in zip(SERIES, decays, strict=False):
        group = [row for row in chosen if row["decay"] == decay]
        widths = [row["width"] for row in group]
        label = f"γ = {signed(decay)}, rows longer than 1"
        points_with_bars(axes, widths, [row["strong_overlap_mean"] for row in group], color=colour, label=label)
        everyone = [row["overlap_mean"] for row in group]
        points_with_bars(axes, widths, everyone, color=colour, marker="x", label=f"γ = {signed(decay)}, all rows")
    line = np.array(sorted({row["width"] for row in rows}))
    axes.plot(line, 1 / line, **REFERENCE, label="1/m")
    bound = [etf_overlap(features, int(width)) for width in line]
    axes.plot(line, bound, **REFERENCE, linestyle="--", label="Welch bound, ν = min(n, m²/2)")
    log_axis(axes)
    _room(axes, above=0.7)
    axes.set(xlabel="width m", ylabel="mean squared overlap")
    legend(axes, title=law_words(law), loc="upper right", fontsize=8)
    return Drawn("overlaps", figure, "Mean squared overlap of normalised rows; random vectors have 1/m.")


def weak_theory(rows: Sequence[Row]) -> Drawn | None:
    """Loss against the weak theory, with the diagonal."""
    shown = [row for row in rows if row["loss"] and row["weak_loss"] and row["loss_floor"] == 0]
    if not shown:
        return None
    figure, axes = new_figure(*SIZE)
    for colour, words, keep in (
        (SERIES[0], "γ < 0", lambda decay: decay < 0),
        (SERIES[2], "γ = 0", lambda decay: decay == 0),
        (SERIES[1], "γ > 0", lambda decay: decay > 0),
    ):
        group = [row for row in shown if keep(row["decay"])]
        if group:
            x, y = [row["weak_loss"] for row in group], [row["loss"] for row in group]
            points_with_bars(axes, x, y, color=colour, label=words, markersize=3.5, alpha=0.75)
    ends = [min(row["weak_loss"] for row in shown), max(row["weak_loss"] for row in shown)]
    axes.plot(ends, ends, **REFERENCE, label="loss = theory")
    log_axis(axes)
    axes.set(xlabel="weak theory: Σ (⟨v²⟩ p − ⟨v⟩² p²) over features not represented", ylabel="loss")
    legend(axes)
    missing = sum(row["weak_loss"] == 0 for row in rows)
    left_out = f" {missing} models that represent every feature (theory 0) are not shown." if missing else ""
    return Drawn("weak-theory", figure, f"Loss of every model against the weak theory.{left_out}")


def joint(fits: Sequence[dict[str, Any]]) -> Drawn | None:
    """The exponents of the joint law against γ, one group of points for each axis."""
    fitted = [fit for fit in fits if "exponents" in fit]
    if not fitted:
        return None
    figure, axes = new_figure(*SIZE)
    law = nearest_law(fitted)
    chosen = sorted((fit for fit in fitted if fit["law"] == law), key=lambda fit: fit["decay"])
    for place, (colour, name) in enumerate(zip(SERIES, chosen[0]["exponents"], strict=False)):
        x = [index + 0.12 * (place - 1) for index in range(len(chosen))]
        low, high = zip(*(fit["intervals"][name] for fit in chosen), strict=True)
        points_with_bars(axes, x, [fit["exponents"][name] for fit in chosen], low, high, color=colour, label=name)
    log_axis(axes, "y")
    axes.set_xticks(range(len(chosen)), [f"{signed(fit['decay'])}" for fit in chosen])
    axes.set(xlabel="decay γ", ylabel="exponent")
    legend(axes, title=law_words(law))
    return Drawn("joint", figure, "Exponents of the joint law, one term for each axis, with 95 % intervals.")


def _room(axes: Axes, *, below: float = 0.0, above: float = 0.0) -> None:
    """Lengthen a logarithmic y axis by parts of its length, so that a legend hides no point."""
    low, high = axes.get_ylim()
    span = high / low
    axes.set_ylim(low / span**below, high * span**above)


def nearest_law(fits: Sequence[dict[str, Any]]) -> str:
    """The law of a figure that shows one of the joint fits."""
    return reference_law([{"law": fit["law"], "alpha": fit["alpha"]} for fit in fits])


def spread(values: Sequence[Any], count: int) -> list[Any]:
    """At most `count` of the values, evenly spaced, both ends included."""
    if len(values) <= count:
        return list(values)
    return [values[round(k * (len(values) - 1) / (count - 1))] for k in range(count)]


def nearest(values: Iterable[float], wanted: float) -> float:
    return min(values, key=lambda value: abs(value - wanted))


def law_words(law: str) -> str:
    """ "α = 1.5" for a power law, else the law as it is called."""
    name, _, argument = law.partition(":")
    return f"α = {float(argument or 1):g}" if name == "power" else law
