"""The width fit of a losses table: L = C/m^a (+ terms in depth and data) + one offset per corpus, and N ∝ m^k."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from leafward.errors import DataError, UsageError
from leafward.stats.estimate import Interval
from leafward.stats.power_laws import checks
from leafward.stats.power_laws.laws import fit_joint_law, fit_power_law
from leafward.stats.power_laws.results import JointFit, PowerLawFit, Told
from leafward.stats.power_laws.separable import Array


@dataclass(frozen=True)
class WidthFit(Told):
    """`loss`: L = C/m^a + offset of the corpus. `growth`: k of N ∝ m^k, where parameter counts were given.

    Where models differ in depth or tokens too, `joint` is L = C/m^a + K/depth^b + D/tokens^d + offset, and `loss` is
    the fit that leaves those out, for comparison; `notes` say which columns of the table are in the fit and which are
    not. `product`: α_N·k, what L(N) and N(m) predict for a.
    """

    loss: PowerLawFit
    growth: float | None
    growth_interval: Interval | None
    models: int
    joint: JointFit | None = None
    notes: tuple[str, ...] = ()
    size: PowerLawFit | None = None
    product: float | None = None
    product_interval: tuple[float, float] | None = None

    @property
    def exponent(self) -> float:
        """a of the width, with all that was taken into account."""
        return self.loss.exponent if self.joint is None else self.joint.exponents["m"]

    @property
    def interval(self) -> Interval:
        return self.loss.interval if self.joint is None else self.joint.intervals["m"]

    def predict(self, m: ArrayLike, corpora: Iterable[object]) -> Array:
        """The fitted loss of width m (k,) on corpora (k labels)."""
        if self.joint is not None:
            raise UsageError(f"the law has terms in {', '.join(self.joint.exponents)}; use joint.predict")
        return self.loss.predict(m, corpora)

    def summary(self) -> str:
        words = (
            f"loss falls as width^-{self.exponent:.3g}, interval {self.interval}, over {self.models} "
            f"models and {len(self.loss.offsets)} offsets"
        )
        if self.joint is not None:
            others = [f"{name}^-{a:.3g} {self.joint.intervals[name]}" for name, a in self.joint.exponents.items()]
            words += f", beside {', '.join(others[1:])} (width alone would give {self.loss.exponent:.3g})"
        if self.growth is not None:
            words += f"; parameters grow as width^{self.growth:.3g}, interval {self.growth_interval}"
        if self.product is not None and self.product_interval is not None:
            low, high = self.product_interval
            words += f"; α_N·k = {self.product:.3g} [{low:.3g}, {high:.3g}]"
        return "; ".join([words, *self.notes])


def fit_width(
    m: ArrayLike,
    loss: ArrayLike,
    *,
    models: Iterable[object],
    corpora: Iterable[object],
    params: ArrayLike | None = None,
    depth: ArrayLike | None = None,
    tokens: ArrayLike | None = None,
    level: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> WidthFit:
    """Fit a losses table with one row per (model, corpus): m, loss, models, corpora and optional params N, (n,) each.

    `depth` and `tokens` (n,) have terms of their own where they differ between models; where they follow from the
    width, or the models are too few, they are refused by name rather than left out. The interval resamples whole
    models, because the losses of one model on several corpora share their error, and refits the offsets each time.
    Per-token losses of different tokenisers are not comparable: give such families corpora of their own ("opt/c4",
    "qwen/c4"). A corpus with one width only fits its own offset and adds nothing.
    """
    m = checks.positive_vector("m", m)
    loss = checks.positive_vector("loss", loss, len(m))
    model_names, index = checks.labels("models", models, len(m))
    if len(model_names) < 3:
        raise UsageError(f"models needs at least 3 different labels, got {len(model_names)}")
    corpus_names, corpus = checks.labels("corpora", corpora, len(m))
    _one_per_model("m", m, model_names, index)
    labelled = np.array(corpus_names)[corpus]
    options: dict[str, Any] = {"groups": labelled, "clusters": index.tolist(), "level": level, "seed": seed}
    options["resamples"] = resamples
    fit = fit_power_law(m, loss, offset=True, **options)
    others, notes = _others({"depth": depth, "tokens": tokens}, m, model_names, index)
    joint = fit_joint_law({"m": m, **others}, loss, **options) if others else None
    found = WidthFit(fit, None, None, len(model_names), joint, notes)
    return found if params is None else _with_growth(found, params, m, loss, model_names, index, options)


def _with_growth(
    found: WidthFit,
    params: ArrayLike,
    m: Array,
    loss: Array,
    names: list[str],
    index: np.ndarray,
    options: dict[str, Any],
) -> WidthFit:
    """k of N ∝ m^k, α_N of L = C/N^α_N + offsets, and their product, which predicts the exponent of the width."""
    size = checks.positive_vector("params", params, len(m))
    counts = _one_per_model("params", size, names, index)
    shape = fit_power_law(_one_per_model("m", m, names, index), counts, level=options["level"])
    ends = shape.interval
    growth = Interval(-ends.high, -ends.low, level=ends.level, method=ends.method, standard_error=ends.standard_error)
    found = replace(found, growth=-shape.exponent, growth_interval=growth)
    if len(np.unique(size)) < 3:
        return found
    by_size = fit_power_law(size, loss, offset=True, **options)
    product = by_size.exponent * -shape.exponent
    # Errors of a product to first order, in logarithms: those of α_N and of k are of different fits of the same models.
    spread = (
        (by_size.interval.standard_error / by_size.exponent) ** 2 + (ends.standard_error / shape.exponent) ** 2
    ) ** 0.5
    reach = float(np.exp(_quantile(options["level"], len(names)) * spread))
    return replace(found, size=by_size, product=product, product_interval=(product / reach, product * reach))


def _quantile(level: float, models: int) -> float:
    from scipy.stats import t

    return float(t.ppf(0.5 + level / 2, max(models - 2, 1)))


def _others(
    columns: dict[str, ArrayLike | None], m: Array, models: list[str], index: np.ndarray
) -> tuple[dict[str, Array], tuple[str, ...]]:
    """The columns beside m that differ between models, and a note on each that does not; refused where they cannot be
    told from m or from each other."""
    used: dict[str, Array] = {}
    notes = []
    per_model = {"m": np.log(_one_per_model("m", m, models, index))}
    for name, column in columns.items():
        if column is None:
            continue
        values = checks.positive_vector(name, column, len(m))
        own = _one_per_model(name, values, models, index)
        if len(np.unique(own)) == 1:
            notes.append(f"{name} is {own[0]:g} for all models and is not in the fit")
            continue
        per_model[name] = np.log(own)
        stacked = np.stack(list(per_model.values()), axis=1)
        centred = stacked - stacked.mean(0)
        alike = np.linalg.matrix_rank(centred / np.maximum(centred.std(0), 1e-300), tol=1e-6 * len(models) ** 0.5)
        least = 2 * len(per_model) + 2
        if alike < len(per_model) or len(np.unique(own)) < 3 or len(models) < least:
            reason = (
                f"{name} follows from the other columns" if alike < len(per_model)
                else f"{name} has {len(np.unique(own))} different values" if len(np.unique(own)) < 3
                else f"{len(models)} models are too few for terms in {', '.join(per_model)} (at least {least})"
            )  # fmt: skip
            raise DataError(
                f"{name}: the models differ in it, so that a fit of the width alone would be wrong, but it cannot be "
                f"fitted ({reason}); add models, or leave the column out to fit the width alone on purpose"
            )
        used[name] = values
    return used, tuple(notes)


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
