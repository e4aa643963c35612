"""Numbers for people: how a value, its interval and a column of values are written."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

MISSING = "–"
_DIGITS = 4  # significant digits of a number without an interval
_MOST_DECIMALS = 10
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


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


def texts(value: float | None, interval: tuple[float, float] | None) -> tuple[str, str]:
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
