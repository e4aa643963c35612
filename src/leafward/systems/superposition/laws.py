"""How often each feature is active: frequency laws as vectors of probabilities p (n,), most frequent first."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from leafward.data.counts import ranked_counts
from leafward.errors import DataError, UsageError, nearest

Law = str | Sequence[float] | np.ndarray

# name -> (weight of feature i = 1…n, the default of the parameter after the colon; None: it takes no parameter)
_NAMED: dict[str, tuple[Callable[[np.ndarray, float], np.ndarray], float | None]] = {
    "power": (lambda i, alpha: i**-alpha, 1.0),
    "exponential": (lambda i, scale: np.exp(-i / scale), 400.0),
    # n − i counted from i = 0, so that the rarest feature still occurs.
    "linear": (lambda i, _: len(i) + 1 - i, None),
    "uniform": (lambda i, _: np.ones_like(i), None),
}


def frequencies(law: Law, features: int, density: float | None = 1.0) -> np.ndarray:
    """Activation probabilities p (features,) in (0, 1], float64.

    `law` is ``power:α`` (p ∝ i^-α), ``exponential:scale`` (p ∝ e^{-i/scale}), ``linear`` (p ∝ n−i), ``uniform``,
    ``counts:FILE`` (token counts, see `data.counts`) or a vector of `features` weights. The weights are scaled to
    activation density E = Σp = `density`; with ``density=None`` they are taken as probabilities as they stand.
    """
    if features < 2:
        raise UsageError(f"features must be at least 2, got {features}")
    weights = _named(law, features) if isinstance(law, str) else np.asarray(law, dtype=np.float64)
    label = law if isinstance(law, str) else "the given vector"
    if weights.shape != (features,):
        raise UsageError(f"law: {label} has shape {weights.shape}, but features={features}")
    if not np.isfinite(weights).all() or (weights <= 0).any():
        raise UsageError(f"law: {label} has weights that are zero, negative or not finite")
    if density is not None:
        if not (math.isfinite(density) and density > 0):
            raise UsageError(f"density must be a positive number or None, got {density}")
        weights = weights * (density / weights.sum())
    # Scaling to p_1 = 1 exactly may land one rounding above it.
    if weights.max() > 1 + 1e-12:
        raise UsageError(f"law: {label} with density {density} gives p = {weights.max():.6g} > 1; lower the density")
    return np.minimum(weights, 1.0)


def _named(law: str, features: int) -> np.ndarray:
    name, _, argument = law.partition(":")
    if name == "counts":
        counts = ranked_counts(argument)
        if len(counts) < features:
            raise DataError(f"{argument} has {len(counts)} non-zero counts, fewer than features={features}")
        return counts[:features]
    if name not in _NAMED:
        raise UsageError(f"law: unknown frequency law {law!r}; {nearest(name, [*_NAMED, 'counts'])}")
    weight, default = _NAMED[name]
    if default is None:
        if argument:
            raise UsageError(f"law: {name!r} takes no parameter, got {law!r}")
        return weight(np.arange(1.0, features + 1), 0.0)
    try:
        parameter = float(argument) if argument else default
    except ValueError as error:
        raise UsageError(f"law: the parameter of {law!r} is not a number") from error
    if not math.isfinite(parameter) or (name == "exponential" and parameter <= 0):
        raise UsageError(f"law: the parameter of {law!r} must be finite (and positive for 'exponential')")
    return weight(np.arange(1.0, features + 1), parameter)
