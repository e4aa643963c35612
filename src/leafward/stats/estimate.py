"""The one estimate and the one interval: a number, how sure it is, over what, in which unit, which direction is good.

The convention for `result.json`, which `Estimate` reads and writes::

    {"headline": [{"name": "top-1 accuracy", "value": 0.713, "interval": [0.702, 0.724], "over": {"seeds": 3},
                   "twin": 0.698, "twin_interval": null, "unit": "", "better": "higher", "note": "",
                   "twin_name": "Euclidean twin"}],
     ...whatever else the run wants to keep}

Only `name` and `value` are required; a value that could not be computed is null. Intervals are 95 % confidence
intervals unless the note says otherwise. `twin` is the same number for the twin of equal size in the other geometry.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from leafward.errors import UsageError, nearest
from leafward.stats.digits import plain, texts

Direction = Literal["higher", "lower"]
ANY = (-math.inf, math.inf)
"""The range of a number that can be anything."""
SHARE = (0.0, 1.0)
"""The range of a share, such as an accuracy; in per cent `PERCENT`."""
PERCENT = (0.0, 100.0)


@dataclass(frozen=True)
class Over:
    """What an interval is over: seeds, samples (`of`: documents, held-out images), or both; neither: a fit's own."""

    seeds: int = 0
    samples: int = 0
    of: str = "samples"

    def __post_init__(self) -> None:
        for name in ("seeds", "samples"):
            if getattr(self, name) == 1:
                raise UsageError(f"an interval over {name} needs two or more of them, not 1")

    def __str__(self) -> str:
        parts = [f"{self.seeds} seeds"] if self.seeds else []
        parts += [f"{self.samples:,} {self.of}"] if self.samples else []
        return " and ".join(parts)

    def to_json(self) -> dict[str, Any] | None:
        seeds = {"seeds": self.seeds} if self.seeds else {}
        return seeds | ({"samples": self.samples, "of": self.of} if self.samples else {}) or None


UNSAID = Over()
"""Of an interval of a fit, or of one that nobody said more about."""


class Interval(tuple[float, float]):
    """A confidence interval: the pair (low, high), and how it came about. `value in interval`: low ≤ value ≤ high."""

    over: Over
    method: str
    level: float
    standard_error: float
    _fields = ("low", "high")  # `dataclasses.asdict` then takes it for the pair that it is

    def __new__(
        cls,
        low: float,
        high: float,
        over: Over = UNSAID,
        *,
        method: str = "",
        level: float = 0.95,
        standard_error: float = math.nan,
    ) -> Interval:
        made = super().__new__(cls, (low, high))
        made.over, made.method, made.level, made.standard_error = over, method, level, standard_error
        return made

    @property
    def low(self) -> float:
        return self[0]

    @property
    def high(self) -> float:
        return self[1]

    def __contains__(self, value: Any) -> bool:
        return self.low <= value <= self.high

    def __getnewargs__(self) -> tuple[float, float]:  # copies and pickles: the attributes follow by themselves
        return self.low, self.high

    def __str__(self) -> str:
        return f"[{self.low:.4g}, {self.high:.4g}] ({self.level:.0%}{', ' * bool(self.method)}{self.method})"

    def to_dict(self) -> dict[str, Any]:
        """All of it by name."""
        rest = {"level": self.level, "method": self.method, "standard_error": self.standard_error}
        return {"low": self.low, "high": self.high, **rest}

    def within(self, low: float, high: float) -> Interval | None:
        """The part that can be, of a number between `low` and `high`: the true one is there; None where no width is
        left."""
        return sound(Interval(max(low, self.low), min(high, self.high), self.over, **self._how()))

    def times(self, factor: float) -> Interval:
        """The interval of `factor` > 0 times the number."""
        made = Interval(self.low * factor, self.high * factor, self.over, **self._how())
        made.standard_error *= factor
        return made

    def _how(self) -> dict[str, Any]:
        return {"method": self.method, "level": self.level, "standard_error": self.standard_error}


def sound(pair: Iterable[float | None] | None) -> Interval | None:
    """`pair` as an interval; None where an end is missing, or where it has no width: values that are all the same say
    nothing about how far off their mean may be."""
    if pair is None:
        return None
    low, high = pair
    if low is None or high is None or not low < high:  # also NaN
        return None
    return pair if isinstance(pair, Interval) else Interval(low, high)


@dataclass(frozen=True)
class Estimate:
    """A value with its interval; `str()` gives for example "1.07 [0.95, 1.19]".

    Of a headline number it has a name too, and its twin: the same number of the model of equal size in the other
    geometry. `better` says which direction is good, where one is. `possible`: between which the value always lies. An
    interval without width, or beyond what is possible, is a mistake of whoever computed it, and refused.
    """

    value: float | None
    interval: Interval | None = None
    name: str = ""
    unit: str = ""
    better: Direction | None = None
    note: str = ""
    twin: Estimate | None = None
    twin_name: str = "Euclidean twin"
    possible: tuple[float, float] = dataclasses.field(default=ANY, compare=False, repr=False)

    def __post_init__(self) -> None:
        for field in ("name", "unit", "note", "twin_name"):
            if not isinstance(getattr(self, field), str):
                raise UsageError(f"{field} of a headline number must be text, not {getattr(self, field)!r}")
        if self.better not in ("higher", "lower", None):
            raise UsageError(f"better of {self.name!r} must be 'higher', 'lower' or null, not {self.better!r}")
        of = f" of {self.name!r}" * bool(self.name)
        object.__setattr__(self, "value", _real(self.value, f"value{of}"))
        object.__setattr__(self, "interval", _checked(self.interval, f"interval{of}", self.possible))

    @classmethod
    def of(cls, value: float | None, pair: Iterable[float | None] | None) -> Estimate:
        """From what a file holds: a pair of no width, or with an end missing, is no interval."""
        return cls(value, sound(pair))

    @property
    def number(self) -> float:
        """The value; NaN where it could not be computed."""
        return math.nan if self.value is None else float(self.value)

    @property
    def over(self) -> Over:
        """What the interval is over."""
        return UNSAID if self.interval is None else self.interval.over

    @property
    def texts(self) -> tuple[str, str]:
        """The value and the bracketed interval ("" without one), written to the same digits."""
        return texts(self.value, self.interval)

    def __str__(self) -> str:
        return " ".join(text for text in self.texts if text)

    def named(self, name: str, **changes: Any) -> Estimate:
        """The same as a headline number."""
        return dataclasses.replace(self, name=name, **changes)

    def times(self, factor: float) -> Estimate:
        """`factor` > 0 times the number, with its interval and what is possible."""
        value = None if self.value is None else self.value * factor
        interval = None if self.interval is None else self.interval.times(factor)
        possible = (self.possible[0] * factor, self.possible[1] * factor)
        return dataclasses.replace(self, value=value, interval=interval, possible=possible)

    def to_json(self) -> dict[str, Any]:
        twin = self.twin
        return {
            "name": self.name,
            "value": self.value,
            "interval": None if self.interval is None else list(self.interval),
            "over": self.over.to_json(),
            "twin": None if twin is None else twin.value,
            "twin_interval": None if twin is None or twin.interval is None else list(twin.interval),
            "unit": self.unit,
            "better": self.better,
            "note": self.note,
            "twin_name": self.twin_name,
        }

    @classmethod
    def from_json(cls, record: Any) -> Estimate:
        """Read one entry of `headline` in `result.json`; unknown keys are refused by name."""
        if not isinstance(record, Mapping):
            raise UsageError(f"a headline number must be an object with a name and a value, not {record!r}")
        for key in record:
            if key not in _KEYS:
                raise UsageError(f"a headline number has no key {key!r}; {nearest(str(key), _KEYS)}")
        missing = {"name", "value"} - set(record)
        if missing:
            raise UsageError(f"a headline number lacks {' and '.join(sorted(missing))}: {dict(record)!r}")
        if record["name"] == "":
            raise UsageError("a headline number needs a name")
        rest = {key: record[key] for key in ("name", "unit", "better", "note", "twin_name") if key in record}
        over, of = Over(**record.get("over") or {}), f"of {record['name']!r}"
        twin = _real(record.get("twin"), f"twin {of}")
        pair = _read(record.get("twin_interval"), f"twin_interval {of}", over)
        beside = None if twin is None else cls(twin, pair)
        return cls(record["value"], _read(record.get("interval"), f"interval {of}", over), twin=beside, **rest)


def with_twins_named(found: Iterable[Estimate], geometry: str | None) -> list[Estimate]:
    """Numbers of models of `geometry`, the twin called what it is: flat where ours is curved, and the other way."""
    name = "Lorentz twin" if geometry == "euclidean" else "Euclidean twin"
    return [dataclasses.replace(number, twin_name=name) for number in found]


def _real(value: Any, what: str) -> float | int | None:
    value = plain(value)
    whole = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**300  # fits a float
    if value is None or isinstance(value, float) or whole:
        return value
    raise UsageError(f"{what} must be a number or null, not {value!r}")


def _pair(value: Any, what: str) -> tuple[float | None, float | None]:
    if isinstance(value, str) or not isinstance(value, Iterable) or len(ends := list(value)) != 2:
        raise UsageError(f"{what} must be two numbers [low, high] or null, not {value!r}")
    low, high = (_real(end, what) for end in ends)
    if low is not None and high is not None and low > high:
        raise UsageError(f"{what} must have low ≤ high, not [{low}, {high}]")
    return low, high


def _read(value: Any, what: str, over: Over) -> Interval | None:
    """An interval of a file; one of no width, which earlier versions wrote, is none."""
    found = None if value is None else sound(_pair(value, what))
    return None if found is None else Interval(*found, over)


def _checked(value: Any, what: str, possible: tuple[float, float]) -> Interval | None:
    if value is None:
        return None
    low, high = _pair(value, what)
    if low is None or high is None:  # a bound that could not be computed: there is no interval to show
        return None
    if low == high:
        raise UsageError(f"{what} has no width: [{low}, {high}]; values that are all the same give no interval")
    if low < possible[0] or high > possible[1]:
        raise UsageError(f"{what} reaches beyond what is possible, {possible[0]:g} to {possible[1]:g}: [{low}, {high}]")
    return value if isinstance(value, Interval) else Interval(low, high)


_KEYS = tuple(Estimate(None).to_json())
