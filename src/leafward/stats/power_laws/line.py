"""The straight line in log-log coordinates: closed form, for one table or for many resamples at once."""

from __future__ import annotations

import numpy as np

from leafward.stats.estimate import Interval
from leafward.stats.power_laws.separable import Array


def weighted_line(log_x: Array, log_y: Array, counts: Array) -> tuple[Array, Array]:
    """Slopes and intercepts (B,) of least-squares lines with row weights counts (B, n); NaN where x is constant."""
    total = counts.sum(axis=1)
    mean_x, mean_y = counts @ log_x / total, counts @ log_y / total
    centred_x = log_x - mean_x[:, None]
    spread = np.einsum("bn,bn->b", counts, centred_x**2)
    spread = np.where(spread > 1e-20 * total, spread, np.nan)
    slope = np.einsum("bn,bn,n->b", counts, centred_x, log_y) / spread
    return slope, mean_y - slope * mean_x


def student_interval(log_x: Array, log_y: Array, level: float) -> Interval:
    """Student's interval for the exponent (minus the slope), with the slope's ordinary standard error.

    With Gaussian errors in ln y it is exact at any n, and equal to the profile-likelihood interval.
    """
    from scipy.stats import t

    n = len(log_x)
    slope, intercept = (float(each[0]) for each in weighted_line(log_x, log_y, np.ones((1, n))))
    residual = log_y - intercept - slope * log_x
    error = float(np.sqrt(residual @ residual / (n - 2) / np.sum((log_x - log_x.mean()) ** 2)))
    reach = float(t.ppf(0.5 + level / 2, n - 2)) * error
    return Interval(
        -slope - reach,
        -slope + reach,
        level=level,
        method="Student t, ordinary standard error",
        standard_error=error,
    )
