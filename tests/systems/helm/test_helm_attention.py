"""HELM's attention by transformers' attention functions, masks of all pairs, packed documents by positions alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helm_toys import MODELS, error, tokens, toy
from torch import Tensor, nn
from transformers import AttentionInterface, ContinuousBatchingConfig, DataCollatorWithFlattening, GenerationConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from leafward.errors import UsageError
from leafward.systems.helm import HelmConfig, HelmForCausalLM

EXACT = 1e-13
SHAPES: dict[str, dict[str, Any]] = {
    "HELM-D": {"num_key_value_heads": 2},
    "HELM-D twin": {"sliding_window": 4},
    "HELM-MiCE": {},
    "HELM-MiCE twin": {},
}
every = pytest.mark.parametrize("name", MODELS)


def model_of(name: str) -> HelmForCausalLM:
    return toy(name, **SHAPES[name])


def causal(tokens: int, window: int | None) -> Tensor:
    at = torch.arange(tokens)
    near = at[:, None] - at < (window or tokens)
    return (at[:, None] >= at) & near


@pytest.fixture
def counted() -> Any:
    """transformers' own function for PyTorch's products, under a name of ours, and the layers that called it."""
    calls: list[int] = []

    def attention(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        calls.append(module.layer_idx)
        return sdpa_attention_forward(module, *args, **kwargs)

    AttentionInterface.register("counted", attention)
    AttentionMaskInterface.register("counted", sdpa_mask)
    yield calls
    AttentionInterface._global_mapping.pop("counted")
    AttentionMaskInterface._global_mapping.pop("counted")


@every
@torch.no_grad()
def test_attention_functions_act_and_give_the_same(name: str, counted: list[int]) -> None:
    model, x = model_of(name), tokens(2, 11)
    mask = torch.ones_like(x)
    mask[0, :3] = 0
    documents = torch.tensor([[0] * 4 + [1] * 7, [0] * 9 + [1] * 2])
    given: list[dict[str, Any]] = [{}, {"attention_mask": mask}, {"documents": documents}]
    own = [model(x, **each).logits for each in given]
    for implementation in ("eager", "counted"):
        model.set_attn_implementation(implementation)
        for each, wanted in zip(given, own, strict=True):
            found = model(x, **each).logits
            seen = each.get("attention_mask", torch.ones_like(x)).bool()
            assert error(found[seen], wanted[seen]) < EXACT
    assert counted == [0, 1] * 3
    model.set_attn_implementation("counted")
    cache, parts = None, []
    for part in (x[:, :6], x[:, 6:7], x[:, 7:]):
        out = model(part, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        parts.append(out.logits)
    assert error(torch.cat(parts, dim=1), own[0]) < EXACT


def test_functions_without_a_way_to_carry_times_are_refused() -> None:
    model = toy("HELM-D")
    for implementation in ("flash_attention_2", "flex_attention", "no_such_attention"):
        with pytest.raises((ValueError, ImportError), match=r"attn_implementation|not support"):
            model.set_attn_implementation(implementation)
    assert model.config._attn_implementation == "sdpa"


@every
@torch.no_grad()
def test_masks_of_all_pairs(name: str) -> None:
    """True for what is seen, or numbers that are added to the scores; with and without a cache."""
    model, x = model_of(name), tokens(2, 9)
    seen = causal(9, model.config.sliding_window)
    added = torch.zeros(9, 9, dtype=torch.float64).masked_fill(~seen, torch.finfo(torch.float64).min)
    wanted = model(x).logits
    for mask in (seen, seen.long(), added):
        assert error(model(x, attention_mask=mask.expand(2, 1, 9, 9)).logits, wanted) < EXACT
        heads = mask.expand(1, model.config.num_attention_heads, 9, 9)
        assert error(model(x, attention_mask=heads, use_cache=False).logits, wanted) < EXACT
        if model.config.sliding_window is not None:
            continue
        out = model(x[:, :6], attention_mask=mask[None, None, :6, :6], use_cache=True)
        cache, parts = out.past_key_values, [out.logits]
        for first, last in ((6, 8), (8, 9)):
            part = mask[None, None, first:last, :last]
            parts.append(model(x[:, first:last], attention_mask=part, past_key_values=cache).logits)
        assert error(torch.cat(parts, dim=1), wanted) < EXACT
    hidden = seen & ~((torch.arange(9)[:, None] == 8) & (torch.arange(9) == 0))  # the last does not see the first
    found = model(x, attention_mask=hidden[None, None]).logits
    assert error(found[:, :8], wanted[:, :8]) < EXACT
    if model.config.sliding_window is None:
        assert error(found[:, 8], wanted[:, 8]) > 1e-6


@every
@pytest.mark.parametrize("training", [False, True])
@torch.no_grad()
def test_documents_by_positions_alone(name: str, training: bool) -> None:
    """As the collator without padding packs them; the second document saw the first."""
    model = model_of(name).train(training)
    model.requires_grad_(requires_grad=False)
    features = [{"input_ids": tokens(length, seed=length).tolist()} for length in (7, 1, 5)]
    batch = DataCollatorWithFlattening()(features)
    assert set(batch) >= {"input_ids", "labels", "position_ids"}
    packed = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
    alone = [model(input_ids=torch.tensor([each["input_ids"]])).logits for each in features]
    assert error(packed, torch.cat(alone, dim=1)) < EXACT


@pytest.mark.parametrize("shape", [(2, 9), (2, 1, 9, 5), (3, 1, 9, 9), (2, 9, 9), (2, 1, 5, 9)])
def test_masks_of_a_wrong_shape(shape: tuple[int, ...]) -> None:
    x = tokens(2, 9 if shape != (2, 9) else 8)
    with pytest.raises(UsageError, match=r"attention_mask must have shape .*, got \("):
        toy("HELM-D")(x, attention_mask=torch.ones(shape, dtype=torch.bool))


def test_settings_go_by_the_names_that_other_tools_know() -> None:
    config = toy("HELM-MiCE").config
    assert (config.num_experts_per_tok, config.n_shared_experts, config.moe_intermediate_size) == (2, 1, 24)
    assert (config.kv_lora_rank, config.q_lora_rank, config.qk_rope_head_dim) == (24, 24, 8)
    assert config.head_dim == 16 + 8
    assert HelmConfig(hidden_size=48, num_attention_heads=4).head_dim == 12
    given = HelmConfig(num_experts=4, num_experts_per_tok=3, moe_intermediate_size=32)
    assert (given.num_active_experts, given.expert_size) == (3, 32)
    assert HelmConfig(**given.to_dict()).to_dict() == given.to_dict()
    with pytest.raises(UsageError, match="num_active_experts"):
        HelmConfig(num_experts=2, num_experts_per_tok=3)


@pytest.mark.parametrize(
    "name", [*list(MODELS)[::2], *(pytest.param(name, marks=pytest.mark.full) for name in list(MODELS)[1::2])]
)
def test_continuous_batching(name: str) -> None:
    """transformers' scheduler of many requests gives what `generate` gives one by one."""
    model = model_of(name)
    prompts = [tokens(length, seed=length).tolist() for length in (3, 9, 1, 6)]
    settings = GenerationConfig(max_new_tokens=5, do_sample=False, eos_token_id=-1, pad_token_id=0)
    small = ContinuousBatchingConfig(num_blocks=32, max_batch_tokens=16, page_size=4)
    found = model.generate_batch(prompts, generation_config=settings, continuous_batching_config=small, warmup=False)
    texts = [result.generated_tokens for result in sorted(found.values(), key=lambda result: result.request_id)]
    for prompt in prompts:
        alone = model.generate(torch.tensor([prompt]), generation_config=settings)[0, len(prompt) :].tolist()
        assert alone in texts
