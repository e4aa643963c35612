"""Every layer gives the authors' numbers, in float64. Points there are [t; s] with time first; ours are s alone."""

import math

import pytest
import torch
from torch import Tensor

from leafward.nn import Attention, FeedForward, HoPE, LatentAttention, Linear, Residual, RMSNorm, Space

TOLERANCE = 1e-6  # the reference ran in float32, its rotary tables in complex64


def close(ours: Tensor, theirs: Tensor) -> None:
    error = ((ours - theirs).norm() / theirs.norm()).item()
    assert error <= TOLERANCE, error


def fill(layer: Linear, weight: Tensor, bias: Tensor) -> None:
    """Set from a matrix over full points; with several points each brings its own time column."""
    points = weight.unflatten(1, (layer.points, -1))
    layer.weight.data = points[..., 1:].flatten(1).clone()
    assert layer.time_weight is not None
    layer.time_weight.data = points[..., 0].clone()
    assert layer.bias is not None
    layer.bias.data = bias.clone()


@pytest.mark.parametrize("name", ["lorentz_linear", "lorentz_linear_c037"])
def test_linear(layer_oracle, name):
    of = layer_oracle(name)
    squared_radius = of.get("state/manifold_out.c")
    out_space = None if squared_radius is None else Space.of_squared_radius(squared_radius.item())
    layer = Linear(63, 47, out_space=out_space)
    fill(layer, of["state/linear.weight"], of["state/linear.bias"])
    y = layer(of["inputs/0"][..., 1:])
    close(y, of["outputs/0"][..., 1:])
    close((out_space or Space()).time(y), of["outputs/0"][..., :1])


def test_rms_norm(layer_oracle):
    of = layer_oracle("rmsnorm")
    layer = RMSNorm(63, eps=1e-8)
    layer.weight.data = of["state/weight"]
    y = layer(of["inputs/0"][..., 1:])
    close(y, of["outputs/0"][..., 1:])
    close(Space().time(y), of["outputs/0"][..., :1])


@pytest.mark.parametrize(
    ("name", "scale"), [("residual_plain", 1.0), ("residual_fixed", 32.0), ("residual_learn", None)]
)
def test_residual(layer_oracle, name, scale):
    of = layer_oracle(name)
    learned = scale is None
    layer = Residual(scale=scale or math.exp(of["state/scale"].item()), learn_scale=learned).double()
    layer.log_weight.data = of["state/w_y"].log().reshape(1)
    if layer.log_scale is not None:
        layer.log_scale.data = of["state/scale"].reshape(1)
    y = layer(of["inputs/0"][..., 1:], of["inputs/1"][..., 1:])
    close(y, of["outputs/0"][..., 1:])
    close(Space().time(y), of["outputs/0"][..., :1])


def test_feed_forward(layer_oracle):
    of = layer_oracle("hffn")
    layer = FeedForward(63, 127)
    up = torch.cat([of["state/w1.linear.weight"], of["state/w3.linear.weight"]])
    fill(layer.up, up, torch.cat([of["state/w1.linear.bias"], of["state/w3.linear.bias"]]))
    fill(layer.down, of["state/w2.linear.weight"], of["state/w2.linear.bias"])
    close(layer(of["inputs/0"][..., 1:]), of["outputs/0"][..., 1:])


def test_attention_with_hope(layer_oracle):
    of = layer_oracle("attention_full_hope")
    layer = Attention(67, heads=4, head_width=16)
    kinds = ("Wq", "Wk", "Wv")
    fill(
        layer.qkv,
        torch.cat([of[f"state/{kind}.weight"] for kind in kinds]),
        torch.cat([of[f"state/{kind}.bias"] for kind in kinds]),
    )
    fill(layer.out, of["state/final_linear.weight"], of["state/final_linear.bias"])
    layer.log_scale.data = (2.0 / of["state/scale"]).log()
    table = HoPE(16).table(torch.arange(12), torch.float64)
    close(layer(of["inputs/0"][..., 1:], table), of["outputs/0"][..., 1:])


def test_latent_attention(layer_oracle):
    of = layer_oracle("hmla")
    layer = LatentAttention(65, heads=4, latent=24, nope_width=16, rope_width=8, value_width=16, eps=1e-8)
    assert isinstance(layer.query, Linear)
    for ours, theirs in ((layer.query, "wq"), (layer.compress, "wkv_a"), (layer.expand, "wkv_b"), (layer.out, "wo")):
        fill(ours, of[f"state/{theirs}.linear.weight"], of[f"state/{theirs}.linear.bias"])
    layer.latent_norm.weight.data = of["state/kv_norm.weight"]
    layer.log_scale.data = (2.0 / of["state/softmax_scale"]).log()
    table = HoPE(8).table(torch.arange(12), torch.float64)
    close(layer(of["inputs/0"][..., 1:], table), of["outputs/0"][..., 1:])
