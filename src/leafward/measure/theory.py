"""Closed-form references for overlaps ("Superposition Yields Robust Neural Scaling", 2505.10465).

Overlaps are inner products of unit vectors in R^m; n or ν counts the vectors.
"""

from __future__ import annotations

from leafward.errors import UsageError


def welch_bound(n: float, m: int) -> float:
    """Least possible mean squared overlap κ² = (n−m)/(m(n−1)) of n unit vectors in R^m; 0 for n ≤ m.

    A lower bound on the mean, hence also on the largest, squared overlap (an equiangular tight frame
    meets both).
    """
    _check_width(m)
    return max(0.0, (n - m) / (m * (n - 1))) if n > 1 else 0.0


def random_overlap(m: int) -> tuple[float, float]:
    """Mean 1/m and variance 2(m−1)/(m²(m+2)) of the squared overlap of two random unit vectors in R^m."""
    _check_width(m)
    return 1 / m, 2 * (m - 1) / (m**2 * (m + 2))


def etf_limit(m: int) -> int:
    """The most vectors that a real equiangular tight frame in R^m can have: m(m+1)/2."""
    _check_width(m)
    return m * (m + 1) // 2


def etf_overlap(n: int, m: int) -> float:
    """Squared overlap of the best frame the ETF limit allows: the Welch bound at ν = min(n, m²/2).

    The paper's reference line; m²/2 (not m(m+1)/2) as there.
    """
    return welch_bound(min(n, m**2 / 2), m)


def _check_width(m: int) -> None:
    if m < 1:
        raise UsageError(f"the width m must be at least 1, got {m}")
