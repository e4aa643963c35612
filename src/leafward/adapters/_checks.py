"""Checks of the settings of adapters. Imports no torch."""

from __future__ import annotations

import math
from typing import Any

from leafward.errors import need


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
