"""What the figures of a matrix are read against: the same sample with its structure taken out.

- `spectrum`: Gaussian directions with exactly the singular values of the (centred) sample: U S, U uniform over all
  orthonormal columns. What differs from it is not a matter of a few strong directions.
- `shuffled`: every column permuted on its own. What differs from it is not a matter of the values of single
coordinates. - `isotropic`: independent normal numbers of the same size. What differs from it is not noise. - `init`:
the same matrix as its architecture initialises it (`leafward.measure.initialisation`).
"""

from __future__ import annotations

import numpy as np

NULLS = ("spectrum", "shuffled", "isotropic")


def null_sample(kind: str, sample: np.ndarray, seed: int = 0) -> np.ndarray:
    """The null of a sample (n, m) of rows: (n, m') float32, m' ≤ m where only distances count."""
    rng = np.random.default_rng((seed, sum(map(ord, kind))))
    if kind == "shuffled":
        return rng.permuted(sample, axis=0)
    if kind == "isotropic":
        return rng.standard_normal(sample.shape, dtype=np.float32) * np.float32(sample.std() or 1.0)
    return _equal_spectrum(sample, rng)


def _equal_spectrum(sample: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """mean + U S Vᵀ with random U: the rows' mean, covariance and singular values are those of the sample.

    U are the orthonormalised columns of centred normal numbers (by Cholesky), which makes them uniform among those
    whose sum is zero. Vᵀ is left out where rows are fewer than columns: it changes no distance.
    """
    rows, width = sample.shape
    mean = sample.mean(0, dtype=np.float64).astype(np.float32)
    x = sample - mean
    if rows > width:
        values, vectors = np.linalg.eigh((x.T @ x).astype(np.float64))
        scale = np.sqrt(np.maximum(values, 0))
        return (_orthonormal(rows, width, rng) * scale.astype(np.float32)) @ vectors.T.astype(np.float32) + mean
    values = np.linalg.eigvalsh((x @ x.T).astype(np.float64))[1:]  # the smallest is 0: the rows are centred
    return _orthonormal(rows, rows - 1, rng) * np.sqrt(np.maximum(values, 0)).astype(np.float32)


def _orthonormal(rows: int, width: int, rng: np.random.Generator) -> np.ndarray:
    """Uniformly random orthonormal columns (rows, width ≤ rows − 1), each of sum zero."""
    drawn = rng.standard_normal((rows, width), dtype=np.float32)
    drawn -= drawn.mean(0)
    if rows > 1.5 * width:
        from scipy.linalg import cholesky, solve_triangular

        lower = cholesky((drawn.T @ drawn).astype(np.float64), lower=True, check_finite=False)
        return solve_triangular(lower, drawn.T, lower=True, check_finite=False).T.astype(np.float32)
    return np.linalg.qr(drawn)[0]
