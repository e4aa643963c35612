"""The audit's verdict in words. Every rule is a number here and is repeated in the reasons."""

from __future__ import annotations

from leafward.measure.audit_report import OverlapReport, References, Summary, Verdict

CROWDED = 4  # n ≥ 4m: many more rows than dimensions
ALL = 0.99  # share of represented rows that counts as all
UNLIKELY = 4  # standard deviations of ⟨o²⟩ of random rows: one draw of noise in 16,000 lies beyond
RANDOM = "not told apart from random rows"
ANISOTROPIC = 1.5  # m·⟨o²⟩ at or above this: the rows use clearly fewer than m directions


def judge(
    rows: int,
    width: int,
    represented: float,
    norms: Summary,
    raw: OverlapReport,
    centred: OverlapReport | None,
    references: References,
) -> Verdict:
    """`represented` is the share of rows whose norm exceeds half the mean norm (zero rows count as not)."""
    label, reason = _superposition(rows, width, represented, norms)
    if represented >= ALL and rows > width and like_random_rows(raw, references):
        width_of = UNLIKELY * _random_error(raw, references) * width
        label, reason = (
            RANDOM,
            (
                f"The mean squared overlap of all rows is {raw.scaled_overlap:.5g}/m; that of {raw.rows:,} random rows "
                f"is (1 ± {width_of:.1g})/m: nothing here tells them from noise."
            ),
        )
    geometry, reasons = _geometry(width, raw, centred, references)
    return Verdict(label, geometry, (reason, *reasons))


def like_random_rows(raw: OverlapReport, references: References) -> bool:
    """Whether ⟨o²⟩ lies where that of random directions does: 1/m ± 4 standard deviations.

    Squared overlaps of random directions are uncorrelated between pairs, so that of their mean is √(2 var/(n(n−1))).
    """
    away = abs(raw.mean_squared_overlap - references.random_mean_squared_overlap)
    return away <= UNLIKELY * _random_error(raw, references)


def _random_error(raw: OverlapReport, references: References) -> float:
    return (2 * references.random_squared_overlap_variance / (raw.rows * (raw.rows - 1))) ** 0.5


def _superposition(rows: int, width: int, represented: float, norms: Summary) -> tuple[str, str]:
    if rows <= width:
        return "no superposition needed", f"{rows:,} rows fit into {width:,} dimensions, one each."
    ratio = rows / width
    count = f"{represented:.1%} of the {rows:,} rows are longer than half the mean norm (least {norms.min:.3g})"
    if represented * rows <= width:
        return "weak superposition", f"{count}: no more than the {width:,} dimensions can hold, one each."
    if represented >= ALL and ratio >= CROWDED:
        return "strong superposition", f"{count}, and there are {ratio:.1f} of them per dimension."
    return "partial superposition", (
        f"{count}, which makes {represented * ratio:.1f} per dimension; strong superposition needs {ALL:.0%} of "
        f"at least {CROWDED} per dimension."
    )


def _geometry(
    width: int, raw: OverlapReport, centred: OverlapReport | None, references: References
) -> tuple[str, tuple[str, ...]]:
    """Is the spread that of random directions (m·⟨o²⟩ = 1), or do a mean or a few directions dominate?"""
    before = raw.scaled_overlap
    crowd = (
        f"The mean squared overlap is {before:.3g}/m: the rows spread over about {raw.participation_ratio:.0f} of "
        f"{width:,} directions."
    )
    if before < ANISOTROPIC:
        return _isotropic(crowd, raw, references)
    if centred is None:
        return "anisotropic", (crowd, "Measure with the mean removed to see whether one direction is the cause.")
    after = centred.scaled_overlap
    shared = after < ANISOTROPIC or after <= before / 2
    change = (
        f"Removing the mean row takes m·⟨o²⟩ from {before:.3g} to {after:.3g} and the mean overlap from "
        f"{raw.mean_overlap:.3g} to {centred.mean_overlap:.2g}"
    )
    if shared:
        change += ": most of the raw overlap is one direction that all rows share, not interference between them."
    else:
        change += "."
    few = (
        f"With the mean removed the rows still use only about {centred.participation_ratio:.0f} of {width:,} "
        "directions, so 1/m understates their interference."
    )
    if after < ANISOTROPIC:
        return "anisotropic: a shared mean direction dominates", (crowd, change)
    if shared:
        return "anisotropic: a shared mean direction dominates, a few others follow", (crowd, change, few)
    return "anisotropic: a few directions dominate", (crowd, change, few)


def _isotropic(crowd: str, raw: OverlapReport, references: References) -> tuple[str, tuple[str, ...]]:
    """Random or better: below halfway from the random mean 1/m to the Welch bound, rows were pushed apart."""
    random, welch = references.random_mean_squared_overlap, references.welch_bound
    spread = references.random_squared_overlap_variance
    reasons = [crowd]
    if spread > 0:
        ratio = raw.squared_overlap_variance.value / spread
        reasons.append(f"The variance of the squared overlap is {ratio:.2g} times that of random directions.")
    if raw.mean_squared_overlap > (random + welch) / 2:
        return "spread about as random directions are", tuple(reasons)
    reasons.append(f"Random directions would have {random:.4g}, the least possible (Welch) is {welch:.4g}.")
    return "spread more evenly than random directions, close to a tight frame", tuple(reasons)
