"""Intrinsic dimension: how many coordinates do the rows use locally?

With r_j the distance of a row to its j-th nearest, μ = r_{2k}/r_k follows in a space of d dimensions the density

    f(μ) = d (μ^d − 1)^{k−1} / (B(k, k) μ^{(2k−1)d+1}),  μ ≥ 1

whatever the density of the rows is, as long as it is constant over r_{2k} (Denti et al. 2022, GRIDE). k = 1 is TwoNN
(Facco et al. 2017): f = d μ^{−d−1}, whose maximum-likelihood estimate is (n − 1)/Σ ln μ. Larger k looks at larger
scales: where d falls with k, small distances were noise.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from leafward.measure.measured import LEAST_GROUP, UNKNOWN, Measured, group_index, group_means, over_groups

SCALES = (1, 2, 4, 8, 16)
"""k of the multi-scale estimate: the ratio of the distances to the 2k-th and the k-th nearest row."""
HIGHEST = 1e5


def two_nn(nearest: np.ndarray) -> Measured:
    """TwoNN by distances (n, ≥ 2) to the nearest rows; rows with a copy (distance 0) say nothing and are left out."""
    if nearest.shape[1] < 2:
        return UNKNOWN
    logs, index = _log_ratios(nearest, 1)
    if len(logs) < LEAST_GROUP or not logs.any():
        return UNKNOWN
    factor = (len(logs) - 1) / len(logs)
    return over_groups(group_means(logs, index)).map(lambda mean: factor / mean if mean > 0 else np.nan)


def gride(nearest: np.ndarray, k: int) -> Measured:
    """The maximum-likelihood dimension at scale k by distances (n, ≥ 2k) to the nearest rows."""
    if nearest.shape[1] < 2 * k:
        return UNKNOWN
    logs, index = _log_ratios(nearest, k)
    if len(logs) < LEAST_GROUP or not logs.any():
        return UNKNOWN
    whole = _most_likely(logs, k)
    groups = [_most_likely(logs[index == each], k) for each in np.unique(index)]
    spread = over_groups([each for each in groups if np.isfinite(each)])
    return Measured(whole, spread.error, spread.groups)


def scales(nearest: np.ndarray) -> dict[int, Measured]:
    """The dimension at each scale k that the neighbours reach."""
    return {k: gride(nearest, k) for k in SCALES if 2 * k <= nearest.shape[1]}


def _log_ratios(nearest: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """ln(r_{2k}/r_k) of the rows whose r_k is not 0, and the group of each."""
    small, large = nearest[:, k - 1].astype(np.float64), nearest[:, 2 * k - 1].astype(np.float64)
    keep = small > 0
    return np.log(large[keep] / small[keep]), group_index(len(nearest))[keep]


def _most_likely(logs: np.ndarray, k: int) -> float:
    """The root of the score n/d + (k − 1) Σ l e^{dl}/(e^{dl} − 1) − (2k − 1) Σ l in d, l = ln μ; it falls in d."""
    from scipy.optimize import brentq

    total = logs.sum()
    if total <= 0:
        return float("nan")
    positive = logs[logs > 0]

    def score(d: float) -> float:
        pull = (k - 1) * float((positive / -np.expm1(-d * positive)).sum())
        return len(logs) / d + pull - (2 * k - 1) * float(total)

    low, high = 1e-6, HIGHEST
    root: Any = brentq(score, low, high, xtol=1e-9) if score(low) > 0 > score(high) else float("nan")
    return float(root)
