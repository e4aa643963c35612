"""Ranks for tests: processes forked from one server that has torch and leafward loaded, .03 s each instead of four.

`together(world, target, *arguments)` runs `target(*arguments)` on every rank with torchrun's variables set and waits;
`launch` and `finish` are the same in two steps, for ranks that are to die. `train_system` trains through the recipe's
own `run`, and `command` is the command line. Targets and arguments must be importable and picklable, as those of any
process.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess
from tempfile import TemporaryDirectory
from typing import Any

SYSTEMS = ("helm", "hcformer", "himapper", "hyperclip", "hyperclip.segment", "lathadapter", "radial", "superposition")
# What trainings import, some of it late; what is not installed is passed over. There is one server for a process of
# pytest, started by the first test that needs one, so this is the one list.
PRELOAD = [
    "leafward.engine.loop",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.utils.tensorboard",
    "yaml",
    *(f"leafward.systems.{name}.train" for name in (*SYSTEMS, "taxonomy", "vision")),
    "leafward.systems.vision.classification",
    "matplotlib.backends.backend_svg",
    "transformers.models.bert.modeling_bert",
    "transformers.models.clip.modeling_clip",
]
SPEED = ("time", "seconds", "per_second", "utilisation")
"""Ends of the names of measurements that no two runs share."""


@dataclass(frozen=True)
class Stop:
    """A signal comes at the `calls`-th call of a method; SIGTERM on every rank is what torchrun sends."""

    at: str = "leafward.engine.run:RunDirectory.log"
    """What every step of the loop calls, where nothing else is said."""
    calls: int = 3
    number: int = signal.SIGTERM

    def arm(self) -> None:
        module, _, path = self.at.partition(":")
        kind, name = path.split(".")
        owner = getattr(importlib.import_module(module), kind)
        method, count = getattr(owner, name), [0]

        def counting(*args: Any, **named: Any) -> Any:
            count[0] += 1
            if count[0] == self.calls:
                os.kill(os.getpid(), self.number)
            return method(*args, **named)

        setattr(owner, name, counting)


def exiting(target: Callable[..., Any], *arguments: Any, stop: Stop | None = None, **named: Any) -> None:
    """Run `target`; if it fails the process ends with the status that the command line would give."""
    if stop is not None:
        stop.arm()
    try:
        target(*arguments, **named)
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        sys.exit(getattr(error, "exit_code", 1))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launch(target: Callable[..., Any], *arguments: Any) -> Any:
    """Start `target(*arguments)` in a process of its own."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    process = context.Process(target=target, args=arguments)
    process.start()
    return process


def finish(*processes: Any, seconds: float = 120) -> list[int]:
    """The exit statuses; what still runs after so many seconds is killed."""
    for process in processes:
        process.join(seconds)
    for process in processes:
        if process.is_alive():
            process.kill()
            process.join()
    return [process.exitcode for process in processes]


def become(rank: int, world: int, port: int) -> None:
    """Set what torchrun would set; nothing for a process alone."""
    import torch

    torch.set_num_threads(1)
    if world > 1:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def started(world: int, target: Callable[..., Any], *arguments: Any) -> list[Any]:
    """The processes of `target(*arguments)` on each of `world` ranks."""
    port = free_port()
    return [launch(_as_rank, rank, world, port, target, arguments) for rank in range(world)]


def together(world: int, target: Callable[..., Any], *arguments: Any) -> None:
    """`target(*arguments)` on each of `world` ranks, all of which must end well."""
    assert finish(*started(world, target, *arguments), seconds=400) == [0] * world


def command(*words: str, cwd: Path | None = None) -> CompletedProcess[str]:
    """`leafward WORDS` in a process of its own, as in a terminal of 200 columns without colours."""
    with TemporaryDirectory() as folder:
        said = [Path(folder) / name for name in ("stdout", "stderr")]
        (status,) = finish(launch(_command, words, cwd or Path.cwd(), *said), seconds=400)
        return CompletedProcess(words, status, *(path.read_text(encoding="utf-8") for path in said))


def train_system(
    system: str, settings: Mapping[str, Any], out: Path, resume: bool = False, die_after: int | None = None
) -> None:
    """Train `system` with `settings` by dotted name over those of its first preset.

    With `die_after` the last rank dies by SIGKILL after so many updates, as when its machine is lost.
    """
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from leafward.config import replace

    config, train = (importlib.import_module(f"leafward.systems.{system}.{part}") for part in ("config", "train"))
    chosen = replace(next(iter(config.PRESETS.values()))(), **settings)
    if die_after is not None and os.environ.get("RANK", "0") == str(int(os.environ.get("WORLD_SIZE", "1")) - 1):
        updates = -1  # the optimiser takes an empty step as it is made

        def count(*_: Any) -> None:
            nonlocal updates
            updates += 1
            if updates == die_after:
                os.kill(os.getpid(), signal.SIGKILL)

        register_optimizer_step_post_hook(count)
    train.run(chosen, out, resume=resume)


def numbers(run: Path) -> dict[tuple[int, str], float]:
    """(step, name) -> all that a run directory's metrics hold but for speed."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {
        (line["step"], name): value
        for line in lines
        for name, value in line.items()
        if isinstance(value, float) and not name.endswith(SPEED)
    }


def _command(words: tuple[str, ...], cwd: Path, out: Path, err: Path) -> None:
    from leafward.cli.dispatch import entry

    os.chdir(cwd)
    os.environ |= {"COLUMNS": "200", "TERM": "dumb"}
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.argv = ["leafward", *words]
    entry()


def _as_rank(rank: int, world: int, port: int, target: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    become(rank, world, port)
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
        target(*arguments)
