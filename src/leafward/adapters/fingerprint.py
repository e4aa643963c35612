"""How a base model is known again, wherever its folder lies: by a few of its weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from leafward.adapters.layouts import STORE
from leafward.errors import DataError

SAMPLED = 32
"""Weights that are written down, of parameters spread over the whole model."""
PRECISIONS = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def fingerprint(model: nn.Module) -> dict[str, Any]:
    """The middle entries of some matrices of the base model by name, and the coarsest type among them.

    Empty where there is nothing to look at: no floating matrix, or parameters without data.
    """
    found = {name: each for name, each in _base(model).items() if each.ndim > 1 and _floating(each)}
    if not found or any(each.is_meta for each in found.values()):
        return {}
    names = sorted(found)
    chosen = [names[place * len(names) // SAMPLED] for place in range(SAMPLED)] if len(names) > SAMPLED else names
    return {
        "dtype": max((str(found[name].dtype).removeprefix("torch.") for name in chosen), key=_step),
        "weights": {name: _middle(found[name]) for name in chosen},
    }


def difference(saved: Mapping[str, Any], model: nn.Module) -> str | None:
    """Where `model` is not the one of a fingerprint, in words; None where they agree.

    The two may be loaded in different types: weights agree to the step of the coarser one.
    """
    here = _base(model)
    for name, value in saved["weights"].items():
        parameter = here.get(name)
        if parameter is None:
            return f"it has a parameter {name}, and this model has none"
        if parameter.is_meta or not _floating(parameter):  # not loaded, or quantised: nothing can be said
            continue
        found, dtypes = _middle(parameter), (saved["dtype"], str(parameter.dtype).removeprefix("torch."))
        least = max(torch.finfo(PRECISIONS[dtype]).smallest_normal for dtype in dtypes)
        if not abs(found - value) <= max(_step(dtype) for dtype in dtypes) * abs(value) + least:
            return f"the middle of its {name} is {value:.6g}, and here {found:.6g}"
    return None


def checked_fingerprint(record: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The fingerprint in the description of a base model; empty in descriptions that were written without one."""
    if "weights" not in record:
        return {}
    weights, dtype = record["weights"], record.get("dtype")
    numbers = isinstance(weights, dict) and all(isinstance(value, float) for value in weights.values())
    if not numbers or not isinstance(dtype, str) or dtype not in PRECISIONS:
        raise DataError(f"{source}: 'weights' of 'base_model' must be numbers by name, with a 'dtype' beside them")
    return {"dtype": dtype, "weights": weights}


def _base(model: nn.Module) -> dict[str, Tensor]:
    """The parameters of the model itself, without those of its adapters."""
    return {name: each.detach() for name, each in model.named_parameters() if not name.startswith(f"{STORE}.")}


def _floating(parameter: Tensor) -> bool:
    return parameter.dtype in PRECISIONS.values() and parameter.numel() > 0


def _middle(parameter: Tensor) -> float:
    return float(parameter[tuple(side // 2 for side in parameter.shape)])


def _step(dtype: str) -> float:
    return torch.finfo(PRECISIONS[dtype]).eps
