"""Tiny trainings of all systems on several ranks: child processes that train, and that are stopped in the middle."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import golden_runs
import torch

from ranks import Stop, exiting, finish, started


def train_rank(
    system: str, settings: Mapping[str, Any], data: Path, out: Path, resume: bool = False, stop: Stop | None = None
) -> None:
    """One rank; the status of the process is what the command line would give."""
    torch.manual_seed(0)
    exiting(golden_runs.train, system, settings, data, out, resume=resume, stop=stop)


def train(
    world: int,
    system: str,
    settings: Mapping[str, Any],
    data: Path,
    out: Path,
    *,
    resume: bool = False,
    stop: Stop | None = None,
) -> list[int]:
    """Train on `world` ranks; their exit statuses, -9 of one that waited for another for ever."""
    return finish(*started(world, train_rank, system, settings, data, out, resume, stop), seconds=250)
