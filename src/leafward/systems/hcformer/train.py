"""`leafward train hcformer`: `leafward train vision` with HCFormer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from leafward.systems.hcformer.config import Config
from leafward.systems.vision import train as vision


class Training(vision.Training):
    recipe = "hcformer"


def run(config: Config, out: Path, *, resume: bool = False, overwrite: bool = False) -> dict[str, Any]:
    """`leafward.systems.vision.train.run`, called a training of HCFormer in the run directory."""
    return vision.run(config, out, resume=resume, overwrite=overwrite, training=Training)
