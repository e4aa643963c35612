"""Jobs for the executor's tests; processes of their own import them by name."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any


def square(config: dict[str, Any], directory: Path) -> dict[str, Any]:
    number, mode = float(config["number"]), config["mode"]
    marks = directory.parent / f"attempts-{number}"
    with open(marks, "a") as file:
        file.write("|")
    first = len(marks.read_text()) == 1
    if mode == "bad" or (mode == "once" and first):
        raise ValueError(f"{number} is a bad number")
    if mode == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    return {"square": number**2}


def threads(config: dict[str, Any], directory: Path) -> dict[str, Any]:
    import torch

    return {"threads": torch.get_num_threads()}


def wait(config: dict[str, Any], directory: Path) -> dict[str, Any]:
    with open(directory / "started", "a") as file:
        file.write("|")
    time.sleep(60)
    return {}


def not_json(config: dict[str, Any], directory: Path) -> Any:
    return [1] if config["kind"] == "list" else {"it": object()}
