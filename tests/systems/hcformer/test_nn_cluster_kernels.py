"""What stands around the kernels of the cluster mixer: its algebra, its layouts, and when they are used."""

import pytest
import torch
from torch._subclasses import FakeTensor, FakeTensorMode

from leafward.nn import kernels
from leafward.systems.hcformer.mixer import ClusterMixer, Layout, OffsetBias, Windows


def projected(module: ClusterMixer, x: torch.Tensor) -> torch.Tensor:
    """`_project` on plain values of both levels."""
    layout = module.layout(*x.shape[1:3], x.device)
    patch, window = module.patch_level, module.window_level
    tokens = layout.partition(x)
    both = patch.embed(torch.cat([tokens, layout.pool.to(x.dtype) @ tokens], dim=2))
    fine, _ = patch(both, tokens.shape[2], patch.placed(layout), None, None)
    fine = layout.merge(fine.flatten(3))
    sums = torch.stack([fine.sum(dim=-1), fine.square().sum(dim=-1)])
    if window is None:
        return module._project(fine, sums, None, layout)
    count = layout.grid[0] * layout.grid[1]
    coarse, _ = window(module._embed_windows(layout.pooled(x).unsqueeze(1)), count, window.placed(layout), None, None)
    return module._project(fine, sums, coarse[:, 0].flatten(2), layout)


@pytest.mark.parametrize(
    ("windows", "size", "global_centres"),
    [(Windows(side=4), (8, 12), 4), (Windows(count=2), (14, 14), 4), (Windows(count=1), (7, 7), 0)],
)
def test_norm_and_projection_need_no_concatenation(windows, size, global_centres):
    """The algebra around the kernels, in float64: pooling by means, and the norm folded into the projection."""
    module = ClusterMixer(10, 2, 6, windows, 2, global_centres).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    x = torch.randn(2, *size, 10, dtype=torch.float64)
    expected = module(x, module.layout(*size, x.device))
    torch.testing.assert_close(projected(module, x), expected, rtol=1e-5, atol=1e-6)


def test_scales_of_the_kernel_give_the_similarity():
    """−a asinh √S with a = 2α/√c and ρ = r|f| is −α times the distance."""
    similarity = ClusterMixer(10, 2, 6, Windows(side=4), 2, curvature=0.6).window_level.similarity.double()
    f, g = torch.randn(2, 5, 6, dtype=torch.float64), torch.randn(2, 4, 6, dtype=torch.float64)
    sharpness, reach = similarity.scales()
    rho, sigma = reach.view(2, 1, 1) * f.norm(dim=-1, keepdim=True), reach.view(2, 1, 1) * g.norm(dim=-1).unsqueeze(1)
    cosine = torch.nn.functional.cosine_similarity(f.unsqueeze(2), g.unsqueeze(1), dim=-1)
    square = torch.sinh((rho - sigma) / 2).square() + rho.sinh() * sigma.sinh() * (1 - cosine) / 2
    torch.testing.assert_close(-sharpness.view(2, 1, 1) * square.sqrt().asinh(), similarity(f, g))


def test_table_of_the_bias_has_its_axes_apart():
    bias, layout = OffsetBias(3), Layout.of(6, 10, Windows(count=2), 2, 2, torch.device("cpu"))
    table = bias.table(layout.offsets)
    assert table.shape == (3, 2, 3, 2, 5)
    torch.testing.assert_close(table.permute(0, 2, 4, 1, 3).reshape(3, 15, 4), bias(layout.offsets))


def test_layouts_are_kept_and_serve_training_after_inference():
    module = ClusterMixer(10, 2, 6, Windows(side=4), 2)
    x = torch.randn(1, 20, 24, 10)
    with torch.inference_mode():
        layout = module.layout(20, 24, x.device)
    assert module.layout(20, 24, x.device) is layout
    module(x.requires_grad_(), layout).sum().backward()
    with FakeTensorMode():
        fake = module.layout(20, 28, x.device)
    assert isinstance(fake.pool, FakeTensor)
    assert not isinstance(module.layout(20, 28, x.device).pool, FakeTensor)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_layouts_are_not_kept_while_a_graph_records():
    """Their memory is the graph's, and empty until it is replayed."""
    module, device = ClusterMixer(10, 2, 6, Windows(side=4), 2), torch.device("cuda", torch.cuda.current_device())
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        recorded = module.layout(20, 32, device)
    kept = module.layout(20, 32, device)
    assert kept is not recorded
    assert module.layout(20, 32, device) is kept
    torch.testing.assert_close(kept.pool.cpu(), module.layout(20, 32, torch.device("cpu")).pool)


def test_kernels_stay_away_from_the_cpu_and_from_what_they_do_not_know(monkeypatch):
    module = ClusterMixer(10, 2, 6, Windows(side=4), 2)
    x = torch.randn(1, 8, 8, 10)
    assert not module._kernels_serve(x, module.layout(8, 8, x.device))
    monkeypatch.setattr(kernels, "serve", lambda x: True)
    assert module._kernels_serve(x, module.layout(8, 8, x.device))
    assert not module._kernels_serve(x, module.layout(9, 8, x.device)), "padded"
    wide = ClusterMixer(10, 2, 6, Windows(count=1), 2, 0)
    assert not wide._kernels_serve(x, wide.layout(17, 16, x.device)), "too many tokens for a tile"
    curved = ClusterMixer(10, 2, 6, Windows(side=4), 2, patch_geometry="lorentz")
    assert not curved._kernels_serve(x, curved.layout(8, 8, x.device))
