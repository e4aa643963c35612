"""The small experiment of the paper from start to end: 1020 models × 20,000 steps for each seed, and its verdicts.

    python benchmarks/paper_small_gpu.py --out runs/small --compact small.json

With `--budget-seconds` it saves everything after that time and stops; the same command then continues. Prints one
JSON line; `--compact` keeps the result (or, where the package for the fits is missing, the table) in one small file.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from leafward.config import replace, to_dict
from leafward.engine import Interrupted
from leafward.files import finite, write_text
from leafward.systems.superposition import config as superposition
from leafward.systems.superposition import train as train_superposition


def configuration(arguments: argparse.Namespace) -> superposition.Config:
    """The preset with the changes of the command line."""
    names = ("seeds", "steps", "precision", "device", "processes")
    changes = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    return replace(superposition.PRESETS[arguments.preset](), **changes)


def measure(config: superposition.Config, out: Path, budget: float | None) -> dict[str, Any]:
    """Train, or go on training, until done or out of time; `result` is None where there is none yet."""
    timer = None
    if budget is not None:
        # The recipe saves everything on SIGTERM, whoever sends it.
        timer = threading.Timer(budget, os.kill, (os.getpid(), signal.SIGTERM))
        timer.daemon = True
        timer.start()
    began = time.perf_counter()
    result, why = None, ""
    try:
        result = train_superposition.run(config, out, resume=(out / "config.yaml").exists())
    except (Interrupted, ImportError) as error:  # out of time, or no scipy for the fits
        why = f"{type(error).__name__}: {error}"
    if timer is not None:
        timer.cancel()
    return {"seconds": time.perf_counter() - began, "stopped": why, "result": result}


def line(config: superposition.Config, measured: dict[str, Any]) -> dict[str, Any]:
    """What is printed."""
    result = measured["result"]
    printed = {"finished": result is not None, "seconds": measured["seconds"], "stopped": measured["stopped"]}
    if result is not None:
        printed["pack_seconds"] = result["time"]["pack_seconds"]
        printed["ms_per_step"] = 1e3 * result["time"]["pack_seconds"] / config.loop.steps / config.arms.seeds
        printed["notes"] = result["notes"]
        kept = ("name", "value", "interval", "verdict", "note")
        printed["claims"] = [{key: claim[key] for key in kept} for claim in result["claims"]]
    return finite(printed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=tuple(superposition.PRESETS), default="paper-small")
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--precision", choices=("float32", "tf32", "float64"))
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--processes", type=int)
    parser.add_argument("--out", type=Path, required=True, help="run directory; an unfinished one is continued")
    parser.add_argument("--compact", type=Path, help="file for the whole result")
    parser.add_argument("--budget-seconds", type=float, help="save everything and stop after this time")
    arguments = parser.parse_args()
    config = configuration(arguments)
    measured = measure(config, arguments.out, arguments.budget_seconds)
    if arguments.compact is not None:
        kept = measured | {"config": to_dict(config)}
        table = arguments.out / "checkpoints" / "table.json"
        if measured["result"] is None and table.exists():
            kept["table"] = json.loads(table.read_text(encoding="utf-8"))
        write_text(arguments.compact, json.dumps(finite(kept), ensure_ascii=False, allow_nan=False))
    print(json.dumps(line(config, measured), ensure_ascii=False))
    sys.exit(0 if measured["result"] is not None or "Interrupted" in measured["stopped"] else 1)


if __name__ == "__main__":
    main()
