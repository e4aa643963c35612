"""Child processes that train, and die or are photographed at each file operation, and what a run directory then holds.

A photograph is a copy of the run directory as it is when the process is about to change a file: what SIGKILL at that
moment leaves. A real kill beside it says so (`test_crashes`), and one run gives all of them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from experiment_ranks import train_rank
from safetensors.torch import load

from ranks import become

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = {"os.mkdir": 2, "os.remove": 1, "os.rmdir": 1, "os.rename": 2, "os.chmod": 2, "os.truncate": None}
"""What Python announces of changes to files beside `open` (os.replace is a rename, os.unlink a removal), and which of
its arguments is the folder that a path is relative to."""
UNREAD = "tensorboard"
"""Written by a thread of its own, and never read."""
Given = tuple[str, Mapping[str, Any], Path]
"""What is trained: system, settings, data."""


class Watch:
    """Knows every operation of this process's main thread by which a file below `folder` changes, before it comes."""

    def __init__(self, folder: Path, at: Callable[[int, str], None]) -> None:
        self.folder, self.at, self.known, self.busy = str(folder), at, 0, False
        self.sync = os.fsync

    def start(self) -> None:
        sys.addaudithook(self.heard)
        os.fsync = self.synced  # of which Python announces nothing

    def heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITING:
            self.count(event, arguments[0], None)
        elif event in CHANGES:
            place = CHANGES[event]
            self.count(event, arguments[0], None if place is None else arguments[place])

    def synced(self, handle: Any) -> None:
        self.count("os.fsync", handle if isinstance(handle, int) else handle.fileno(), None)
        self.sync(handle)

    def count(self, event: str, path: Any, folder: Any) -> None:
        if self.busy or threading.current_thread() is not threading.main_thread():
            return
        self.busy = True
        name = _full(path, folder)
        if name is not None and f"{name}/".startswith(f"{self.folder}/"):
            self.at(self.known, f"{event} {name.removeprefix(self.folder)}")
            self.known += 1
        self.busy = False


def _full(path: Any, folder: Any) -> str | None:
    if isinstance(path, int):
        return os.readlink(f"/proc/self/fd/{path}")
    if not isinstance(path, str | bytes | os.PathLike):
        return None
    base = os.readlink(f"/proc/self/fd/{folder}") if isinstance(folder, int) and folder >= 0 else os.getcwd()
    return os.path.join(base, os.fsdecode(path))


def train_until(at: int, out: Path, given: Given) -> None:
    """Train or go on in `out`, and die at the `at`-th operation."""

    def die(number: int, _: str) -> None:
        if number == at:
            os.kill(os.getpid(), signal.SIGKILL)

    Watch(out, die).start()
    train(out, given)


def train_photographed(photographs: Path, out: Path, given: Given) -> None:
    """Train in `out`; `photographs` gets a folder for each state, by the number of its first operation, and
    operations.json with all operations, each with the number of its state."""
    operations: list[tuple[str, int]] = []
    before: dict[str, Any] = {"": None}

    def photograph(number: int, operation: str) -> None:
        nonlocal before
        now = content(out)
        if now != before:
            copy = photographs / f"{number}"
            shutil.copytree(out, copy) if out.exists() else copy.mkdir(parents=True)
            before = now
            operations.append((operation, number))
        else:
            operations.append((operation, operations[-1][1]))

    watch = Watch(out, photograph)
    watch.start()
    train(out, given)
    watch.busy = True
    (photographs / "operations.json").write_text(json.dumps(operations), encoding="utf-8")


def train(out: Path, given: Given) -> None:
    """Train in `out`, or go on with what is there."""
    train_rank(*given, out, resume=out.exists())


def content(out: Path) -> dict[str, bytes | None]:
    """Path -> content of all that a run directory holds now; of folders None."""
    paths = [path for path in out.rglob("*") if UNREAD not in path.parts]
    return {path.relative_to(out).as_posix(): None if path.is_dir() else path.read_bytes() for path in paths}


def left(out: Path) -> dict[str, Any]:
    """The same, without what differs from run to run: times, the machine, and names that are drawn."""
    found: dict[str, Any] = {}
    for name, held in content(out).items():
        read = next((read for pattern, read in READERS.items() if re.search(pattern, name)), None)
        found[DRAWN.sub(".*.tmp", name)] = read(held) if read and held else held
    return found


def untimed(value: Any) -> Any:
    """JSON without what is measured in seconds, as a field or as a number with its name."""
    if isinstance(value, dict):
        return {key: untimed(item) for key, item in value.items() if key not in TIMES}
    if isinstance(value, list):
        return [untimed(item) for item in value if not (isinstance(item, dict) and item.get("name") in TIMES)]
    return value


def _tensors(found: bytes) -> dict[str, Any]:
    return {name: (tensor.dtype, tensor.tolist()) for name, tensor in load(found).items()}


TIMES = ("time", "seconds", "tokens_per_second", "tokens per second", "hashes", "seal")
"""What no two runs share. Hashes, because safetensors writes the metadata of a shard in any order."""
DRAWN = re.compile(r"\.[a-z0-9_]{8}\.tmp")
READERS: dict[str, Callable[[bytes], Any]] = {
    r"metrics\.jsonl$": lambda found: [untimed(json.loads(line)) for line in found.splitlines()],
    r"(result|manifest)\.json(\.[a-z0-9_]{8}\.tmp)?$": lambda found: untimed(json.loads(found)),
    r"checkpoints/.*\.safetensors$": _tensors,
    r"(env\.json|lock\.json|report\.html)(\.|$)": bool,
}


def alone(target: Callable[..., None], *arguments: Any) -> None:
    """Run `target` as a process that is no rank, quietly."""
    become(0, 1, 0)
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        target(*arguments)
