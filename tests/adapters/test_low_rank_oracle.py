"""Our low-rank updates against PEFT's: the same A, B, α and rank compute, learn and merge the same, in float64."""

from __future__ import annotations

import copy

import peft
import pytest
import torch
from radial_toys import KINDS, make

from leafward.adapters import adapters, from_pretrained, save_pretrained
from leafward.adapters.low_rank import LowRank
from leafward.encoders.encoder import Encoder, load_encoder, make_trainable, merge_adapters

TEXTS = ["a small dog", "", "animal", "a red car on the grass"]
RANK = 3
EXACT = {"rtol": 0.0, "atol": 1e-12}


@pytest.fixture(params=["clip", "sentence"])
def encoder(request, tmp_path) -> Encoder:
    return load_encoder(make(request.param, tmp_path)).double()  # pyright: ignore[reportReturnType]


def ours(encoder: Encoder) -> tuple[Encoder, LowRank]:
    """The encoder with our updates on it, neither factor zero."""
    mine = copy.deepcopy(encoder)
    make_trainable(mine, "lora", rank=RANK)
    mine.double()
    adapter = adapters(mine.model)["default"]
    assert isinstance(adapter, LowRank)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for factor in adapter.parameters():
            factor.copy_(0.3 * torch.randn(factor.shape, generator=generator, dtype=torch.float64))
    return mine, adapter


def theirs(encoder: Encoder, adapter: LowRank) -> Encoder:
    """The encoder with PEFT's updates on it, of the same factors."""
    other = copy.deepcopy(encoder)
    names = [site.caller for site in adapter.sites]
    config = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, lora_dropout=0.0, target_modules=names)
    other.model = peft.get_peft_model(other.model, config)
    with torch.no_grad():
        for site in adapter.sites:
            layer = other.model.get_submodule(f"base_model.model.{site.caller}")
            key = site.name.replace(".", "/")
            layer.lora_A["default"].weight.copy_(adapter.a[key])
            layer.lora_B["default"].weight.copy_(adapter.b[key])
    return other


def test_outputs_gradients_and_merged_weights_are_pefts(encoder):
    before = encoder.encode_text(TEXTS)
    mine, adapter = ours(encoder)
    other = theirs(encoder, adapter)
    outputs = [each.text_features(each.tokenize(TEXTS)) for each in (mine, other)]
    assert (outputs[0] - before).norm(dim=-1).min() > 1e-2
    torch.testing.assert_close(outputs[0], outputs[1], **EXACT)
    for each in outputs:
        each[:, 0].sum().backward()
    for site in adapter.sites:
        layer = other.model.get_submodule(f"base_model.model.{site.caller}")
        key = site.name.replace(".", "/")
        for factor, expected in ((adapter.a[key], layer.lora_A), (adapter.b[key], layer.lora_B)):
            assert factor.grad is not None
            assert factor.grad.abs().max() > 0
            torch.testing.assert_close(factor.grad, expected["default"].weight.grad, **EXACT)
    merge_adapters(mine)
    merged = other.model.merge_and_unload().state_dict()
    found = mine.model.state_dict()
    assert found.keys() == merged.keys()
    changed = 0
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, merged[name], **EXACT)
        changed += not torch.equal(tensor, encoder.model.state_dict()[name])
    assert changed == len(adapter.sites)
    torch.testing.assert_close(mine.encode_text(TEXTS), outputs[0].detach(), **EXACT)


def test_the_same_sites_learn_as_many_parameters(encoder):
    mine, adapter = ours(encoder)
    other = theirs(encoder, adapter)
    counts = [sum(p.numel() for p in each.parameters() if p.requires_grad) for each in (mine, other)]
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("kind", list(KINDS))
def test_low_rank_updates_are_drawn_by_their_seed_and_saved_as_an_adapter(kind, tmp_path):
    folder = make(kind, tmp_path / "base")
    first, again, other = (load_encoder(folder) for _ in range(3))
    torch.manual_seed(5)  # no draw is taken from the global generator
    for each, seed in ((first, 1), (again, 1), (other, 2)):
        make_trainable(each, "lora", rank=RANK, seed=seed)
    states = [dict(adapters(each.model)["default"].named_parameters()) for each in (first, again, other)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert any(not torch.equal(states[0][name], states[2][name]) for name in states[0])
    with torch.no_grad():
        for name, parameter in states[0].items():
            parameter.add_(0.1 if name.startswith("b.") else 0.0)
    save_pretrained(first.model, tmp_path / "adapter")
    fresh = load_encoder(folder)
    plain = fresh.encode_text(TEXTS)
    from_pretrained(fresh.model, tmp_path / "adapter")
    assert torch.equal(fresh.encode_text(TEXTS), first.encode_text(TEXTS))
    assert not torch.allclose(fresh.encode_text(TEXTS), plain, atol=1e-3)
