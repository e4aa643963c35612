"""HCFormer's kernels are known to `leafward.nn.kernels` whichever is imported or chosen first, and in any process."""

import os
import subprocess
import sys

import pytest
import torch

from leafward.systems.hcformer.mixer import ClusterMixer, Windows
from leafward.systems.hcformer.model import Block

CHOOSE = "from leafward.nn import kernels\nkernels.use({!r})\n"
MODEL = "from leafward.systems.hcformer.model import Block\n"
SERVED = """
import sys, torch
from torch.utils._python_dispatch import TorchDispatchMode

class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "leafward":
            names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))

names = set()
layer, x, plain = torch.load(sys.argv[1], weights_only=False)
with Seen(), torch.no_grad():
    torch.testing.assert_close(layer(x, layer.mixer.layout(8, 8, x.device)), plain, rtol=1e-4, atol=1e-5)
print(*sorted(names))
"""


def printed(program, *arguments, **environment):
    settings = {name: value for name, value in os.environ.items() if name != "LEAFWARD_KERNELS"} | environment
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, env=settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.split()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A block that another process made, an input and what plain torch makes of it."""
    torch.manual_seed(0)
    layer = Block(ClusterMixer(32, 2, 16, Windows(side=4), 2, 2), 32, 8.0, 0.0, 0.5).eval()
    x = torch.randn(1, 8, 8, 32)
    path = tmp_path_factory.mktemp("block") / "block.pt"
    with torch.no_grad():
        torch.save((layer, x, layer(x, layer.mixer.layout(8, 8, x.device))), path)
    return path


@pytest.mark.parametrize(
    ("program", "environment"),
    [
        (CHOOSE.format("triton") + MODEL, {}),
        (MODEL + CHOOSE.format("triton"), {}),
        (CHOOSE.format("torch") + MODEL + CHOOSE.format("triton"), {}),
        (CHOOSE.format("triton") + CHOOSE.format("torch") + MODEL + CHOOSE.format("triton"), {}),
        (MODEL, {"LEAFWARD_KERNELS": "triton"}),
        ("", {"LEAFWARD_KERNELS": "triton"}),
    ],
    ids=["chosen before", "chosen after", "chosen anew", "loaded before", "environment", "model from a file"],
)
def test_they_serve_whichever_comes_first(saved, program, environment):
    pytest.importorskip("triton")
    served = printed(program + SERVED, saved, TRITON_INTERPRET="1", **environment)
    assert {"cluster_patches", "cluster_pool", "cluster_windows", "image_norm", "normed_mlp"} <= set(served)


def test_plain_torch_where_that_is_chosen(saved):
    assert printed(SERVED, saved, TRITON_INTERPRET="1", LEAFWARD_KERNELS="torch") == []


def test_layers_of_sequences_load_no_system():
    pytest.importorskip("triton")
    found = "import sys; print(*(name for name in sys.modules if name.startswith('leafward.systems')))"
    assert printed(CHOOSE.format("triton") + found) == []
