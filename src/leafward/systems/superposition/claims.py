"""The claims of the paper (2505.10465) that a table of trained models can test, each with a number and its interval."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from leafward.stats.estimate import Estimate, Interval, sound
from leafward.stats.intervals import over_samples, over_seeds
from leafward.stats.verdict import FAILS, HOLDS, SCALE, UNDECIDED, UNTESTED, Tolerance, Verdict, judge

Row = dict[str, Any]
Cell = dict[str, Any]

STRONG, WEAK = -0.5, 0.5  # γ at and beyond which the paper finds every row, or about m rows, represented
LEAST_AMBIGUOUS = 9  # weak cases that the paper shows
SEEDS = 3  # from which on an interval is over seeds
NO_SEEDS = "without an interval over seeds (--seeds 3 gives one)"


@dataclass(frozen=True)
class Claim:
    """`name` is short, for a headline; `claim` says what must be true of `value` for the verdict "holds"."""

    name: str
    claim: str
    value: float | None
    interval: tuple[float, float] | None
    interval_method: str
    verdict: Verdict
    note: str


def signed(value: float) -> str:
    """Three digits, with a true minus sign."""
    return f"{value:.3g}".replace("-", "−")


def regime(decay: float, constraint: str) -> str:
    """ "strong" for γ < 0 and rows on the sphere, "weak" for γ > 0, else "none"."""
    if constraint == "sphere" or decay < 0:
        return "strong"
    return "weak" if decay > 0 else "none"


def theory(alpha: float | None, regime: str) -> float | None:
    """The paper's exponent: strong max(1, 2(α−1)), weak α−1 for α > 1; 1 for strong models of any other law."""
    if regime == "strong":
        return 1.0 if alpha is None else max(1.0, 2 * (alpha - 1))
    return alpha - 1 if regime == "weak" and alpha is not None and alpha > 1 else None


def test(rows: Sequence[Row], cells: Sequence[Cell], features: int, *, squared: bool) -> list[Claim]:
    """All claims, from the final rows of the models and the fitted cells; `squared`: the loss is the squared error."""
    strong = [cell for cell in cells if is_strong(cell)]
    weak = [cell for cell in cells if cell["regime"] == "weak" and (cell["alpha"] or 0) > 1]
    found = [
        *_represented(rows, features),
        *_strong_exponents(strong),
        *_weak_exponents(weak),
        _order(cells),
        *_overlaps(strong, rows, features),
    ]
    return [*found, _above_theory(rows)] if squared else found


def crowded(row: Row, features: int) -> bool:
    """Whether there are more rows with norm > 1 than dimensions; fewer need not overlap at all."""
    return row["strong_overlap_mean"] is not None and row["phi_one"] * features > row["width"]


def variance_ratio(row: Row) -> float:
    """Variance of the squared overlaps of rows with norm > 1 over that of random vectors."""
    return row["strong_overlap_variance"] / row["random_overlap_variance"]


def is_strong(cell: Cell) -> bool:
    """Whether the paper's statements on strong superposition are meant for this cell."""
    return cell["regime"] == "strong" and (cell["decay"] <= STRONG or cell["decay"] == 0)


def headline(claims: Iterable[Claim]) -> list[dict[str, Any]]:
    """The claims that were tested, as headline numbers."""
    return [
        Estimate(claim.value, sound(claim.interval), claim.name, note=claim.verdict).to_json()
        for claim in claims
        if claim.verdict != UNTESTED
    ]


def _represented(rows: Sequence[Row], features: int) -> list[Claim]:
    """φ_½ of strong and weak models, at α = 1 (the paper's figure) and for every law."""

    def in_band(row: Row) -> bool:
        return 0.5 * row["width"] / features <= row["phi_half"] <= 2.5 * row["width"] / features

    def phi(row: Row) -> str:
        return f"φ½ = {row['phi_half']:.3g} = {row['phi_half'] * features / row['width']:.3g} m/n"

    strong = [(row, row["phi_half"] >= 0.99) for row in rows if row["decay"] <= STRONG]
    weak = [(row, in_band(row)) for row in rows if row["decay"] >= WEAK]
    found = []
    for words, keep in ((", α = 1", lambda row: row["alpha"] == 1), (", all laws", lambda row: True)):
        found += [
            _share(
                f"strong models with φ½ ≥ 0.99{words}",
                f"φ½ ≥ 0.99 for every γ ≤ −0.556{words}",
                [pair for pair in strong if keep(pair[0])],
                lambda row: -row["phi_half"],
                phi,
            ),
            _share(
                f"weak models with φ½ of about m/n{words}",
                f"φ½ lies in [m/2n, 2.5 m/n] for every γ ≥ 0.556{words}",
                [pair for pair in weak if keep(pair[0])],
                lambda row: abs(math.log(max(row["phi_half"], 0.5 / features) * features / row["width"])),
                phi,
            ),
        ]
    return found


def _strong_exponents(strong: Sequence[Cell]) -> list[Claim]:
    return [
        _near(
            "strong exponent, α ≤ 1",
            "strong exponents are near 1 for α ≤ 1: mean distance from 1 at most 0.25",
            [cell for cell in strong if cell["alpha"] is not None and cell["alpha"] <= 1],
            lambda cell: 0.0,
            centre=1.0,
            within=0.25,
        ),
        _near(
            "strong exponent, other laws",
            "strong exponents are near 1 for other laws and 1 < α ≤ 1.4: mean distance from 1 at most 0.25",
            [cell for cell in strong if cell["alpha"] is None or 1 < cell["alpha"] <= 1.4],
            lambda cell: 0.0,
            centre=1.0,
            within=0.25,
        ),
        _steep(strong),
    ]


def _weak_exponents(weak: Sequence[Cell]) -> list[Claim]:
    return [
        _near(
            "weak exponent − (α−1)",
            "weak exponents are near α−1 for α > 1: mean distance at most 0.2",
            weak,
            lambda cell: cell["alpha"] - 1,
            centre=0.0,
            within=0.2,
        ),
        _near(
            "weak exponent − (α−1), clearest cases",
            f"the same for the {LEAST_AMBIGUOUS} weak cases nearest to m features kept exactly",
            sorted(weak, key=lambda cell: cell["ambiguity"])[:LEAST_AMBIGUOUS],
            lambda cell: cell["alpha"] - 1,
            centre=0.0,
            within=0.2,
        ),
    ]


def _overlaps(strong: Sequence[Cell], rows: Sequence[Row], features: int) -> list[Claim]:
    return [
        _near(
            "exponent of strong rows' overlaps",
            "the mean squared overlap of rows with norm > 1 falls as 1/m: mean distance of exponents from 1 up to 0.15",
            [{**cell["overlap"], "alpha": cell["alpha"]} for cell in strong],
            lambda cell: 0.0,
            centre=1.0,
            within=0.15,
        ),
        _share(
            "overlaps more even than random",
            "at γ ≤ −0.556 and α ≤ 1 the squared overlaps of rows with norm > 1 vary less than those of random vectors",
            [
                (row, variance_ratio(row) < 1)
                for row in rows
                if row["decay"] <= STRONG and row["alpha"] is not None and row["alpha"] <= 1 and crowded(row, features)
            ],
            variance_ratio,
            lambda row: f"{variance_ratio(row):.3g} times the variance of random vectors",
        ),
    ]


def _above_theory(rows: Sequence[Row]) -> Claim:
    return _share(
        "loss above the weak theory",
        "for γ > 0 losses lie on or above the weak theory Σ (⟨v²⟩ p_i − ⟨v⟩² p_i²) over features not represented "
        "(less 5 %)",
        [(row, row["loss"] >= 0.95 * row["weak_loss"]) for row in rows if row["decay"] > 0 and row["loss"]],
        lambda row: row["weak_loss"] / row["loss"],
        lambda row: f"loss {row['loss']:.3g} where the theory has {row['weak_loss']:.3g}",
    )


def _share(
    name: str,
    claim: str,
    pairs: Sequence[tuple[Row, bool]],
    badness: Callable[[Row], float],
    words: Callable[[Row], str],
) -> Claim:
    """The share of models for which it is so; the claim holds if it is so for every one.

    The note tells, in `words`, of the model with the greatest `badness`.
    """
    if not pairs:
        return _untested(name, claim)
    worst = max((row for row, _ in pairs), key=badness)
    holding = sum(holds for _, holds in pairs)
    where = f"m = {worst['width']}, γ = {signed(worst['decay'])}, {worst['law']}"
    note = f"{holding} of {len(pairs)} models; the least favourable ({where}): {words(worst)}"
    # every model of the grid was looked at: a count, not a sample
    verdict = judge(Estimate(holding / len(pairs)), Tolerance(low=1.0), exact=True)
    return Claim(name, claim, holding / len(pairs), None, "", verdict, note)


def _near(
    name: str,
    claim: str,
    cells: Sequence[Cell],
    target: Callable[[Cell], float],
    *,
    centre: float,
    within: float,
) -> Claim:
    """Whether exponent − target is, on average over the cells, `within` a distance of `centre`.

    The distances are averaged, not the values, so that errors of both signs do not cancel.
    """
    estimate = mean_exponent(cells, target)
    if estimate is None:
        return _untested(name, claim)
    values = [cell["exponent"] - target(cell) for cell in cells if cell["exponent"] is not None]
    distances = seed_means(cells, lambda cell, exponent: abs(exponent - target(cell) - centre))
    distance = over_seeds(list(distances.values()), (0.0, math.inf)) if len(distances) > 1 else Estimate(None)
    if distance.value is None:
        distance = Estimate(float(np.mean([abs(value - centre) for value in values])))
    count = f"{len(values)} value" + "s" * (len(values) > 1)
    words = f"{distance} over {distance.over}" if distance.interval else f"{distance.number:.2g}, {NO_SEEDS}"
    note = f"{count}, from {signed(min(values))} to {signed(max(values))}; mean distance {words}"
    verdict = judge(distance, Tolerance(high=within))
    return Claim(name, claim, estimate.value, estimate.interval, method_of(estimate), verdict, note)


def _steep(strong: Sequence[Cell]) -> Claim:
    steep = [cell for cell in strong if (cell["alpha"] or 0) > 1.5]
    near = _near(
        "strong exponent − 2(α−1), α > 1.5",
        "strong exponents go toward 2(α−1) for α > 1.5: mean distance at most 0.35, and exponents are larger than for "
        "α ≤ 1",
        steep,
        lambda cell: 2 * (cell["alpha"] - 1),
        centre=0.0,
        within=0.35,
    )
    flat_cells = [cell for cell in strong if cell["alpha"] is not None and cell["alpha"] <= 1]
    flat, high = mean_exponent(flat_cells), mean_exponent(steep)
    if flat is None or high is None:
        return near
    verdict = worst(near.verdict, judge(over_seeds(_gaps(steep, flat_cells) or [None]), Tolerance(low=0.0)))
    note = f"{near.note}; mean exponent {signed(high.number)} against {signed(flat.number)} for α ≤ 1"
    return Claim(near.name, near.claim, near.value, near.interval, near.interval_method, verdict, note)


def _order(cells: Sequence[Cell]) -> Claim:
    """Strong exponents against weak ones, law by law."""
    name = "strong − weak exponent"
    claim = "under every law strong models (γ ≤ −0.556) gain more from width than weak ones (γ > 0)"
    pairs, gaps = [], []
    for law in dict.fromkeys(cell["law"] for cell in cells):
        sides = (
            [cell for cell in cells if cell["law"] == law and is_strong(cell)],
            [cell for cell in cells if cell["law"] == law and cell["decay"] > 0],
        )
        means = [mean_exponent(side) for side in sides]
        if means[0] is not None and means[1] is not None:
            pairs.append((law, means[0].number - means[1].number))
            gaps.append(_gaps(*sides))
    if not pairs:
        return _untested(name, claim)
    least = min(pairs, key=lambda pair: pair[1])
    estimate = over_samples([difference for _, difference in pairs], of="laws")
    # the least over the laws, seed by seed
    verdict = judge(over_seeds([min(each) for each in zip(*gaps, strict=False)] or [least[1]]), Tolerance(low=0.0))
    seeds = "" if len(gaps[0]) > 1 else f", {NO_SEEDS}"
    note = f"least under {least[0]}: {signed(least[1])}{seeds}"
    return Claim(name, claim, estimate.value, estimate.interval, method_of(estimate), verdict, note)


def worst(first: Verdict, second: Verdict) -> Verdict:
    """The verdict on two statements that must both hold."""
    order: tuple[Verdict, ...] = (FAILS, UNTESTED, SCALE, UNDECIDED, HOLDS)
    return first if order.index(first) <= order.index(second) else second


def seed_means(cells: Sequence[Cell], value: Callable[[Cell, float], float]) -> dict[int, float]:
    """The mean over cells of `value` of a cell and its exponent, seed by seed; seeds that lack a cell are left out."""
    fitted = [cell for cell in cells if cell["exponent"] is not None]
    by_seed: dict[int, list[float]] = {}
    for cell in fitted:
        for each in cell["per_seed"]:
            by_seed.setdefault(each["seed"], []).append(value(cell, each["exponent"]))
    return {seed: float(np.mean(found)) for seed, found in by_seed.items() if len(found) == len(fitted)}


def _gaps(first: Sequence[Cell], second: Sequence[Cell]) -> list[float]:
    """Mean exponent of the first cells less that of the second, seed by seed."""
    one, other = (seed_means(cells, lambda _, exponent: exponent) for cells in (first, second))
    return [one[seed] - other[seed] for seed in sorted(one.keys() & other.keys())]


def mean_exponent(cells: Sequence[Cell], target: Callable[[Cell], float] = lambda cell: 0.0) -> Estimate | None:
    """Mean of exponent − target over cells.

    Seeds are the independent replicates, so with enough of them the interval is over their means; otherwise it is
    over cells, which share seeds and data, or that of the fit where there is one cell alone.
    """
    fitted = [cell for cell in cells if cell["exponent"] is not None]
    if not fitted:
        return None
    whole = list(seed_means(fitted, lambda cell, exponent: exponent - target(cell)).values())
    if len(whole) >= SEEDS:
        return over_seeds(whole)
    if len(fitted) > 1:
        return over_samples([cell["exponent"] - target(cell) for cell in fitted], of="cells")
    (cell,) = fitted
    low, high = cell["interval"]
    shift = target(cell)
    ends = None if low is None or high is None else Interval(low - shift, high - shift, method=cell["interval_method"])
    return Estimate.of(cell["exponent"] - shift, ends)


def method_of(found: Estimate) -> str:
    """How the interval came about, in words."""
    if found.interval is None:
        return ""
    words = str(found.over)
    return f"{found.interval.method} over {words}" if words else found.interval.method


def _untested(name: str, claim: str) -> Claim:
    return Claim(name, claim, None, None, "", UNTESTED, "this run has no model of the kind")
