"""Prompts inside a CLIP model against the same model run by hand."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from adapter_models import build
from torch import Tensor, nn

from leafward.adapters import attach
from leafward.errors import UsageError
from leafward.systems.lathadapter import LatentHierarchyConfig
from leafward.systems.lathadapter.prompts import Coop, Host, MaPLe, PromptKD, PromptSRC, TokenPrompts

TOKENS = 3


def classes() -> Tensor:
    """Begin, three words of a template, a name, end, padding: (4, 8)."""
    name = torch.arange(20, 24)[:, None]
    words, end, padding = (torch.tensor(x).expand(4, -1) for x in ([62, 7, 8, 9], [63], [1, 1]))
    return torch.cat([words, name, end, padding], dim=1)


def pixels(count: int = 6) -> Tensor:
    return torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(3))


def prompts(depth: int = 1, sides: str = "text") -> Any:
    model, _ = build("hf_clip")
    return TokenPrompts(model, classes(), TOKENS, depth, sides)  # pyright: ignore[reportArgumentType]


def test_text_prompts_begin_at_zero_shot_and_are_words() -> None:
    made = prompts()
    torch.testing.assert_close(made.text(classes()), made.frozen_text(classes()))
    torch.testing.assert_close(made.image(pixels()), made.frozen_image(pixels()))
    # Tokens that are the embeddings of other words do what those words do.
    other = classes()
    other[:, 1 : TOKENS + 1] = torch.tensor([30, 31, 32])
    with torch.no_grad():
        made.text_tokens[0] = made.model.text_model.embeddings.token_embedding.weight[[30, 31, 32]]
    torch.testing.assert_close(made.text(classes()), made.frozen_text(other))
    assert (made.text(classes()) - made.frozen_text(classes())).abs().max() > 1e-3


@pytest.mark.parametrize("sides", ["both", "coupled"])
def test_image_prompts_against_a_forward_pass_by_hand(sides: str) -> None:
    made = prompts(depth=2, sides=sides)
    with torch.no_grad():
        made.text_tokens.normal_(generator=torch.Generator().manual_seed(0))
    vision = made.model.vision_model
    states = vision.embeddings(pixels())
    patches = states.shape[1]
    for index, layer in enumerate(vision.encoder.layers):
        tokens = made.image_tokens[index] if sides == "both" else made.coupling[index](made.text_tokens[index])
        states = torch.cat([states[:, :patches], tokens.expand(6, -1, -1)], dim=1)
        states = vision.pre_layrnorm(states) if index == 0 else states
        # The hook would put the tokens in; run the layer on its own.
        states = layer.forward(states, None)
    expected = made.model.visual_projection(vision.post_layernorm(states[:, 0]))
    torch.testing.assert_close(made.image(pixels()), expected, rtol=1e-5, atol=1e-5)
    assert (expected - made.frozen_image(pixels())).abs().max() > 1e-4


def test_deep_text_prompts_replace_what_the_layers_made_of_them() -> None:
    made = prompts(depth=2)
    seen = []
    made.model.text_model.encoder.layers[1].register_forward_pre_hook(lambda layer, args: seen.append(args[0]))
    made.text(classes())
    torch.testing.assert_close(seen[0][:, 1 : TOKENS + 1], made.text_tokens[1].expand(4, -1, -1))


def test_only_the_prompts_are_trained() -> None:
    made = prompts(depth=2, sides="coupled")
    (made.text(classes()).sum() + made.image(pixels()).square().sum()).backward()
    for name, parameter in made.named_parameters():
        assert parameter.requires_grad, name
        assert parameter.grad is not None, name
    assert not any(p.requires_grad or p.grad is not None for p in made.model.parameters())
    assert set(made.state_dict()) == {name for name, _ in made.named_parameters()}  # without the model
    assert all(parameter.grad.abs().max() > 0 for parameter in made.coupling.parameters())


def test_a_deep_copy_has_prompts_of_its_own() -> None:
    made = prompts()
    twin = copy.deepcopy(made)
    with torch.no_grad():
        twin.text_tokens.mul_(-2.0)
    torch.testing.assert_close(made.text(classes()), made.frozen_text(classes()))
    assert (twin.text(classes()) - made.text(classes())).abs().max() > 1e-3


def test_prompts_share_a_model_and_leave_no_trace_on_it() -> None:
    made = prompts(2, "both")
    other = TokenPrompts(made.model, classes(), TOKENS)
    with torch.no_grad():
        other.text_tokens.mul_(-2.0)
    before = made.text(classes())
    assert (other.text(classes()) - before).abs().max() > 1e-3
    assert torch.equal(made.text(classes()), before)
    layers = [*made.model.text_model.encoder.layers, *made.model.vision_model.encoder.layers]
    assert not any(layer._forward_pre_hooks for layer in layers)
    made.double()
    assert made.model.dtype == torch.float64  # it goes along


def make(name: str) -> Host:
    torch.manual_seed(0)
    if name == "coop":
        return Coop(prompts(), classes())
    if name == "maple":
        return MaPLe(prompts(2, "coupled"), classes())
    if name == "promptsrc":
        return PromptSRC(prompts(2, "both"), classes())
    return PromptKD(prompts(2, "both"), torch.randn(4, 16), 16)


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("name", ["coop", "maple", "promptsrc", "promptkd"])
def test_hosts_learn_inside_the_encoders(name: str, adapted: bool) -> None:
    host = make(name)
    if adapted:
        attach(host, LatentHierarchyConfig(attributes=6, queue=8))
    labels = torch.tensor([0, 1, 2, 3, 0, 1])
    teacher = host.classes[labels].float() if name == "promptkd" else None
    host.prepare(30)
    optimizer = torch.optim.Adam([p for p in host.parameters() if p.requires_grad], lr=0.02)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        output = host(pixels(), labels, teacher=teacher)
        term = output.losses["distillation" if name == "promptkd" else "cross_entropy"]
        output.loss.backward()
        optimizer.step()
        losses.append(term.item())
    host.finish()
    assert min(losses[-5:]) < 0.9 * losses[0]
    assert host.eval()(pixels()).logits.shape == (6, 4)


def test_refusals() -> None:
    model, _ = build("hf_clip")
    for options, message in [
        ({"depth": 3}, r"depth must be in 1…2, the layers of the model, got 3"),
        ({"tokens": 4}, r"tokens must be from 1 to 3, the places before the class names .*, got 4"),
    ]:
        with pytest.raises(UsageError, match=message):
            TokenPrompts(model, classes(), **options)
    with pytest.raises(UsageError, match="need a Hugging Face CLIP model, not 'siglip'"):
        TokenPrompts(build("hf_siglip")[0], classes())
    with pytest.raises(UsageError, match="not 'Linear'"):
        TokenPrompts(nn.Linear(2, 2), classes())
