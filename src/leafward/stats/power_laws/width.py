"""The width fit of a losses table: L = C/m^a + one offset per corpus, and N ∝ m^k."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from leafward.errors import DataError, UsageError
from leafward.stats.estimate import Interval
from leafward.stats.power_laws import checks
from leafward.stats.power_laws.laws import fit_power_law
from leafward.stats.power_laws.results import PowerLawFit, Told
from leafward.stats.power_laws.separable import Array


@dataclass(frozen=True)
class WidthFit(Told):
    """`loss`: L = C/m^a + offset of the corpus. `growth`: k of N ∝ m^k, where parameter counts were given."""

    loss: PowerLawFit
    growth: float | None
    growth_interval: Interval | None
    models: int

    def predict(self, m: ArrayLike, corpora: Iterable[object]) -> Array:
        """The fitted loss of width m (k,) on corpora (k labels)."""
        return self.loss.predict(m, corpora)

    def summary(self) -> str:
        words = (
            f"loss falls as width^-{self.loss.exponent:.3g}, interval {self.loss.interval}, over {self.models} "
            f"models and {len(self.loss.offsets)} offsets"
        )
        if self.growth is None:
            return words
        return f"{words}; parameters grow as width^{self.growth:.3g}, interval {self.growth_interval}"


def fit_width(
    m: ArrayLike,
    loss: ArrayLike,
    *,
    models: Iterable[object],
    corpora: Iterable[object],
    params: ArrayLike | None = None,
    level: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> WidthFit:
    """Fit a losses table with one row per (model, corpus): m, loss, models, corpora and optional params N, (n,) each.

    The interval resamples whole models, because the losses of one model on several corpora share their error, and
    refits the offsets each time. Per-token losses of different tokenisers are not comparable: give such families
    corpora of their own ("opt/c4", "qwen/c4"). A corpus with one width only fits its own offset and adds nothing.
    """
    m = checks.positive_vector("m", m)
    loss = checks.positive_vector("loss", loss, len(m))
    model_names, index = checks.labels("models", models, len(m))
    if len(model_names) < 3:
        raise UsageError(f"models needs at least 3 different labels, got {len(model_names)}")
    corpus_names, corpus = checks.labels("corpora", corpora, len(m))
    widths = _one_per_model("m", m, model_names, index)
    fit = fit_power_law(
        m,
        loss,
        offset=True,
        groups=np.array(corpus_names)[corpus],
        clusters=index.tolist(),
        level=level,
        resamples=resamples,
        seed=seed,
    )
    if params is None:
        return WidthFit(fit, None, None, len(model_names))
    counts = _one_per_model("params", checks.positive_vector("params", params, len(m)), model_names, index)
    shape = fit_power_law(widths, counts, level=level)
    ends = shape.interval
    growth = Interval(-ends.high, -ends.low, level=ends.level, method=ends.method, standard_error=ends.standard_error)
    return WidthFit(fit, -shape.exponent, growth, len(model_names))


def _one_per_model(name: str, values: Array, models: list[str], index: np.ndarray) -> Array:
    """One value per model; the table must not contradict itself."""
    first = np.zeros(len(models))
    first[index[::-1]] = values[::-1]
    wrong = np.flatnonzero(values != first[index])
    if len(wrong):
        row = int(wrong[0])
        raise DataError(
            f"{name}: model {models[index[row]]!r} has {first[index[row]]:g} in one row and {values[row]:g} "
            f"in another (position {row})"
        )
    return first
