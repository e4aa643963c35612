"""Where the vision layers go by kernels: on a CUDA device, without being told, as far as its memory goes."""

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from leafward.nn import kernels as nn_kernels
from leafward.systems.hcformer import kernels
from leafward.systems.hcformer.mixer import ClusterMixer, Windows
from leafward.systems.hcformer.model import Block

H200, RTX_4090 = 227 * 1024, 99 * 1024  # bytes of shared memory that a program can have


class Seen(TorchDispatchMode):
    """Which operators of ours are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "leafward":
            self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="PyTorch was built without CUDA")
@pytest.mark.parametrize(("dtype", "mlp"), [(torch.float32, False), (torch.bfloat16, True)])
def test_blocks_go_by_kernels_on_a_cuda_device(monkeypatch, dtype, mlp):
    """Forward, by the shapes alone, which needs no device."""
    pytest.importorskip("triton")
    monkeypatch.setattr(nn_kernels, "shared_memory", lambda device: H200)
    with FakeTensorMode(), torch.device("cuda"), Seen() as seen:
        layer = Block(ClusterMixer(32, 2, 16, Windows(side=4), 2, 2), 32, 8.0, 0.0, 0.5)
        for part in layer.modules():  # Module.to() cannot: it swaps tensors, which fakes do not allow
            for name, parameter in part.named_parameters(recurse=False):
                setattr(part, name, nn.Parameter(parameter.detach().to(dtype)))
            for name, buffer in part.named_buffers(recurse=False):
                setattr(part, name, buffer.to(dtype))
        x = torch.randn(2, 8, 8, 32, dtype=dtype)
        out = layer(x, layer.mixer.layout(8, 8, x.device))
        assert (out.shape, out.dtype, out.device) == (x.shape, dtype, x.device)
    always = {"image_moments", "image_norm", "cluster_pool", "cluster_patches", "cluster_windows", "scaled_add"}
    assert seen.names == always | ({"normed_mlp"} if mlp else set())


def test_kernels_leave_what_the_memory_of_a_multiprocessor_does_not_hold(monkeypatch):
    """Bounds by what the compiler needs: 289 KB for 256 tokens of 32 channels in float32, 152 KB in bfloat16."""
    device = torch.device("cuda", 0)
    for memory, fits in ((H200, (True, True, False)), (RTX_4090, (True, False, False))):
        monkeypatch.setattr(nn_kernels, "shared_memory", lambda device, memory=memory: memory)
        sizes = ((64, torch.float32), (256, torch.bfloat16), (256, torch.float32))
        assert tuple(kernels.cluster_fits(n, 16, 32, dtype, device) for n, dtype in sizes) == fits
        assert kernels.mlp_fits(64, 512, torch.bfloat16, device)
        assert kernels.mlp_fits(128, 1024, torch.bfloat16, device) == (memory == H200)
    assert not kernels.mlp_fits(48, 384, torch.bfloat16, device)
    assert not kernels.mlp_fits(64, 500, torch.bfloat16, device)
    assert not kernels.mlp_fits(64, 512, torch.float32, device)
