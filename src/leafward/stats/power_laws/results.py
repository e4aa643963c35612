"""What a fit returns: numbers, their intervals, predictions, and one line of words."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from leafward.errors import UsageError, nearest
from leafward.files import finite
from leafward.stats.estimate import Interval
from leafward.stats.power_laws.checks import Array, labels, positive_vector

# The key under which the coefficient and offset of a law without groups are kept.
ALL_ROWS = "all"


@dataclass(frozen=True)
class Told(ABC):
    """What a fit tells: one line of words, and a dictionary that is valid JSON."""

    def to_dict(self) -> dict[str, Any]:
        """All fields and the summary; non-finite numbers become None."""
        return finite({**_plain(self), "summary": self.summary()})

    @abstractmethod
    def summary(self) -> str:
        """One line in words."""


def _plain(value: Any) -> Any:
    """`value` with dataclasses and intervals as dictionaries."""
    if isinstance(value, Interval):
        return value.to_dict()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class PowerLawFit(Told):
    """y = C / x^exponent + offset, with one coefficient and offset, or one for each group.

    `coefficients` and `offsets` are keyed by group, or by "all"; a law without offset has no offsets.
    `r_squared` and `rms_log_error` compare ln y with the logarithm of the fit. R² alone does not identify a
    power law: see `compare_laws`.
    """

    exponent: float
    interval: Interval
    coefficients: Mapping[str, float]
    offsets: Mapping[str, float]
    method: str
    weighting: str
    rows: int
    r_squared: float
    rms_log_error: float

    def predict(self, x: ArrayLike, groups: Any = None) -> Array:
        """The fitted y at x (k,); `groups` (k labels) is needed where the law has groups."""
        x = positive_vector("x", x)
        grouped = set(self.coefficients) | set(self.offsets) != {ALL_ROWS}
        if grouped == (groups is None):
            raise UsageError(f"groups {'is needed: the law has groups' if grouped else 'given, the law has none'}")
        if groups is None:
            return self._coefficient(ALL_ROWS) * x**-self.exponent + self.offsets.get(ALL_ROWS, 0.0)
        names, index = labels("groups", groups, len(x))
        known = set(self.offsets) or set(self.coefficients)
        for name in names:
            if name not in known:
                raise UsageError(f"groups: {name!r} was not in the fit; {nearest(name, known)}")
        scale = np.array([self._coefficient(name) for name in names])[index]
        return scale * x**-self.exponent + np.array([self.offsets.get(name, 0.0) for name in names])[index]

    def _coefficient(self, group: str) -> float:
        return self.coefficients[group] if group in self.coefficients else self.coefficients[ALL_ROWS]

    def summary(self) -> str:
        offsets = {0: "no offset", 1: "an offset"}.get(len(self.offsets), f"{len(self.offsets)} offsets")
        return (
            f"y goes as x^-a with a = {self.exponent:.4g}, interval {self.interval}, with {offsets}; "
            f"{self.rows} rows, rms error {self.rms_log_error:.2%}"
        )


@dataclass(frozen=True)
class JointFit(Told):
    """y = E + Σ_k C_k / x_k^a_k. `exponents`, `intervals` and `coefficients` are keyed by variable.

    With groups `offsets` has an E for each, and `offset` is 0.
    """

    exponents: Mapping[str, float]
    intervals: Mapping[str, Interval]
    coefficients: Mapping[str, float]
    offset: float
    method: str
    weighting: str
    rows: int
    r_squared: float
    rms_log_error: float
    offsets: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def predict(self, variables: Mapping[str, ArrayLike], groups: Any = None) -> Array:
        """The fitted y for one array per variable, all of one length; `groups` (labels) where the law has them."""
        if (groups is None) == bool(self.offsets):
            raise UsageError(f"groups {'is needed: the law has groups' if self.offsets else 'given, the law has none'}")
        for name in variables:
            if name not in self.exponents:
                raise UsageError(f"variables: {name!r} is not in the law; {nearest(name, self.exponents)}")
        missing = [name for name in self.exponents if name not in variables]
        if missing:
            raise UsageError(f"variables: {missing[0]!r} is missing; the law has {', '.join(self.exponents)}")
        length = np.size(next(iter(variables.values())))
        columns = {name: positive_vector(f"variables[{name!r}]", x, length) for name, x in variables.items()}
        terms = [self.coefficients[name] * columns[name] ** -a for name, a in self.exponents.items()]
        offset: Any = self.offset
        if groups is not None:
            labelled, index = labels("groups", groups, length)
            for name in labelled:
                if name not in self.offsets:
                    raise UsageError(f"groups: {name!r} was not in the fit; {nearest(name, self.offsets)}")
            offset = np.array([self.offsets[name] for name in labelled])[index]
        return offset + np.sum(terms, axis=0)

    def summary(self) -> str:
        terms = ", ".join(f"{name}^-a, a = {a:.4g} {self.intervals[name]}" for name, a in self.exponents.items())
        floor = f"{len(self.offsets)} offsets" if self.offsets else f"{self.offset:.4g}"
        return f"y = {floor} + terms in {terms}; {self.rows} rows, rms error {self.rms_log_error:.2%}"
