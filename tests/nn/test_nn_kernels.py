"""The Triton kernels, forward and backward, against float64: in Triton's interpreter, and on a CUDA device."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from leafward.errors import UsageError
from leafward.nn import kernels

CHECK = Path(__file__).with_name("kernels_check.py")


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_kernels_equal_the_plain_forms(device):
    pytest.importorskip("triton")
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    environment = os.environ | ({"TRITON_INTERPRET": "1"} if device == "cpu" else {})
    done = subprocess.run(
        [sys.executable, str(CHECK), device], env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    names = ("residual_norm", "swiglu", "head_lanes", "latent_lanes", "experts", "model")
    assert done.stdout.split("\n")[:-1] == [f"{name} ok" for name in names]


def test_choice_of_kernels():
    x = torch.randn(3)
    assert kernels.chosen() == "torch"
    with pytest.raises(UsageError, match="did you mean 'triton'"):
        kernels.use("tritton")
    try:
        kernels.use("triton")
        assert not kernels.serve(x), "on the CPU the kernels serve in the interpreter only"
    finally:
        kernels.use("torch")
