"""What a part of the demo hands back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from leafward.report import Number, Page


@dataclass(frozen=True)
class Part:
    """Its main numbers, what --json gives, how it is drawn on the page, and how to look around in what it made."""

    numbers: list[Number]
    result: dict[str, Any]
    draw: Callable[[Page], None]
    explore: str
    """The command that opens the explorer."""
    explored: str
    """What it then shows."""
