"""Every host against a forward pass and losses written from its paper, in float64, on the bare weights of a CLIP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from adapter_models import build
from torch import Tensor

from leafward.systems.lathadapter.prompts import Coop, MaPLe, PromptKD, PromptSRC, TokenPrompts

TOKENS, DEPTH, HEADS, SCALE = 3, 2, 2, 100.0
LABELS = torch.tensor([0, 1, 2, 3, 0, 1])


def classes() -> Tensor:
    """Begin, three words of a template, a name, end, padding: (4, 8)."""
    name = torch.arange(20, 24)[:, None]
    words, end, padding = (torch.tensor(x).expand(4, -1) for x in ([62, 7, 8, 9], [63], [1, 1]))
    return torch.cat([words, name, end, padding], dim=1)


def pixels() -> Tensor:
    return torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(3)).double()


def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight + bias


def layer(w: dict[str, Tensor], at: str, x: Tensor, causal: bool) -> Tensor:
    """One residual block of CLIP: multi-head attention and a QuickGELU MLP, each behind a layer norm."""

    def linear(name: str, y: Tensor) -> Tensor:
        return y @ w[f"{at}.{name}.weight"].T + w[f"{at}.{name}.bias"]

    y = norm(x, w[f"{at}.layer_norm1.weight"], w[f"{at}.layer_norm1.bias"])
    q, k, v = (linear(f"self_attn.{n}_proj", y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for n in "qkv")
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), float("-inf"))
    mixed = (scores.exp() / scores.exp().sum(-1, keepdim=True)) @ v
    x = x + linear("self_attn.out_proj", mixed.transpose(1, 2).flatten(2))
    y = linear("mlp.fc1", norm(x, w[f"{at}.layer_norm2.weight"], w[f"{at}.layer_norm2.bias"]))
    return x + linear("mlp.fc2", y / (1 + (-1.702 * y).exp()))


def text(w: dict[str, Tensor], numbers: Tensor, tokens: Tensor | None) -> Tensor:
    """tokens (J, n, d): those of layer 0 stand for words, those of later layers replace what came of them."""
    embedded = w["text_model.embeddings.token_embedding.weight"][numbers]
    if tokens is not None:
        embedded[:, 1 : TOKENS + 1] = tokens[0]
    x = embedded + w["text_model.embeddings.position_embedding.weight"][: numbers.shape[1]]
    for index in range(2):
        if tokens is not None and 0 < index < len(tokens):
            x = torch.cat([x[:, :1], tokens[index].expand(len(x), -1, -1), x[:, TOKENS + 1 :]], dim=1)
        x = layer(w, f"text_model.encoder.layers.{index}", x, causal=True)
    x = norm(x, w["text_model.final_layer_norm.weight"], w["text_model.final_layer_norm.bias"])
    return x[torch.arange(len(x)), (numbers == 63).int().argmax(1)] @ w["text_projection.weight"].T


def image(w: dict[str, Tensor], pictures: Tensor, tokens: Tensor | None) -> Tensor:
    """tokens (J, n, d): those of layer 0 follow the patches in front of the layer norm before the first layer."""
    at = "vision_model.embeddings"
    patches = torch.nn.functional.conv2d(pictures, w[f"{at}.patch_embedding.weight"], stride=8).flatten(2).mT
    x = torch.cat([w[f"{at}.class_embedding"].expand(len(patches), 1, -1), patches], dim=1)
    x = x + w[f"{at}.position_embedding.weight"]
    own = x.shape[1]
    if tokens is not None:
        x = torch.cat([x, tokens[0].expand(len(x), -1, -1)], dim=1)
    x = norm(x, w["vision_model.pre_layrnorm.weight"], w["vision_model.pre_layrnorm.bias"])
    for index in range(2):
        if tokens is not None and 0 < index < len(tokens):
            x = torch.cat([x[:, :own], tokens[index].expand(len(x), -1, -1)], dim=1)
        x = layer(w, f"vision_model.encoder.layers.{index}", x, causal=False)
    x = norm(x[:, 0], w["vision_model.post_layernorm.weight"], w["vision_model.post_layernorm.bias"])
    return x @ w["visual_projection.weight"].T


def unit(x: Tensor) -> Tensor:
    return x / x.square().sum(-1, keepdim=True).sqrt()


def entropy(logits: Tensor) -> Tensor:
    return -logits.log_softmax(-1)[torch.arange(len(logits)), LABELS[: len(logits)]].mean()


def divergence(logits: Tensor, target: Tensor) -> Tensor:
    p = target.softmax(-1)
    return (p * (target.log_softmax(-1) - logits.log_softmax(-1))).sum() / logits.numel()


def made(sides: Any, depth: int = DEPTH) -> tuple[TokenPrompts, dict[str, Tensor]]:
    """Prompts that have learned something, and the weights they act in; every norm has weights of its own."""
    model, _ = build("hf_clip")
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    prompts = TokenPrompts(model, classes(), TOKENS, depth, sides).double()
    with torch.no_grad():
        for parameter in prompts.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return prompts, {name: value.detach() for name, value in prompts.model.named_parameters()}


def agree(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_coop() -> None:
    prompts, w = made("text", depth=1)
    output = Coop(prompts, classes(), SCALE)(pixels(), LABELS)
    logits = SCALE * unit(image(w, pixels(), None)) @ unit(text(w, classes(), prompts.text_tokens)).T
    agree(output.logits, logits)
    agree(output.loss, entropy(logits))


def test_maple() -> None:
    prompts, w = made("coupled")
    assert prompts.coupling is not None
    visual = torch.stack([prompts.text_tokens[j] @ f.weight.T + f.bias for j, f in enumerate(prompts.coupling)])  # pyright: ignore
    output = MaPLe(prompts, classes(), SCALE)(pixels(), LABELS)
    logits = SCALE * unit(image(w, pixels(), visual)) @ unit(text(w, classes(), prompts.text_tokens)).T
    agree(output.logits, logits)
    agree(output.loss, entropy(logits))


def test_promptsrc_with_several_templates() -> None:
    prompts, w = made("both")
    other = classes()
    other[:, 1:4] = torch.tensor([30, 31, 32])
    mean = (text(w, classes(), None) + text(w, other, None)) / 2
    output = PromptSRC(prompts, classes(), SCALE, diverse=mean)(pixels(), LABELS)
    z, t = unit(image(w, pixels(), prompts.image_tokens)), unit(text(w, classes(), prompts.text_tokens))
    frozen, anchor = unit(image(w, pixels(), None)), unit(mean)
    logits = SCALE * z @ t.T
    agree(output.logits, logits)
    agree(output.losses["text_drift"], 25 * (t - anchor).abs().mean())
    agree(output.losses["image_drift"], 10 * (z - frozen).abs().mean())
    agree(output.losses["logit_drift"], divergence(logits, SCALE * frozen @ anchor.T))
    agree(output.losses["cross_entropy"], entropy(logits))
    # With one template alone the drift is another.
    plain = PromptSRC(prompts, classes(), SCALE)(pixels(), LABELS)
    assert (plain.losses["text_drift"] - output.losses["text_drift"]).abs() > 1e-3


def test_promptkd() -> None:
    prompts, w = made("both")
    generator = torch.Generator().manual_seed(6)
    texts = torch.randn(4, 20, generator=generator).double()
    teacher = torch.randn(6, 20, generator=generator).double()
    host = PromptKD(prompts, texts, 16, SCALE).double()
    p = host.projector
    z = unit(image(w, pixels(), prompts.image_tokens))
    first, _, last = p.inner
    hidden = (z @ first.weight.T + first.bias).clamp_min(0)  # pyright: ignore
    z = unit(z @ p.skip.weight.T + hidden @ last.weight.T + last.bias)  # pyright: ignore
    logits, wanted = SCALE * z @ unit(texts).T, SCALE * unit(teacher) @ unit(texts).T
    output = host(pixels(), teacher=teacher)
    agree(output.logits, logits)
    agree(output.loss, 1000 * divergence(logits, wanted))
    # Images behind those of the teacher are not distilled.
    agree(host(pixels(), teacher=teacher[:4]).loss, 1000 * divergence(logits[:4], wanted[:4]))


@pytest.mark.parametrize("sides", ["both", "coupled"])
def test_the_depth_is_that_of_every_host(sides: str) -> None:
    prompts, _ = made(sides, depth=2)
    assert len(prompts.text_tokens) == 2
    assert len(prompts.coupling if sides == "coupled" else prompts.image_tokens) == 2  # pyright: ignore
