"""What a part of the demo hands back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from leafward.report import Estimate, Result


@dataclass(frozen=True)
class Part:
    """Its main numbers, what --json gives, how it is drawn on the page, and how to look around in what it made."""

    numbers: list[Estimate]
    result: dict[str, Any]
    draw: Callable[[Result], None]
    explore: str
    """The command that opens the explorer."""
    explored: str
    """What it then shows."""
