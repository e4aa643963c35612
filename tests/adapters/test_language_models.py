"""Our adapters on causal language models: Hugging Face's and HELM. They act, merge exactly, save and load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from leafward.adapters import (
    BlockScaleConfig,
    LowRankConfig,
    adapters,
    attach,
    from_pretrained,
    merge,
    save_pretrained,
    trainable_parameters,
)
from leafward.adapters.layouts import find_sites
from leafward.errors import UsageError
from leafward.systems.helm import HelmConfig, HelmForCausalLM

WIDTH, LAYERS, TOKENS = 32, 2, 64
_SHAPE = {
    "vocab_size": TOKENS,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
_GROUPED = {**_SHAPE, "num_key_value_heads": 2}


def helm(preset: str, geometry: str, **changes: Any) -> HelmForCausalLM:
    return HelmForCausalLM(HelmConfig.preset(preset, **{**_SHAPE, "geometry": geometry, **changes}))


MODELS = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**_GROUPED)),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**_GROUPED)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**_GROUPED, head_dim=8)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=TOKENS, n_embd=WIDTH, n_layer=LAYERS, n_head=4, n_positions=32)
    ),
    "helm-d": lambda: helm("helm-d-tiny", "lorentz", num_key_value_heads=2),
    "helm-d twin": lambda: helm("helm-d-tiny", "euclidean"),
    "helm-mice": lambda: helm("helm-mice-tiny", "lorentz", query_latent=16),
    "helm-mice twin": lambda: helm("helm-mice-tiny", "euclidean"),
}
ALL = ("q", "k", "v", "out", "fc1", "fc2")
LATENT = ("q", "kv", "out", "fc1", "fc2")


def build(name: str) -> Any:
    torch.manual_seed(0)
    return MODELS[name]().double().eval()


def roles(name: str) -> Any:
    return LATENT if "mice" in name else ALL


CONFIGS = {
    "low_rank": lambda name: LowRankConfig(rank=3, targets=roles(name)),
    "block_scale": lambda name: BlockScaleConfig(block_size=8, targets=roles(name)),
}


@pytest.mark.parametrize("method", CONFIGS)
@pytest.mark.parametrize("name", MODELS)
def test_adapters_act_and_merge_exactly(name: str, method: str, tmp_path: Path) -> None:
    model, x = build(name), torch.randint(TOKENS, (2, 9), generator=torch.Generator().manual_seed(1))
    before, keys = model(x).logits, model.state_dict().keys()
    attach(model, CONFIGS[method](name))
    torch.testing.assert_close(model(x).logits, before, rtol=1e-12, atol=1e-12)  # begins as no change
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn_like(parameter))
    on = model(x).logits
    assert (on - before).norm() > 0.01 * before.norm()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    grads = torch.autograd.grad(model(input_ids=x, labels=x).loss, trained)
    assert all(grad.abs().max() > 0 for grad in grads), "every part of the adapter is used"
    assert sum(grad.numel() for grad in grads) == trainable_parameters(model)[0]
    save_pretrained(model, tmp_path / "adapter")
    loaded = from_pretrained(build(name), tmp_path / "adapter")
    assert adapters(loaded).keys() == {"default"}
    torch.testing.assert_close(loaded(x).logits, on, rtol=1e-12, atol=1e-12)
    merge(model)
    assert model.state_dict().keys() == keys
    torch.testing.assert_close(model(x).logits, on, rtol=1e-12, atol=1e-12)


def test_projections_of_grouped_queries_have_their_own_rows() -> None:
    sites = {site.role: site for site in find_sites(build("helm-d"), ("q", "k", "v")) if ".0." in site.name}
    assert {role: (site.start, site.stop) for role, site in sites.items()} == {
        "q": (0, 32),
        "k": (32, 48),
        "v": (48, 64),
    }


def test_a_change_of_one_projection_is_a_change_of_its_rows_alone() -> None:
    """GPT-2 keeps its matrices the other way, and its three projections in one."""
    model = build("gpt2")
    before = model.transformer.h[1].attn.c_attn.weight.detach().clone()
    attach(model, LowRankConfig(rank=2, targets=("k",)))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, generator=torch.Generator().manual_seed(len(name)))
    merge(model)
    moved = (model.transformer.h[1].attn.c_attn.weight - before).abs().amax(dim=0) > 0
    assert moved.nonzero().flatten().tolist() == list(range(WIDTH, 2 * WIDTH))


def test_what_a_model_has_not_is_named() -> None:
    with pytest.raises(UsageError, match=r"HelmForCausalLM has no projection 'k'; it has fc1, fc2, kv, out, q"):
        attach(build("helm-mice"), LowRankConfig(rank=2))


def test_an_adapter_of_another_base_is_refused(tmp_path: Path) -> None:
    save_pretrained(attach(build("helm-d"), LowRankConfig(rank=2)), tmp_path)
    other = build("helm-d")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    with pytest.raises(UsageError, match="belongs to another base model: the middle of its lm_head"):
        from_pretrained(other, tmp_path)
