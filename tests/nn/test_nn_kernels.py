"""The Triton kernels: against float64 by Triton's interpreter and on a CUDA device, and where they are used."""

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode

from leafward.errors import UsageError
from leafward.nn import kernels

HERE = Path(__file__).parent
CHECKS = {
    "kernels_check": ("residual_norm", "swiglu", "head_lanes", "latent_lanes", "experts", "model"),
    "decode_kernels_check": ("blended", "decoded", "served", "generated"),
    "vision_kernels_check": ("image_norm", "beside", "scaled_add", "normed_mlp", "block", "edges", "model", "memory"),
    "cluster_kernels_check": (
        "layers",
        "pooled",
        "close_points",
        "far_points",
        "many_windows",
        "parts",
        "half",
        "compiled",
    ),
}


def printed(program: str, *arguments: str, **environment: str) -> list[str]:
    """The lines that a program beside this file prints."""
    command = [sys.executable, str(HERE / f"{program}.py"), *arguments]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("program", CHECKS)
def test_kernels_equal_the_plain_forms(program, device):
    pytest.importorskip("triton")
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    names = CHECKS[program] + ("model",) * (program == "cluster_kernels_check" and device == "cuda")
    environment = {"TRITON_INTERPRET": "1"} if device == "cpu" else {}
    assert printed(program, device, **environment) == [f"{name} ok" for name in names]


@pytest.mark.slow
def test_kernels_take_the_memory_that_is_counted_with():
    """By the compiler, for a device that need not be there."""
    pytest.importorskip("triton")
    assert printed("kernels_memory_check") == ["clusters ok", "mlps ok", "decoding ok"]


@pytest.mark.slow
def test_compiler_sees_through_the_operators():
    """It then launches the kernels from its own code; and none of their inputs is copied for fear of being written."""
    pytest.importorskip("triton")
    tokens = ("lorentz token", "euclidean token")
    names = ("helm-d-tiny", "helm-mice-tiny", *tokens, "hcformer_nano", "hcformer_nano, large")
    assert printed("kernels_traced_check") == [f"{name} ok" for name in names]


@pytest.fixture
def _no_choice():
    yield
    kernels.use("auto")


@pytest.fixture
def cuda_tensor():
    """A tensor on a CUDA device, without one: it has all but values."""
    with FakeTensorMode():
        return torch.empty(3, device="cuda", dtype=torch.bfloat16)


@pytest.mark.usefixtures("_no_choice")
def test_choice_of_kernels(cuda_tensor):
    pytest.importorskip("triton")
    assert kernels.chosen() == "auto"
    with pytest.raises(UsageError, match="did you mean 'triton'"):
        kernels.use("tritton")
    for choice, served in (("triton", True), ("torch", False)):
        kernels.use(choice)
        assert kernels.chosen() == choice
        assert kernels.serve(cuda_tensor) == served
        assert not kernels.serve(torch.randn(3)), "on the CPU the kernels serve in the interpreter only"


@pytest.mark.usefixtures("_no_choice")
@pytest.mark.parametrize(
    "name",
    ["residual_norm", "swiglu_lift", "head_lanes", "latent_lanes", "latent_ask", "expert_swiglu", "expert_combine"],
)
def test_loaded_modules_hide_no_function(name):
    """A module becomes an attribute of its package as it is imported, in place of a function of its name."""
    pytest.importorskip("triton")
    kernels.use("triton")
    assert inspect.isfunction(getattr(kernels, name))


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="PyTorch was built without CUDA")
def test_kernels_serve_a_cuda_device_unless_refused(cuda_tensor, monkeypatch):
    pytest.importorskip("triton")
    assert kernels.chosen() == "auto"
    assert kernels.serve(cuda_tensor)
    assert not kernels.serve(torch.randn(3))
    assert not kernels.serve(cuda_tensor.double())
    monkeypatch.setattr(kernels, "INTERPRETED", True)
    assert not kernels.serve(torch.randn(3)), "the interpreter is a thing to ask for"
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    assert not kernels.serve(cuda_tensor), "an exported model runs without Triton"


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="PyTorch was built without CUDA")
def test_compiled_inference_does_without_kernels_of_rows(cuda_tensor, monkeypatch):
    pytest.importorskip("triton")
    found = []
    for compiling in (False, True):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda compiling=compiling: compiling)
        for gradients in (False, True):
            with torch.set_grad_enabled(gradients):
                found.append(kernels.serve_rows(cuda_tensor))
    assert found == [True, True, False, True]


def test_decoding_kernels_take_points_of_up_to_a_thousand_coordinates():
    fits = [kernels.decoding_fits(n, 64, torch.bfloat16, torch.device("cpu")) for n in (1, 24, 256, 1024, 1025, 4096)]
    assert fits == [True, True, True, True, False, False]


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None  # what an import finds where it is not installed
import torch
from torch._subclasses import FakeTensorMode
from leafward.errors import LeafwardError
from leafward.nn import kernels
with FakeTensorMode():
    assert not kernels.serve(torch.empty(3, device="cuda"))
try:
    kernels.use("triton")
except LeafwardError as error:
    print(kernels.chosen(), error)
"""


def test_without_triton_layers_are_plain_and_asking_for_it_says_so():
    environment = {name: value for name, value in os.environ.items() if name != "LEAFWARD_KERNELS"}
    done = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith("auto ")
    assert "triton" in done.stdout
