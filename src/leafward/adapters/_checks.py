"""Checks of the settings of adapters. Imports no torch."""

from __future__ import annotations

import math
from typing import Any, get_args

from leafward.errors import UsageError, nearest, need


def check_integers(config: Any, least: dict[str, int]) -> None:
    """Refuse a field that is not an integer of at least the given value; True is no integer here, nor is 8.0."""
    for name, lowest in least.items():
        value = getattr(config, name)
        fits = isinstance(value, int) and not isinstance(value, bool) and value >= lowest
        need(fits, name, f"an integer ≥ {lowest}", value)


def check_numbers(config: Any, *names: str, positive: bool = False) -> None:
    """Refuse a field that is not a finite number ≥ 0, or > 0 where it is to be `positive`."""
    for name in names:
        value = getattr(config, name)
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        fits = number and (value > 0 if positive else value >= 0)
        need(fits, name, "a positive number" if positive else "a number ≥ 0", value)


def check_flags(config: Any, *names: str) -> None:
    """Refuse a field that is not True or False."""
    for name in names:
        need(isinstance(getattr(config, name), bool), name, "True or False", getattr(config, name))


def check_choice(config: Any, name: str, allowed: Any) -> None:
    """Refuse a field that is not one of the words of the Literal `allowed`."""
    need(getattr(config, name) in get_args(allowed), name, f"of {', '.join(get_args(allowed))}", getattr(config, name))


def check_choices(config: Any, name: str, allowed: Any) -> None:
    """Refuse a field that is not a sequence of such words; a single text would be taken letter by letter."""
    value, words = getattr(config, name), get_args(allowed)
    need(isinstance(value, tuple | list), name, f"a tuple with any of {', '.join(words)}", value)
    for each in value:
        if each not in words:
            raise UsageError(f"{name} must be of {', '.join(words)}, got {each!r}; {nearest(str(each), words)}")
