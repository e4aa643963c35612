"""PEFT's own adapters on HELM and its twins: they act, merge, unmerge, save and load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helm_toys import MODELS, error, tokens, toy
from torch import Tensor, nn

from leafward import nn as hyperbolic
from leafward.nn import Space

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:Unmerge result can be inaccurate", "ignore:Converting a tensor")

EXACT = 1e-12
NAMES = ["qkv.linear", "compress.linear", "expand.linear", "out.linear", "up.linear", "down.linear"]
METHODS = {
    "LoRA": lambda targets: peft.LoraConfig(target_modules=targets, r=4, init_lora_weights=False),
    "DoRA": lambda targets: peft.LoraConfig(target_modules=targets, r=4, use_dora=True, init_lora_weights=False),
    "IA3": lambda targets: peft.IA3Config(
        target_modules=targets,
        feedforward_modules=["down.linear"] if "down.linear" in targets else [],
        init_ia3_weights=False,
    ),
    "OFT": lambda targets: peft.OFTConfig(target_modules=targets, oft_block_size=8, init_weights=False),
}
SPACES = {"HELM-D": {"curvature": 0.37}, "HELM-MiCE": {"expert_curvatures": (0.2, 5.0)}}


def stirred(adapted: Any) -> Any:
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return adapted.eval()


def cached(model: Any, x: Tensor) -> Tensor:
    """Logits by a cache, in parts of several tokens and of one."""
    logits, cache = [], None
    for part in (x[:, :5], x[:, 5:6], x[:, 6:9], x[:, 9:]):
        out = model(input_ids=part, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        logits.append(out.logits)
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("targets", ["all-linear", pytest.param(NAMES, id="names", marks=pytest.mark.full)])
@torch.no_grad()
def test_adapters_merge_exactly(name: str, method: str, targets: Any, tmp_path: Path) -> None:
    model, x = toy(name, **SPACES.get(name, {})), tokens(2, 12)
    before = model(x).logits
    adapted = stirred(peft.get_peft_model(model, METHODS[method](targets)))
    on = adapted(x).logits
    assert error(on, before) > 0.05, "the adapter acts"
    assert error(cached(adapted, x), on) < EXACT
    adapted.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(toy(name, **SPACES.get(name, {})), tmp_path).eval()
    # PEFT keeps its parameters in float32 where it loads them into a new model.
    assert error(loaded(x).logits, on) < 1e-5
    adapted.merge_adapter()
    assert error(adapted(x).logits, on) < EXACT
    adapted.unmerge_adapter()
    # PEFT divides by IA3's factors + 1e-8, and inverts OFT's rotations in float32, also on a plain model.
    assert error(adapted(x).logits, on) < (EXACT if method in ("LoRA", "DoRA") else 1e-5)
    merged = loaded.merge_and_unload()
    assert merged.state_dict().keys() == toy(name).state_dict().keys()
    assert error(merged(x).logits, on) < 1e-5


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("c", [0.4, 3.0])
@torch.no_grad()
def test_adapters_between_two_curvatures(method: str, c: float) -> None:
    """The rescaling to another hyperboloid is applied outside of what is wrapped."""
    torch.manual_seed(0)
    model = nn.Sequential(hyperbolic.Linear(16, 24, out_space=Space(c=c)), hyperbolic.Linear(24, 8, points=3)).double()
    for layer in model:
        nn.init.normal_(layer.time_weight)
    s = torch.randn(5, 16, dtype=torch.float64)
    before = model(s)
    adapted = stirred(peft.get_peft_model(model, METHODS[method](["linear"])))
    on = adapted(s)
    assert error(on, before) > 0.05
    adapted.merge_adapter()
    assert error(adapted(s), on) < EXACT


@pytest.mark.parametrize("name", ["HELM-MiCE", "HELM-MiCE twin"])
@torch.no_grad()
def test_experts_by_their_parameters(name: str) -> None:
    """The matrices of all experts of a layer are one parameter, which PEFT adapts by its name."""
    model, x = toy(name), tokens(2, 12)
    before = model(x).logits
    targets = ["ffn.routed.up.weight", "ffn.shared.down.weight"]
    adapted = stirred(peft.get_peft_model(model, peft.LoraConfig(target_parameters=targets, target_modules=[], r=2)))
    on = adapted(x).logits
    assert error(on, before) > 0.01
    adapted.merge_adapter()
    assert error(adapted(x).logits, on) < EXACT
    adapted.unmerge_adapter()
    assert error(adapted(x).logits, on) < EXACT


def test_an_adapter_of_the_head_is_trained_by_the_loss_in_chunks() -> None:
    model, x = toy("HELM-D"), tokens(2, 12)
    adapted = stirred(peft.get_peft_model(model, peft.LoraConfig(target_modules=["lm_head.linear"], r=4)))
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    assert len(trained) == 2
    logits = adapted(input_ids=x).logits[:, :-1].flatten(0, 1)
    wanted = torch.autograd.grad(nn.functional.cross_entropy(logits, x[:, 1:].flatten()), trained)
    found = torch.autograd.grad(adapted.train()(input_ids=x, labels=x).loss, trained)
    for one, other in zip(found, wanted, strict=True):
        assert error(one, other) < 1e-10
