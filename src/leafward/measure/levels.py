"""Does the radius order general and specific? Rows that are nodes of a taxonomy, by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from leafward.errors import DataError
from leafward.hierarchy import Taxonomy
from leafward.stats.intervals import Interval, rank_correlation_interval, share_interval

LEAST = 4


@dataclass(frozen=True)
class Levels:
    """`rho`: rank correlation of radius and depth. `ordered`: share of (parent, child) pairs whose child lies farther
    out.

    `levels`: depth -> (rows, mean radius). A row's radius is its distance from the mean row where `centred`, else its
    length; Lorentzian rows have that of the hyperboloid. Half of the pairs are ordered by chance.
    """

    rows: int
    rho: float
    interval: Interval | None
    pairs: int
    ordered: float
    ordered_interval: Interval | None
    levels: dict[int, tuple[int, float]]

    @property
    def verdict(self) -> str:
        """By the one rule: the whole interval of ρ on one side of 0."""
        if self.interval is None:
            return "too few rows to tell"
        if self.interval[0] > 0:
            return "specific rows lie farther out"
        return "specific rows lie nearer" if self.interval[1] < 0 else "radius does not tell general from specific"


def radius_by_level(radii: np.ndarray, names: Sequence[str], taxonomy: Taxonomy, below: int | None = None) -> Levels:
    """Compare the radii (n,) of rows called `names` with their depth in a taxonomy; at `below` and deeper only.

    A name counts as it is, or without the mark that tokenizers put before a word.
    """
    depth = dict(zip(taxonomy.names, taxonomy.depth.tolist(), strict=True))
    found: dict[str, int] = {}
    for row, name in enumerate(names[: len(radii)]):
        plain = name.lstrip("▁Ġ ").removesuffix("</w>")
        node = name if name in taxonomy else plain if plain in taxonomy else None
        if node is not None and (below is None or depth[node] >= below):
            found.setdefault(node, row)
    if len(found) < LEAST:
        raise DataError(
            f"taxonomy: {len(found)} of its {len(taxonomy):,} nodes are names of rows at this level; at least {LEAST} "
            f"are needed (rows are called {', '.join(map(repr, list(names)[:3]))}, …)"
        )
    from scipy.stats import spearmanr

    rows = np.array(list(found.values()))
    deep = np.array([depth[node] for node in found])
    radius = np.asarray(radii, dtype=np.float64)[rows]
    found_rho: Any = spearmanr(radius, deep)
    rho = float(found_rho.statistic) if np.ptp(deep) and np.ptp(radius) else float("nan")
    farther = [
        radii[found[child]] > radii[found[up]] for child, up in taxonomy.edges() if child in found and up in found
    ]
    share = float(np.mean(farther)) if farther else float("nan")
    return Levels(
        rows=len(rows),
        rho=rho,
        interval=rank_correlation_interval(rho, len(rows)),
        pairs=len(farther),
        ordered=share,
        ordered_interval=share_interval(int(np.sum(farther)), len(farther)) if farther else None,
        levels={int(d): (int((deep == d).sum()), float(radius[deep == d].mean())) for d in np.unique(deep)},
    )
