"""Tiny trainings of all systems on several ranks: child processes that train, and that are stopped in the middle."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import golden_presets
import golden_runs
import torch

from ranks import PRELOAD as LOADED
from ranks import free_port

PRELOAD = [
    *LOADED,
    "experiment_ranks",
    "matplotlib.backends.backend_svg",
    "transformers.models.bert.modeling_bert",
    "transformers.models.clip.modeling_clip",
    *(f"{home}.train" for home in golden_presets.PACKAGES.values()),
]
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
    rank: int,
    world: int,
    port: int,
    system: str,
    settings: Mapping[str, Any],
    data: Path,
    out: Path,
    resume: bool,
    stop: Stop | None,
) -> None:
    """One rank; the status of the process is what the command line would give."""
    if world > 1:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if stop is not None:
        stop.arm()
    try:
        golden_runs.train(system, settings, data, out, resume=resume)
    except Exception as error:
        print(f"rank {rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
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
    """Train on `world` ranks; their exit statuses."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    port = free_port()
    given = (world, port, system, settings, data, out, resume, stop)
    ranks = [context.Process(target=train_rank, args=(rank, *given)) for rank in range(world)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(120)
    statuses = [each.exitcode for each in ranks]
    for each in ranks:  # one that waits for another for ever
        each.kill()
    return [-9 if status is None else status for status in statuses]
