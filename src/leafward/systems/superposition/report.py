"""The page of a superposition run: verdicts first, then figures, then every exponent."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leafward.report import Estimate, Result, save_svg
from leafward.systems.superposition.analysis import reference_law
from leafward.systems.superposition.claims import signed
from leafward.systems.superposition.figures import STRONG_SHOWN, WEAK_SHOWN, draw, law_words, nearest

if TYPE_CHECKING:
    from leafward.systems.superposition.config import Config

Row = dict[str, Any]
MOST_ROWS = 40  # of the table of ranges; beyond it only the γ of the figures are listed


def result(config: Config, found: dict[str, Any]) -> Result:
    """What the run found, without its figures; `found`: as `analysis.analyse` gives it."""
    rows = models(found)
    subtitle = (
        f"{len(rows)} toy models: n = {config.features}, {len(config.widths)} widths, "
        f"{len({row['decay'] for row in rows})} decays, {len({row['law'] for row in rows})} frequency laws, "
        f"{config.arms.seeds} seed{'s' * (config.arms.seeds > 1)}, {config.loop.steps} steps"
    )
    made = Result.of(found, "Superposition and scaling", subtitle)
    made.section("Claims of the paper")
    made.table(
        ["claim", "here", "verdict", "more"],
        [
            [each["claim"], Estimate.of(each["value"], each["interval"]), each["verdict"], each["note"]]
            for each in found["claims"]
        ],
        "“Superposition Yields Robust Neural Scaling” (arXiv 2505.10465), tested on this run",
    )
    made.section("Figures")
    made.section("Exponents")
    _exponents(made, found["fits"])
    _ranges(made, found["fits"])
    if found["joint"]:
        _joint(made, found["joint"])
    made.section("Geometry")
    _geometry(made, rows)
    return made


def models(found: dict[str, Any]) -> list[Row]:
    """A row for each trained model."""
    names = found["models"]
    return [dict(zip(names, values, strict=True)) for values in zip(*names.values(), strict=True)]


def add_figures(made: Result, features: int, folder: Path) -> None:
    """Draw what this run has data for, as figures of the page and as SVG files in `folder`."""
    drawn = draw(models(made.values), made.values, features)
    for old in folder.glob("*.svg"):  # of a run that was replaced
        old.unlink()
    made.go_on("Figures")
    for each in drawn:
        save_svg(each.figure, folder / f"{each.name}.svg", alt=each.caption)
        made.figure(each.figure, each.caption)


def _exponents(made: Result, fits: Sequence[dict[str, Any]]) -> None:
    decays = sorted({fit["decay"] for fit in fits})
    found = {(fit["law"], fit["decay"]): Estimate.of(fit["exponent"], fit["interval"]) for fit in fits}
    laws = list(dict.fromkeys(fit["law"] for fit in fits))
    methods = {fit["interval_method"] for fit in fits} - {None}
    made.table(
        ["law", *(f"γ = {signed(decay)}" for decay in decays)],
        [[law_words(law), *(found.get((law, decay)) for decay in decays)] for law in laws],
        f"Exponent of the loss in the width, with its 95 % interval ({'; '.join(sorted(methods))})",
    )


def _ranges(made: Result, fits: Sequence[dict[str, Any]]) -> None:
    shown = [fit for fit in fits if fit["automatic"] is not None]
    if not shown:
        return
    decays = {fit["decay"] for fit in shown}
    if len(shown) > MOST_ROWS:
        decays = {nearest(decays, STRONG_SHOWN), nearest(decays, WEAK_SHOWN)}
    shown = [fit for fit in shown if fit["decay"] in decays]
    rows = []
    for fit in shown:
        chosen, hand, without = fit["automatic"], fit["by_hand"], fit["leave_largest_out"]
        rows.append(
            {
                "law": law_words(fit["law"]),
                "γ": round(fit["decay"], 3),
                "all widths": fit["exponent"],
                "R²": fit["r_squared"],
                "automatic range": Estimate.of(chosen["exponent"], chosen["interval"]),
                "its widths": f"m ≥ {chosen['low']:g}",
                "straight": chosen["straight"],
                **(_of_the_paper(hand) if hand else {}),
                "without the largest": without["exponent"],
                "error there": f"{without['log_error']:.0%}",
                "best law (AICc)": min(fit["alternatives"]["delta_aicc"], key=fit["alternatives"]["delta_aicc"].get),
            }
        )
    made.table(
        list(rows[0]),
        [list(row.values()) for row in rows],
        "The same exponents over other ranges, how well the largest width is predicted from the others, and which of "
        "power, exponential and logarithmic law fits best",
    )


def _of_the_paper(hand: dict[str, Any]) -> dict[str, Any]:
    found = Estimate.of(hand["exponent"], hand["interval"])
    return {"range of the paper": found, "the paper's widths": f"m ≥ {hand['low']:g}"}


def _joint(made: Result, fits: Sequence[dict[str, Any]]) -> None:
    names = next((list(fit["exponents"]) for fit in fits if "exponents" in fit), [])
    rows = []
    for fit in fits:
        if "error" in fit:
            cells, remark = [None] * len(names), fit["error"]
        else:
            cells = [Estimate.of(fit["exponents"][name], fit["intervals"][name]) for name in names]
            remark = f"rms error {fit['rms_log_error']:.1%}"
            if fit["undetermined"]:
                remark += f"; these data do not settle the exponent of {', '.join(fit['undetermined'])}"
        rows.append([law_words(fit["law"]), round(fit["decay"], 3), *cells, remark])
    made.table(["law", "γ", *names, ""], rows, "Exponents of the joint law, a sum of one power of each axis")


def _geometry(made: Result, rows: Sequence[Row]) -> None:
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
