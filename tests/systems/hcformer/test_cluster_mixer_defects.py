"""What HCFormer's published code does otherwise, written out, beside the cluster mixer."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from leafward.errors import UsageError
from leafward.systems.hcformer.mixer import ClusterMixer, Layout, LorentzSimilarity, Windows

CPU = torch.device("cpu")


def similarity(curvature: float = 1.0) -> LorentzSimilarity:
    """With α = s = 1, so that it is minus the distance."""
    module = LorentzSimilarity(8, 1, 4, curvature, False).double()
    for parameter in module.parameters():
        torch.nn.init.zeros_(parameter)
    return module


def vectors(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def distances(tokens: Tensor, centres: Tensor, curvature: float = 1.0) -> Tensor:
    return -similarity(curvature)(tokens[None, None], centres[None, None])[0, 0]


def first_channel_as_time(v: Tensor) -> Tensor:
    """exp₀ of a tangent vector whose first channel is its time, then put back on the hyperboloid: full points."""
    norm = (v[:, 1:].square().sum(-1, keepdim=True) - v[:, :1].square()).clamp_min(1e-8).sqrt()
    space = torch.sinh(norm) / norm * v[:, 1:]
    return torch.cat([(1 + space.square().sum(-1, keepdim=True)).sqrt(), space], dim=-1)


def test_the_first_channel_is_no_time() -> None:
    x, y = vectors(6), vectors(5, seed=1)
    flipped = x * torch.tensor([-1.0, 1.0, 1.0, 1.0], dtype=x.dtype)
    assert torch.equal(first_channel_as_time(flipped), first_channel_as_time(x))
    assert (distances(flipped, y) - distances(x, y)).abs().min() > 1e-6


@pytest.mark.parametrize("kappa", [0.5, 4.0])
def test_the_curvature_belongs_inside_the_acosh(kappa: float) -> None:
    """Printed: √(1/κ) acosh(−⟨x,c⟩). A point has ⟨x,x⟩ = −1/κ, so its distance from itself is not 0, or no number."""
    x = vectors(6)
    length = x.norm(dim=-1, keepdim=True)
    space = torch.sinh(kappa**0.5 * length) / (kappa**0.5 * length) * x
    time = (1 / kappa + space.square().sum(-1)).sqrt()
    product = torch.outer(time, time) - space @ space.T
    printed = torch.acosh(product) / kappa**0.5
    assert not (printed.diagonal().abs() < 0.1).any()
    right = torch.acosh((kappa * product).clamp_min(1.0)) / kappa**0.5
    torch.testing.assert_close(distances(x, x, kappa), right, rtol=1e-6, atol=1e-6)


def test_a_printed_sign_would_choose_the_farthest_centre() -> None:
    """softmax(α D + b), as printed, prefers what is far; the published code has −D, and so have we."""
    x, y = vectors(6), vectors(5, seed=1)
    d = distances(x, y)
    ours = similarity()(x[None, None], y[None, None])[0, 0].softmax(dim=-1)
    assert torch.equal(ours.argmax(dim=-1), d.argmin(dim=-1))
    assert torch.equal(d.softmax(dim=-1).argmax(dim=-1), d.argmax(dim=-1))


def test_a_softmax_over_one_centre_learns_nothing() -> None:
    alpha, bias = torch.ones(1, requires_grad=True), torch.zeros(1, requires_grad=True)
    weights = (-alpha * torch.rand(49, 1) + bias).softmax(dim=-1)
    (weights * torch.randn(49, 1)).sum().backward()
    assert alpha.grad == bias.grad == 0
    with pytest.raises(UsageError, match="one centre tells nothing apart"):
        ClusterMixer(8, 2, 4, Windows(count=1), 2, 1)


def test_clipping_by_division_has_no_gradient_at_zero() -> None:
    v = torch.zeros(1, 4, dtype=torch.float64, requires_grad=True)
    (v * (1.0 / v.norm(dim=-1, keepdim=True)).clamp(max=1.0)).sum().backward()
    assert v.grad is not None
    assert v.grad.isnan().any()
    tokens = torch.zeros(1, 4, dtype=torch.float64, requires_grad=True)
    distances(tokens, vectors(3)).sum().backward()
    assert tokens.grad is not None
    assert tokens.grad.isfinite().all()


@pytest.mark.parametrize(("size", "fold", "becomes"), [(56, 7, 63), (28, 7, 35), (14, 1, 15), (7, 1, 8)])
def test_a_map_that_divides_needs_no_padding(size: int, fold: int, becomes: int) -> None:
    assert size + fold - size % fold == becomes  # the published rule
    layout = Layout.of(size, size, Windows(side=size // fold), 2, 2, CPU)
    assert (layout.grid, layout.side, layout.valid) == ((fold, fold), (size // fold, size // fold), None)


def test_a_map_of_one_token_cannot_be_reflected() -> None:
    """Images of 32×32 end in a 1×1 map, which the published code pads by reflection."""
    x = torch.randn(1, 8, 1, 1)
    with pytest.raises(RuntimeError, match="less than the corresponding input dimension"):
        F.pad(x, (0, 1, 0, 1), mode="reflect")
    module = ClusterMixer(8, 2, 4, Windows(side=7), 4, 0)
    assert module(x.permute(0, 2, 3, 1), module.layout(1, 1, CPU)).isfinite().all()
