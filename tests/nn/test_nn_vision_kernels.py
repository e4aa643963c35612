"""The kernels of the vision layers: against float64 by Triton's interpreter or on a CUDA device, and by default."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from leafward.nn import kernels

CHECK = Path(__file__).with_name("vision_kernels_check.py")


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_vision_kernels_equal_the_plain_forms(device):
    pytest.importorskip("triton")
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    environment = os.environ | ({"TRITON_INTERPRET": "1"} if device == "cpu" else {})
    done = subprocess.run(
        [sys.executable, str(CHECK), device], env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    names = ("image_norm", "scaled_add", "normed_mlp", "block", "model", "memory")
    assert done.stdout.split("\n")[:-1] == [f"{name} ok" for name in names]


def test_vision_kernels_serve_a_cuda_device_unless_refused(monkeypatch):
    x: Any = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16)
    monkeypatch.setattr(kernels, "_vision_ready", True)
    monkeypatch.setattr(kernels, "_settled", False)
    assert kernels.serve_vision(x), "without a choice"
    assert not kernels.serve(x)
    assert not kernels.serve_vision(torch.zeros(1)), "not on a CPU"
    for choice, served in (("torch", False), ("triton", True)):
        monkeypatch.setattr(kernels, "_settled", True)
        monkeypatch.setattr(kernels, "_choice", choice)
        assert kernels.serve_vision(x) == served
    monkeypatch.setattr(kernels, "_vision_ready", False)
    assert not kernels.serve_vision(x), "Triton is not there"
