"""Numbers for people: how a value, its interval and its twin are written, on pages and in `result.json`.

The convention for `result.json`, which `Number` reads and writes::

    {"headline": [{"name": "top-1 accuracy", "value": 0.713, "interval": [0.702, 0.724],
                   "twin": 0.698, "twin_interval": null, "unit": "", "better": "higher", "note": "",
                   "twin_name": "Euclidean twin"}],
     ...whatever else the run wants to keep}

Only `name` and `value` are required; a value that could not be computed is null. Intervals are 95 % unless
the note says otherwise. `twin` is the same number for the twin of equal size in the other geometry.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from decimal import Decimal
from typing import Any

from leafward.errors import UsageError, nearest

MISSING = "–"
_DIGITS = 4  # significant digits of a number without an interval
_MOST_DECIMALS = 10
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

Interval = tuple[float, float]


@dataclass(frozen=True)
class Estimate:
    """A value with its interval, for a table cell; `str()` gives for example "1.07 [0.95, 1.19]"."""

    value: float | None
    interval: Interval | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", _real(self.value, "value"))
        object.__setattr__(self, "interval", _interval(self.interval, "interval"))

    @property
    def texts(self) -> tuple[str, str]:
        """The value and the bracketed interval ("" without one), written to the same digits."""
        return _texts(self.value, self.interval)

    def __str__(self) -> str:
        return " ".join(text for text in self.texts if text)


@dataclass(frozen=True)
class Number:
    """One headline number. `better` says which direction is good ("higher" or "lower"), where one is."""

    name: str
    value: float | None
    interval: Interval | None = None
    twin: float | None = None
    twin_interval: Interval | None = None
    unit: str = ""
    better: str | None = None
    note: str = ""
    twin_name: str = "Euclidean twin"

    def __post_init__(self) -> None:
        for field in ("name", "unit", "note", "twin_name"):
            if not isinstance(getattr(self, field), str):
                raise UsageError(f"{field} of a headline number must be text, not {getattr(self, field)!r}")
        if not self.name:
            raise UsageError("a headline number needs a name")
        if self.better not in ("higher", "lower", None):
            raise UsageError(f"better of {self.name!r} must be 'higher', 'lower' or null, not {self.better!r}")
        for key in ("value", "twin"):
            object.__setattr__(self, key, _real(getattr(self, key), f"{key} of {self.name!r}"))
        for key in ("interval", "twin_interval"):
            object.__setattr__(self, key, _interval(getattr(self, key), f"{key} of {self.name!r}"))

    @property
    def estimate(self) -> Estimate:
        return Estimate(self.value, self.interval)

    @property
    def twin_estimate(self) -> Estimate | None:
        return None if self.twin is None else Estimate(self.twin, self.twin_interval)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, record: Any) -> Number:
        """Read one entry of `headline` in `result.json`; unknown keys are refused by name."""
        if not isinstance(record, Mapping):
            raise UsageError(f"a headline number must be an object with a name and a value, not {record!r}")
        allowed = [field.name for field in fields(cls)]
        for key in record:
            if key not in allowed:
                raise UsageError(f"a headline number has no key {key!r}; {nearest(str(key), allowed)}")
        missing = {"name", "value"} - set(record)
        if missing:
            raise UsageError(f"a headline number lacks {' and '.join(sorted(missing))}: {dict(record)!r}")
        return cls(**record)


def format_value(value: Any) -> str:
    """Any table cell as text: numbers to four significant digits, missing values as a dash."""
    value = plain(value)
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return _fixed(value, 0)
    if isinstance(value, float):
        return _alone(value)
    return str(value)


def exact(value: Any) -> str:
    """A setting as text, with every digit: two runs that differ must look different."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def format_column(values: Sequence[Any]) -> list[str]:
    """The cells of one column; plain numbers share their decimals where each keeps two digits that way."""
    cells = [plain(value) for value in values]
    texts = [format_value(cell) for cell in cells]
    shared = [i for i, cell in enumerate(cells) if isinstance(cell, float) and not set(texts[i]) & set("×∞")]
    if shared:
        own = {i: len(texts[i].partition(".")[2]) for i in shared}
        decimals = min(max(own.values()), _decimals(_largest(*(cells[i] for i in shared))))
        if all(own[i] <= decimals or _exponent(cells[i]) >= 1 - decimals for i in shared):
            for i in shared:
                texts[i] = _fixed(cells[i], decimals)
    return texts


def is_numeric(values: Iterable[Any]) -> bool:
    """Whether a column holds numbers only (missing values aside), so that it is set flush right."""
    present = [plain(value) for value in values]
    present = [value for value in present if value is not None]
    return bool(present) and all(
        isinstance(value, int | float | Estimate) and not isinstance(value, bool) for value in present
    )


def plain(value: Any) -> Any:
    """`value` as a Python int, float or bool where it is a number of another library; NaN as None."""
    if not isinstance(value, numbers.Number) and getattr(value, "ndim", None) == 0:
        value = value.item()  # a 0-d array or tensor
    if isinstance(value, bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return None if math.isnan(value) else float(value)
    return value


def _real(value: Any, what: str) -> float | int | None:
    value = plain(value)
    whole = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**300  # fits a float
    if value is None or isinstance(value, float) or whole:
        return value
    raise UsageError(f"{what} must be a number or null, not {value!r}")


def _interval(value: Any, what: str) -> Interval | None:
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, Iterable) or len(ends := list(value)) != 2:
        raise UsageError(f"{what} must be two numbers [low, high] or null, not {value!r}")
    low, high = (_real(end, what) for end in ends)
    if low is None or high is None:  # a bound that could not be computed: there is no interval to show
        return None
    if low > high:
        raise UsageError(f"{what} must have low ≤ high, not [{low}, {high}]")
    return low, high


def _texts(value: float | None, interval: Interval | None) -> tuple[str, str]:
    """Value and interval with a common number of decimals and a common power of ten.

    The interval decides the digits: two significant ones of its half-width, because more would claim a
    precision that the number does not have.
    """
    if interval is None:
        return _alone(value), ""
    low, high = interval
    power = _power(value, low, high)
    half_width = _scaled(high, power) / 2 - _scaled(low, power) / 2
    if 0 < half_width < math.inf:
        decimals = min(max(0, 1 - _exponent(half_width)), _MOST_DECIMALS)
    else:
        decimals = _decimals(_scaled(_largest(value, low, high), power))
    suffix = _times_ten_to(power)
    shown = MISSING if value is None else _fixed(_scaled(value, power), decimals) + suffix
    ends = (_fixed(_scaled(end, power), decimals) for end in interval)
    return shown, f"[{', '.join(ends)}]{suffix}"


def _alone(value: float | None) -> str:
    """A number without an interval: four significant digits, fewer where the rest are true zeros."""
    if value is None:
        return MISSING
    if isinstance(value, int):
        return _fixed(value, 0)
    power = _power(value)
    value = _scaled(value, power)
    decimals = _decimals(value)
    text = _fixed(value, decimals)
    if "." in text and math.isclose(value, round(value, decimals), rel_tol=1e-6):  # 0.5, but 0.99996 is 1.000
        text = text.rstrip("0").rstrip(".")
    return text + _times_ten_to(power)


def _largest(*values: float | None) -> float:
    return max((abs(x) for x in values if x is not None and math.isfinite(x)), default=0.0)


def _power(*values: float | None) -> int:
    """The power of ten to write apart: none for sizes that read well as they are."""
    exponent = _exponent(_largest(*values))
    return 0 if -4 < exponent < 6 else exponent


def _scaled(x: float, power: int) -> float:
    # Decimal, because 10.0**-power overflows for the smallest floats
    return float(Decimal(x).scaleb(-power)) if power else float(x)


def _times_ten_to(power: int) -> str:
    return f"×10{str(power).translate(_SUPERSCRIPTS)}" if power else ""


def _decimals(x: float) -> int:
    return max(0, _DIGITS - 1 - _exponent(x)) if math.isfinite(x) else 0


def _exponent(x: float) -> int:
    return math.floor(math.log10(abs(x))) if x else 0


def _fixed(x: float, decimals: int) -> str:
    """Fixed-point text with a true minus sign, no "−0", and commas from five digits on (2048, 20,000)."""
    if isinstance(x, float) and math.isinf(x):
        return "∞" if x > 0 else "−∞"
    separator = "," if abs(x) >= 9999.5 else ""
    text = f"{x:{separator}d}" if isinstance(x, int) else f"{x:{separator}.{decimals}f}"
    if not text.strip("-0."):
        text = text.lstrip("-")
    return text.replace("-", "−")


def with_twins_named(found: Iterable[Number], geometry: str | None) -> list[Number]:
    """Numbers of models of `geometry`, the twin called what it is: flat where ours is curved, and the other way."""
    name = "Lorentz twin" if geometry == "euclidean" else "Euclidean twin"
    return [replace(number, twin_name=name) for number in found]
