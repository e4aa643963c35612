"""The columns of an audit: what each is called, what it means in a line, and what a verdict on it says.

docs/measure.md has their formulas and nulls in plain words; its test compares the two lists.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Column:
    """`below`, `above`: what is said where the whole interval lies beyond that of every null; "" where nothing is.

    `shared`: nulls that have the figure of the matrix by the way they are made, so that they say nothing of it.
    """

    key: str
    title: str
    meaning: str
    group: str
    below: str = ""
    above: str = ""
    shared: tuple[str, ...] = ()

    @property
    def judged(self) -> bool:
        return bool(self.below or self.above)


EXACT, SPECTRUM, SAMPLED = "superposition", "spectrum", "sampled"

COLUMNS = {
    each.key: each
    for each in (
        Column("norm_mean", "norm", "mean length of the rows", EXACT),
        Column("norm_sd", "± sd", "standard deviation of the lengths", EXACT),
        Column("norm_min", "least norm", "shortest row", EXACT),
        Column("norm_max", "largest norm", "longest row", EXACT),
        Column("represented", "represented", "share of rows longer than half the mean length", EXACT),
        Column("overlap_mean", "mean overlap", "mean cosine of two rows", EXACT),
        Column("overlap", "m⟨o²⟩", "mean squared cosine of two rows times the width; 1 for random directions", EXACT),
        Column("overlap_centred", "centred", "the same with the mean row removed", EXACT),
        Column("participation", "part. ratio", "number of directions the rows spread over", EXACT),
        Column("participation_centred", "centred PR", "the same with the mean row removed", EXACT),
        Column("effective_rank", "eff. rank", "number of directions by entropy", EXACT),
        Column("frobenius", "‖X‖", "Frobenius norm", SPECTRUM),
        Column("spectral", "σ₁", "largest singular value", SPECTRUM),
        Column("stable_rank", "stable rank", "‖X‖²/σ₁²", SPECTRUM),
        Column("alpha", "α", "exponent of the power law of the largest eigenvalues", SPECTRUM),
        Column("alpha_distance", "D", "Kolmogorov-Smirnov distance of the tail from that law", SPECTRUM),
        Column("alpha_count", "tail", "eigenvalues in the tail", SPECTRUM),
        Column("alpha_p", "p", "goodness of fit; below 0.1 a power law is ruled out", SAMPLED),
        Column("crowding", "crowding", "m⟨o²⟩, mean row removed, of the sample", SAMPLED,
               "the rows are pushed apart", "the rows crowd together", ("spectrum",)),
        Column("delta", "δ", "mean hyperbolicity: 2 mean δ / mean distance; 0 for trees", SAMPLED,
               "more tree-like", "less tree-like"),
        Column("delta_rel", "δ_rel", "the literature's: 2 max δ / diameter of 256 rows", SAMPLED),
        Column("curvature", "κ fit", "curvature of the 10-dimensional space that holds the distances best", SAMPLED,
               "more negatively curved", "less negatively curved"),
        Column("c_literature", "c lit.", "(0.144/δ_rel)²", SAMPLED),
        Column("ricci", "Ricci", "mean Ollivier-Ricci curvature of graphs of 10 neighbours", SAMPLED,
               "neighbourhoods branch more", "neighbourhoods close up more"),
        Column("dimension", "dim.", "intrinsic dimension, TwoNN", SAMPLED,
               "fewer dimensions locally", "more dimensions locally"),
        Column("dimension_wide", "dim. ×16", "intrinsic dimension at the scale of the 16th neighbour", SAMPLED,
               "fewer dimensions at the scale of 16 neighbours", "more dimensions at the scale of 16 neighbours"),
        Column("duplicates", "near-dupl.", "share of rows in near-duplicate clusters", SAMPLED,
               "", "rows are nearly equal to others"),
    )
}  # fmt: skip
SHOWN = (
    "norm_mean", "overlap", "overlap_centred", "participation", "effective_rank", "stable_rank", "alpha", "alpha_p",
    "delta", "delta_rel", "curvature", "c_literature", "ricci", "dimension", "dimension_wide", "duplicates",
)  # fmt: skip
"""Those of the terminal's table; the rest is in the page and the files."""
