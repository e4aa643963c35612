"""The authors' whole models as numbers, in float64; they lie beside the checkout, being too large for it."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))  # the small models are a module of this folder

ORACLE = Path(__file__).resolve().parents[4] / "shared" / "oracles" / "helm.safetensors"


@pytest.fixture(scope="session")
def model_oracle() -> Callable[[str], dict[str, Tensor]]:
    """Name of a model -> its tensors keyed state/…, inputs/…, outputs/…, grads/…"""
    if not ORACLE.is_file():
        pytest.skip("the authors' models (../shared/oracles/helm.safetensors) are not on this machine")
    everything = load_file(ORACLE)

    def of(name: str) -> dict[str, Tensor]:
        found = {k.removeprefix(name + "/"): v for k, v in everything.items() if k.startswith(name + "/")}
        return {k: v.double() if v.is_floating_point() else v for k, v in found.items()}

    return of


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
