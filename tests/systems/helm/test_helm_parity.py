"""HELM-D gives the authors' logits and gradients, in float64."""

import pytest
import torch
from torch import Tensor

from leafward.nn import Linear
from leafward.systems.helm import HelmConfig, HelmForCausalLM

TOLERANCE = 1e-6  # for values; the reference is float32, and its gradients carry that through the whole depth
HEADS, WIDTH, HIDDEN = 4, 67, 271


def full(layer: Linear) -> Tensor:
    """The matrix over full points [t; s] of a linear map, from its gradients if there are any."""
    space, time = (p if p.grad is None else p.grad for p in (layer.weight, layer.time_weight))
    return torch.cat([time.unsqueeze(-1), space.unflatten(1, (layer.points, -1))], dim=-1).flatten(1).detach()


def fill(layer: Linear, weight: Tensor, bias: Tensor) -> None:
    points = weight.unflatten(1, (layer.points, -1))
    layer.weight.data = points[..., 1:].flatten(1).clone()
    layer.time_weight.data = points[..., 0].clone()
    layer.bias.data = bias.clone()


def linears(model: HelmForCausalLM) -> dict[Linear, list[str]]:
    """Each of our matrices, and theirs that it stacks."""
    found = {model.model.project: ["final_proj.linear"]}
    for i, block in enumerate(model.model.layers):
        found[block.attention.qkv] = [f"resblocks.{i}.attn.{kind}" for kind in ("Wq", "Wk", "Wv")]
        found[block.attention.out] = [f"resblocks.{i}.attn.final_linear"]
        found[block.ffn.up] = [f"resblocks.{i}.mlp.{kind}.linear" for kind in ("w1", "w3")]
        found[block.ffn.down] = [f"resblocks.{i}.mlp.w2.linear"]
    return found


@pytest.fixture
def models(model_oracle):
    of = model_oracle("helm_d")
    config = HelmConfig(
        vocab_size=97,
        hidden_size=WIDTH,
        num_hidden_layers=3,
        num_attention_heads=HEADS,
        head_dim=16,
        intermediate_size=HIDDEN,
        rms_norm_eps=1e-8,
    )
    model = HelmForCausalLM(config).double()
    for layer, names in linears(model).items():
        fill(layer, *(torch.cat([of[f"state/{name}.{part}"] for name in names]) for part in ("weight", "bias")))
    for i, block in enumerate(model.model.layers):
        block.attention.log_scale.data = (2.0 / of[f"state/resblocks.{i}.attn.scale"]).log()
        block.attention_norm.weight.data = of[f"state/resblocks.{i}.ln_1.weight"]
        block.ffn_norm.weight.data = of[f"state/resblocks.{i}.ln_2.weight"]
        block.attention_residual.log_weight.data = of[f"state/resblocks.{i}.res1.w_y"].log().reshape(1)
        block.ffn_residual.log_weight.data = of[f"state/resblocks.{i}.res2.w_y"].log().reshape(1)
    model.model.norm.weight.data = of["state/ln_final.weight"]
    model.model.embed.weight.data = of["state/token_embed.embedding"][:, 1:].clone()
    model.lm_head.linear.weight.data = of["state/mapping.weight"][:, 1:].clone()
    model.lm_head.time_weight.data = of["state/mapping.weight"][:, :1].clone()
    return model.eval(), of


def error(ours: Tensor, theirs: Tensor) -> float:
    return ((ours - theirs).norm() / theirs.norm()).item()


def test_logits(models):
    model, of = models
    assert error(model(of["inputs/0"]).logits, of["outputs/0"]) < TOLERANCE


def test_gradients(models):
    model, of = models
    tokens = of["inputs/0"]
    targets = tokens.roll(-1, dims=1)  # as the reference was run: the last token's target is the first token
    loss = model.lm_head.loss(model.model(tokens).last_hidden_state, targets)
    loss.backward()
    assert abs(loss.item() / of["outputs/1"].item() - 1.0) < TOLERANCE

    pairs = {}
    for layer, names in linears(model).items():
        for part, ours in (("weight", full(layer)), ("bias", layer.bias.grad)):
            pairs[names[0], part] = ours, torch.cat([of[f"grads/{name}.{part}"] for name in names])
    for i, block in enumerate(model.model.layers):
        tau = of[f"state/resblocks.{i}.attn.scale"]  # our parameter is log(2/τ)
        pairs[i, "scale"] = block.attention.log_scale.grad, -tau * of[f"grads/resblocks.{i}.attn.scale"]
        for name, norm in (("ln_1", block.attention_norm), ("ln_2", block.ffn_norm)):
            pairs[i, name] = norm.weight.grad, of[f"grads/resblocks.{i}.{name}.weight"]
        for name, residual in (("res1", block.attention_residual), ("res2", block.ffn_residual)):
            weight = of[f"state/resblocks.{i}.{name}.w_y"]  # our parameter is its logarithm
            pairs[i, name] = residual.log_weight.grad, weight * of[f"grads/resblocks.{i}.{name}.w_y"].reshape(1)
    pairs["norm", "final"] = model.model.norm.weight.grad, of["grads/ln_final.weight"]
    head = torch.cat([model.lm_head.time_weight.grad, model.lm_head.linear.weight.grad], dim=-1)
    pairs["head", "weight"] = head, of["grads/mapping.weight"]
    # Their parameter is a full point; ours its space part, through which the time is t(s) with slope s/t.
    point, slope = of["state/token_embed.embedding"], of["grads/token_embed.embedding"]
    embedding = slope[:, 1:] + slope[:, :1] * point[:, 1:] / point[:, :1]
    pairs["embedding", "weight"] = model.model.embed.weight.grad, embedding

    assert len(pairs) == 2 * len(linears(model)) + 5 * 3 + 3
    worst = {key: error(*pair) for key, pair in pairs.items()}
    # The reference's own gradients are float32 through three layers: single scalars (τ) show it most.
    assert max(worst.values()) < 1e-5, max(worst, key=lambda key: worst[key])
    whole = [torch.cat([pair[side].flatten() for pair in pairs.values()]) for side in (0, 1)]
    assert error(*whole) < TOLERANCE
