"""The device that a recipe's setting means, for work outside the engine's loop."""

from __future__ import annotations

import torch

from leafward.engine import session


def device_of(name: str) -> torch.device:
    """The device of "auto", "cpu" or "cuda"; one that is not there is refused."""
    with session(name) as cluster:
        return cluster.device
