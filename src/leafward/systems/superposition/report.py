"""The page of a superposition run: verdicts first, then figures, then every exponent."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leafward.config import to_dict
from leafward.report import Estimate, Number, Page, save_svg
from leafward.systems.superposition.analysis import reference_law
from leafward.systems.superposition.claims import signed
from leafward.systems.superposition.figures import STRONG_SHOWN, WEAK_SHOWN, Drawn, draw, law_words, nearest

if TYPE_CHECKING:
    from leafward.systems.superposition.config import Config

Row = dict[str, Any]
MOST_ROWS = 40  # of the table of ranges; beyond it only the γ of the figures are listed


def write(config: Config, result: dict[str, Any], environment: dict[str, Any], out: Path) -> None:
    """Write figures/*.svg and report.html in the run directory `out`."""
    names = result["models"]
    rows = [dict(zip(names, values, strict=True)) for values in zip(*names.values(), strict=True)]
    drawn = draw(rows, result, config.features)
    for old in (out / "figures").glob("*.svg"):  # of a run that was replaced
        old.unlink()
    for each in drawn:
        save_svg(each.figure, out / "figures" / f"{each.name}.svg", alt=each.caption)
    page(config, result, rows, drawn, environment).write(out / "report.html")


def page(
    config: Config,
    result: dict[str, Any],
    rows: Sequence[Row],
    drawn: Sequence[Drawn],
    environment: dict[str, Any],
) -> Page:
    """The page, not yet written."""
    made = Page(
        "Superposition and scaling",
        subtitle=f"{len(rows)} toy models: n = {config.features}, {len(config.widths)} widths, "
        f"{len({row['decay'] for row in rows})} decays, {len({row['law'] for row in rows})} frequency laws, "
        f"{config.arms.seeds} seed{'s' * (config.arms.seeds > 1)}, {config.loop.steps} steps",
    )
    for note in result["notes"]:
        made.note(note)
    made.headline([Number.from_json(number) for number in result["headline"]])
    made.section("Claims of the paper")
    made.table(
        ["claim", "here", "verdict", "more"],
        [
            [claim["claim"], Estimate(claim["value"], claim["interval"]), claim["verdict"], claim["note"]]
            for claim in result["claims"]
        ],
        "“Superposition Yields Robust Neural Scaling” (arXiv 2505.10465), tested on this run",
    )
    made.section("Figures")
    for each in drawn:
        made.figure(each.figure, each.caption)
    made.section("Exponents")
    _exponents(made, result["fits"])
    _ranges(made, result["fits"])
    if result["joint"]:
        _joint(made, result["joint"])
    made.section("Geometry")
    _geometry(made, rows)
    made.section("How it was run")
    made.command(shlex.join(environment["argv"]))
    made.details("Configuration", to_dict(config))
    made.environment(environment)
    return made


def _exponents(made: Page, fits: Sequence[dict[str, Any]]) -> None:
    decays = sorted({fit["decay"] for fit in fits})
    found = {(fit["law"], fit["decay"]): Estimate(fit["exponent"], fit["interval"]) for fit in fits}
    laws = list(dict.fromkeys(fit["law"] for fit in fits))
    methods = {fit["interval_method"] for fit in fits} - {None}
    made.table(
        ["law", *(f"γ = {signed(decay)}" for decay in decays)],
        [[law_words(law), *(found.get((law, decay)) for decay in decays)] for law in laws],
        f"Exponent of the loss in the width, with its 95 % interval ({'; '.join(sorted(methods))})",
    )


def _ranges(made: Page, fits: Sequence[dict[str, Any]]) -> None:
    shown = [fit for fit in fits if fit["automatic"] is not None]
    if not shown:
        return
    decays = {fit["decay"] for fit in shown}
    if len(shown) > MOST_ROWS:
        decays = {nearest(decays, STRONG_SHOWN), nearest(decays, WEAK_SHOWN)}
    shown = [fit for fit in shown if fit["decay"] in decays]
    by_hand = any(fit["by_hand"] for fit in shown)
    rows = []
    for fit in shown:
        chosen, hand, without = fit["automatic"], fit["by_hand"], fit["leave_largest_out"]
        rows.append(
            [
                law_words(fit["law"]),
                round(fit["decay"], 3),
                fit["exponent"],
                fit["r_squared"],
                Estimate(chosen["exponent"], chosen["interval"]),
                f"m ≥ {chosen['low']:g}",
                chosen["straight"],
                *([Estimate(hand["exponent"], hand["interval"]), f"m ≥ {hand['low']:g}"] if by_hand else []),
                without["exponent"],
                f"{without['log_error']:.0%}",
                min(fit["alternatives"]["delta_aicc"], key=lambda name: fit["alternatives"]["delta_aicc"][name]),
            ]
        )
    made.table(
        [
            "law",
            "γ",
            "all widths",
            "R²",
            "automatic range",
            "its widths",
            "straight",
            *(["range of the paper", "its widths"] if by_hand else []),
            "without the largest",
            "error there",
            "best law (AICc)",
        ],
        rows,
        "The same exponents over other ranges, how well the largest width is predicted from the others, and which of "
        "power, exponential and logarithmic law fits best",
    )


def _joint(made: Page, fits: Sequence[dict[str, Any]]) -> None:
    names = next((list(fit["exponents"]) for fit in fits if "exponents" in fit), [])
    rows = []
    for fit in fits:
        if "error" in fit:
            cells, remark = [None] * len(names), fit["error"]
        else:
            cells = [Estimate(fit["exponents"][name], fit["intervals"][name]) for name in names]
            remark = f"rms error {fit['rms_log_error']:.1%}"
            if fit["undetermined"]:
                remark += f"; these data do not settle the exponent of {', '.join(fit['undetermined'])}"
        rows.append([law_words(fit["law"]), round(fit["decay"], 3), *cells, remark])
    made.table(["law", "γ", *names, ""], rows, "Exponents of the joint law, a sum of one power of each axis")


def _geometry(made: Page, rows: Sequence[Row]) -> None:
    law = reference_law(rows)
    rows = [row for row in rows if row["law"] == law]
    widths = sorted({row["width"] for row in rows})
    decays = sorted({row["decay"] for row in rows})
    for caption, value in (
        ("φ½: fraction of rows longer than ½", lambda row: row["phi_half"]),
        ("φ₁: fraction of rows longer than 1", lambda row: row["phi_one"]),
        (
            "m times the mean squared overlap of rows longer than 1 (random vectors: 1)",
            lambda row: _ratio(row["strong_overlap_mean"], 1 / row["width"]),
        ),
        (
            "Variance of the squared overlap of rows longer than 1 over that of random vectors",
            lambda row: _ratio(row["strong_overlap_variance"], row["random_overlap_variance"]),
        ),
        ("Loss over the weak theory", lambda row: _ratio(row["loss"], row["weak_loss"])),
        (
            "Loss over the leading order ⟨v²⟩ Σ p of the weak theory, as in the paper's figure",
            lambda row: _ratio(row["loss"], row["weak_loss_leading"]),
        ),
    ):
        cells = {
            (decay, width): _mean([value(row) for row in rows if (row["decay"], row["width"]) == (decay, width)])
            for decay in decays
            for width in widths
        }
        made.table(
            ["γ", *(f"m = {width}" for width in widths)],
            [[round(decay, 3), *(cells[decay, width] for width in widths)] for decay in decays],
            f"{caption}; {law_words(law)}, mean over seeds",
        )


def _ratio(value: float | None, reference: float | None) -> float | None:
    return value / reference if value is not None and reference else None


def _mean(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else None
