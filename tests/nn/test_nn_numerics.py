"""Arithmetic that goes wrong in the plain form, and holds in ours."""

import mpmath
import pytest
import torch
from torch import Tensor, nn

from leafward.nn import Attention, FeedForward, HoPE, Linear, Residual, RMSNorm


def plain_residual(x: Tensor, y: Tensor) -> Tensor:
    """The authors' form: the length of the sum by t² − |s|²."""
    a_s = x + y
    a_t = (1 + x.square().sum(-1, keepdim=True)).sqrt() + (1 + y.square().sum(-1, keepdim=True)).sqrt()
    return a_s / (a_t**2 - a_s.square().sum(-1, keepdim=True)).abs().clamp_min(1e-4).sqrt()


def exact_residual(x: Tensor, y: Tensor) -> Tensor:
    with mpmath.workdps(50):
        rows = []
        for a, b in zip(x.tolist(), y.tolist(), strict=True):
            total = [mpmath.mpf(p) + mpmath.mpf(q) for p, q in zip(a, b, strict=True)]
            time = sum(mpmath.sqrt(1 + sum(mpmath.mpf(p) ** 2 for p in row)) for row in (a, b))
            length = mpmath.sqrt(time**2 - sum(p**2 for p in total))
            rows.append([float(p / length) for p in total])
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize(
    ("reach", "ours_below", "plain_above"), [(80.0, 2e-6, 1e-4), (400.0, 2e-6, 3e-3), (3e3, 1e-5, 0.1)]
)
@pytest.mark.parametrize("apart", ["sideways", "outwards"])
def test_residual_does_not_cancel(reach, ours_below, plain_above, apart):
    x = nn.functional.normalize(torch.randn(40, 32), dim=-1) * reach
    y = x + 0.01 * torch.randn_like(x) if apart == "sideways" else x * (1 + 0.1 * torch.rand(40, 1))
    exact = exact_residual(x, y)

    def error(out: Tensor) -> float:
        return ((out - exact).norm(dim=-1) / exact.norm(dim=-1)).max().item()

    assert error(Residual()(x, y)) < ours_below
    assert error(plain_residual(x, y)) > plain_above


def test_residual_weight_stays_positive_so_the_sum_stays_timelike():
    layer = Residual()
    optimiser = torch.optim.SGD(layer.parameters(), lr=1.0)
    x, y = torch.randn(2, 50, 8) * 3.0
    for _ in range(50):  # pulls the weight down; a raw scalar would cross zero, where the sum turns spacelike
        optimiser.zero_grad()
        out = layer(x, y)
        (layer.log_weight.exp() * 3.0 + 0.0 * out.sum()).sum().backward()
        optimiser.step()
        assert layer(x, y).isfinite().all()
    assert layer.log_weight.exp() > 0
    minus = (x - 2.0 * y).square().sum(-1) - (
        (1 + x.square().sum(-1)).sqrt() - 2.0 * (1 + y.square().sum(-1)).sqrt()
    ) ** 2
    assert (minus > 0).any(), "with a negative weight the sum can be spacelike: no point of the hyperboloid"


@pytest.mark.parametrize("which", ["x", "y", "both"])
def test_residual_at_the_origin(which):
    x, y = (torch.randn(3, 8, dtype=torch.float64) for _ in range(2))
    if which != "y":
        x = torch.zeros_like(x)
    if which != "x":
        y = torch.zeros_like(y)
    x.requires_grad_(), y.requires_grad_()
    layer = Residual().double()
    layer(x, y).sum().backward()
    for grad in (x.grad, y.grad, layer.log_weight.grad):
        assert grad is not None
        assert grad.isfinite().all()
    if which == "both":  # near the origin the space is flat, the sum a mean
        torch.testing.assert_close(x.grad, torch.full_like(x, 0.5))


def mean_cosine(layers: list[nn.Module]) -> float:
    s = torch.randn(1, 64, 128)
    table = HoPE(32).table(torch.arange(64))
    for layer in layers:
        y = layer(RMSNorm(128)(s), table) if isinstance(layer, Attention) else layer(RMSNorm(128)(s))
        s = 3.0 * Residual()(s, y)
    unit = nn.functional.normalize(s[0], dim=-1)
    gram = unit @ unit.T
    return ((gram.sum() - gram.trace()) / (64 * 63)).item()


def test_a_time_column_of_zeros_keeps_tokens_apart_at_the_start():
    """After an RMSNorm all tokens have the same time, so a random column adds one vector to all of them."""
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [Attention(128, heads=4), FeedForward(128, 256)]
    ours = mean_cosine(layers)
    for layer in layers:
        for module in layer.modules():
            if isinstance(module, Linear) and module.time_weight is not None:
                nn.init.normal_(module.time_weight, std=module.in_features**-0.5)
    assert mean_cosine(layers) > ours + 0.2
    assert ours < 0.5


def test_norm_in_half_type_is_computed_wide():
    s = 300.0 * torch.randn(4, 256)  # squares beyond the range of float16
    out = RMSNorm(256)(s.half())
    torch.testing.assert_close(out.float(), RMSNorm(256)(s), rtol=5e-3, atol=5e-3)
