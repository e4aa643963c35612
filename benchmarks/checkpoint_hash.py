"""What the hash of a checkpoint costs: saves with fsync without one and with each candidate, and checking on load.

    python benchmarks/checkpoint_hash.py                       # 64 MB
    python benchmarks/checkpoint_hash.py --mb 1000 --rounds 11 --folder /local/disk

The saves take turns, so that whatever else the machine does falls on all alike. On a busy disk single saves differ by
several times, so `overhead` compares the fastest of each; `paired_overhead` is the median over the rounds of the ratio
to the save without a hash of the same round. `cpu_s` are seconds of the process, all threads together, at the least.
Hashes are taken by a second thread while the file is written, as the engine does; `after` is the engine's hash, taken
when the file is written. `load` reads the tensors back, `check` is what verifying adds. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageWriter

from leafward.engine.checkpoint import Checkpointer, HashingFiles, verify
from leafward.engine.hashes import FASTEST, file_hash, new_hash

KINDS = ("crc32", "sha256", "sha1", "blake2b")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=64, help="megabytes of a checkpoint")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to write (default: the system's temporary folder)")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    tensors = {f"model.{k}": torch.randn(arguments.mb * 250_000 // 8) for k in range(8)}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        measured = {
            "alone_gb_per_second": {kind: alone(kind, tensors) for kind in KINDS},
            **saves(tensors, Path(name) / "save", arguments.rounds),
            **loads(tensors, Path(name) / "load", arguments.rounds),
        }
    print(json.dumps({"mb": arguments.mb, "rounds": arguments.rounds, "cpus": os.cpu_count(), **measured}, indent=2))


def seconds(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def alone(kind: str, tensors: dict[str, Tensor]) -> float:
    """Gigabytes per second of a hash on one thread, from memory."""
    content = tensors["model.0"].numpy().tobytes()
    return round(len(content) / 1e9 / min(seconds(lambda: new_hash(kind).update(content)) for _ in range(5)), 2)


def saves(tensors: dict[str, Tensor], folder: Path, rounds: int) -> dict[str, Any]:
    """Seconds of a save without a hash, with each, and with the engine's after the file is written."""

    def save(kind: str | None, after: bool = False) -> None:
        writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
        if kind is not None and not after:
            writer.fs = HashingFiles(kind)
        dcp.save(tensors, storage_writer=writer, no_dist=True)
        if kind is not None and after:
            for file in folder.iterdir():
                file_hash(file, kind)

    calls: dict[str, Callable[[], None]] = {"none": lambda: save(None)}
    calls |= {kind: lambda kind=kind: save(kind) for kind in KINDS} | {"after": lambda: save(FASTEST, after=True)}
    taken: dict[str, list[float]] = {name: [] for name in calls}
    used: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            os.sync()
            before = time.process_time()
            taken[name].append(seconds(call))
            used[name].append(time.process_time() - before)
    plain = taken["none"]
    return {
        "save": {
            name: {
                "fastest_s": round(min(each), 4),
                "median_s": round(statistics.median(each), 4),
                "cpu_s": round(min(used[name]), 4),
                "overhead": round(min(each) / min(plain) - 1, 4),
                "paired_overhead": round(statistics.median(a / b for a, b in zip(each, plain, strict=True)) - 1, 4),
            }
            for name, each in taken.items()
        }
    }


def loads(tensors: dict[str, Tensor], folder: Path, rounds: int) -> dict[str, float]:
    """Fastest seconds of loading a checkpoint of the engine, and of checking it before."""
    keeper = Checkpointer(folder, "benchmark")
    keeper.save(1, tensors, {})
    into = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    return {
        "check_s": round(min(seconds(lambda: verify(keeper.path(1))) for _ in range(rounds)), 4),
        "load_s": round(min(seconds(lambda: keeper.load(1, into)) for _ in range(rounds)), 4),
    }


if __name__ == "__main__":
    main()
