"""The authors' layers as numbers, in float64, and the weights of ours set from them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

DATA = Path(__file__).resolve().parents[1] / "data" / "helm_layers.safetensors"


@pytest.fixture(scope="session")
def layer_oracle() -> Callable[[str], dict[str, Tensor]]:
    """Name of a layer -> its tensors in float64, keyed state/…, inputs/…, outputs/…"""
    everything = load_file(DATA)

    def of(name: str) -> dict[str, Tensor]:
        return {k.removeprefix(name + "/"): v.double() for k, v in everything.items() if k.startswith(name + "/")}

    return of


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
