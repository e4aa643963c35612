"""The spectrum of a matrix by the eigenvalues λ = σ² of XᵀX: stable rank, and the power law of its tail.

The tail is fitted as Clauset, Shalizi and Newman (2009) do: p(λ) = (α − 1)/λ_min (λ/λ_min)^{−α} for λ ≥ λ_min, with α̂
= 1 + n/Σ ln(λ/λ_min), and λ_min where the Kolmogorov-Smirnov distance of the tail from the law is least. How well that
fits is the share of samples of the law itself, refitted in the same way, that lie farther from it (their §4): below 0.1
a power law is ruled out. A fit alone says nothing: every set of numbers has an α.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

LEAST_TAIL = 10
MOST_CANDIDATES = 1024
GOODNESS_CANDIDATES = 48  # of λ_min, for the data and for each sample of the law alike
GOODNESS_SAMPLES = 100
RULED_OUT = 0.1


@dataclass(frozen=True)
class Tail:
    """α of the tail above `start` with its standard error (α − 1)/√n, how many values it holds, and the distance D."""

    alpha: float
    error: float
    start: float
    count: int
    distance: float


NO_TAIL = Tail(math.nan, math.nan, math.nan, 0, math.nan)


def stable_rank(eigenvalues: np.ndarray) -> float:
    """‖X‖_F²/σ₁² = Σλ/λ_max."""
    top = float(eigenvalues.max(initial=0.0))
    return float(eigenvalues.sum() / top) if top > 0 else math.nan


def effective_rank(eigenvalues: np.ndarray) -> float:
    """exp of the entropy of λ/Σλ (Roy & Vetterli 2007)."""
    share = np.maximum(eigenvalues, 0)
    total = share.sum()
    if not total > 0:
        return math.nan
    share = share[share > 0] / total
    return float(np.exp(-(share * np.log(share)).sum()))


def participation_ratio(eigenvalues: np.ndarray) -> float:
    """(Σλ)²/Σλ²."""
    total = float(np.square(eigenvalues).sum())
    return float(eigenvalues.sum() ** 2 / total) if total > 0 else math.nan


def fit_tail(values: np.ndarray, candidates: int = MOST_CANDIDATES) -> Tail:
    """The power law of the upper tail of positive values (n,); at most `candidates` places for its start are tried."""
    x = _positive(values)
    if len(x) < LEAST_TAIL + 1 or x[0] == x[-1]:
        return NO_TAIL
    return _fit(np.log(x), candidates)


def goodness(values: np.ndarray, samples: int = GOODNESS_SAMPLES, seed: int = 0) -> float:
    """p: the share of samples whose own fit lies farther from the law than that of the values; NaN without a tail.

    A sample has the size of the data: below λ_min values are drawn from the data, above from the fitted law.
    """
    x = _positive(values)
    if len(x) < LEAST_TAIL + 1 or x[0] == x[-1]:
        return math.nan
    logs = np.log(x)
    found = _fit(logs, GOODNESS_CANDIDATES)
    below = logs[logs < math.log(found.start) - 1e-12]
    rng = np.random.default_rng(seed)
    farther = 0
    for _ in range(samples):
        above = int(rng.binomial(len(x), found.count / len(x))) if len(below) else len(x)
        law = math.log(found.start) + rng.exponential(1 / (found.alpha - 1), above)
        rest = rng.choice(below, len(x) - above) if len(below) else below
        farther += _fit(np.sort(np.concatenate([rest, law])), GOODNESS_CANDIDATES).distance >= found.distance
    return farther / samples


def _positive(values: np.ndarray) -> np.ndarray:
    """The values above rounding (1e-6 of the largest: they come from float32 products), rising."""
    values = np.asarray(values, dtype=np.float64)
    return np.sort(values[values > 1e-6 * values.max(initial=0.0)])


def _fit(logs: np.ndarray, candidates: int) -> Tail:
    """The best start among at most `candidates` of the rising logarithms (n,), and the law above it."""
    n = len(logs)
    last = n - LEAST_TAIL
    starts = np.unique(np.linspace(0, last, min(candidates, last + 1)).round().astype(int))
    sums = logs[::-1].cumsum()[::-1]
    counts = n - starts
    excess = sums[starts] - counts * logs[starts]
    keep = excess > 1e-12 * counts
    starts, counts, excess = starts[keep], counts[keep], excess[keep]
    if not len(starts):
        return NO_TAIL
    alphas = 1 + counts / excess
    distances = np.array([_distance(logs[s:], a) for s, a in zip(starts, alphas, strict=True)])
    best = int(distances.argmin())
    alpha, count = float(alphas[best]), int(counts[best])
    start = float(np.exp(logs[starts[best]]))
    return Tail(alpha, (alpha - 1) / count**0.5, start, count, float(distances[best]))


def _distance(tail: np.ndarray, alpha: float) -> float:
    """max |F − F_law| over the rising logarithms of a tail, F counting the values below, as in the authors' code."""
    law = -np.expm1((1 - alpha) * (tail - tail[0]))
    return float(np.abs(law - np.arange(len(tail)) / len(tail)).max())
