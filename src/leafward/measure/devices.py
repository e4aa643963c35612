"""The device that a fleet or an audit runs on."""

from __future__ import annotations

import torch

from leafward.errors import UsageError


def compute_device(device: str | torch.device | None) -> torch.device:
    """`device` as torch knows it, refused by name where it cannot be used; None is CUDA where there is one."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        where = torch.device(device)
    except RuntimeError as error:
        raise UsageError(f"device={device!r} is not a device of torch; allowed: cpu, cuda, cuda:N") from error
    if where.type not in ("cpu", "cuda"):
        raise UsageError(f"device={device!r}: float64 sums are needed, which cpu or cuda can do")
    if where.type == "cuda" and (where.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"device={device!r}: torch finds {torch.cuda.device_count()} CUDA devices here")
    return where
