"""Tiny trainings of all systems on several ranks: child processes that train, and that are stopped in the middle."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import golden_runs
import torch

from ranks import finish, started

STEPS = "leafward.engine.run:RunDirectory.log"
"""What every step of the loop calls."""


@dataclass(frozen=True)
class Stop:
    """SIGTERM comes at the `calls`-th call of the method that `at` names, to every rank, as torchrun sends it."""

    at: str = STEPS
    calls: int = 3

    def arm(self) -> None:
        module, _, path = self.at.partition(":")
        kind, name = path.split(".")
        owner = getattr(importlib.import_module(module), kind)
        method, count = getattr(owner, name), [0]

        def counting(*args: Any, **named: Any) -> Any:
            count[0] += 1
            if count[0] == self.calls:
                os.kill(os.getpid(), signal.SIGTERM)
            return method(*args, **named)

        setattr(owner, name, counting)


def train_rank(
    system: str, settings: Mapping[str, Any], data: Path, out: Path, resume: bool = False, stop: Stop | None = None
) -> None:
    """One rank; the status of the process is what the command line would give."""
    torch.manual_seed(0)
    if stop is not None:
        stop.arm()
    try:
        golden_runs.train(system, settings, data, out, resume=resume)
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        sys.exit(getattr(error, "exit_code", 1))


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
