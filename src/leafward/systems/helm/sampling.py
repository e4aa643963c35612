"""Text that a model goes on with."""

from __future__ import annotations

import math
from typing import Any

import torch

from leafward.data.text.tokenizer import encode
from leafward.errors import UsageError
from leafward.systems.helm import HelmForCausalLM


def sample(
    model: HelmForCausalLM,
    tokenizer: Any,
    prompt: str = "",
    *,
    tokens: int | None = None,
    temperature: float = 0.8,
    top_p: float = 1.0,
    seed: int = 0,
) -> str:
    """Up to `tokens` tokens after `prompt`, up to the end of a document; temperature 0 takes the likeliest each time.

    Prompt and continuation together must fit into the context that the model was trained for; without a number they do,
    and are at most 100.
    """
    if tokens is not None and tokens < 1:
        raise UsageError(f"tokens must be at least 1, not {tokens}")
    if not (math.isfinite(temperature) and temperature >= 0.0):
        raise UsageError(f"temperature must be a number >= 0, not {temperature}")
    if not 0.0 < top_p <= 1.0:
        raise UsageError(f"top_p must be in (0, 1], not {top_p}")
    begin = [tokenizer.bos_token_id, *encode(tokenizer, [prompt])[0]]
    context = model.config.max_position_embeddings
    tokens = max(1, min(100, context - len(begin))) if tokens is None else tokens
    if len(begin) + tokens > context:
        raise UsageError(
            f"the prompt has {len(begin)} tokens (with the one that begins a document) and {tokens} more are asked "
            f"for, but the model's context is {context}; shorten one of them"
        )
    device = next(model.parameters()).device
    choice = {"do_sample": True, "temperature": temperature, "top_p": top_p} if temperature else {"do_sample": False}
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
        torch.manual_seed(seed)
        found = model.generate(  # pyright: ignore[reportAttributeAccessIssue]
            torch.tensor([begin], device=device),
            attention_mask=torch.ones(1, len(begin), dtype=torch.long, device=device),
            max_new_tokens=tokens,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.eos_token_id,
            **choice,
        )
    return tokenizer.decode(found[0, len(begin) :], skip_special_tokens=True)
