"""What each token sees: from the arguments that Hugging Face models take to the rule that the layers share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.masking_utils import (
    create_causal_mask,
    create_sliding_window_causal_mask,
    find_packed_sequence_indices,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from leafward.errors import UsageError
from leafward.geometry.scalars import wide
from leafward.nn import Visible, visible
from leafward.nn.attention import PointStore
from leafward.nn.lanes import Backend, masked
from leafward.systems.helm.model_config import HelmConfig

OWN = "sdpa"
"""transformers' name for the products of PyTorch, which `leafward.nn` chooses itself."""


def packed(position_ids: Tensor | None, mask: Tensor | None, cache: Cache | None, rows: int) -> Tensor | None:
    """Ids of documents (B,T) where positions (B or 1, T) start again within a row, as data collators without padding
    leave them; None where they do not, or where a mask or a cache says what is seen."""
    if position_ids is None or mask is not None or cache is not None or position_ids.ndim != 2:
        return None
    return find_packed_sequence_indices(position_ids.expand(rows, -1))


def rule_of(
    config: HelmConfig,
    x: Tensor,
    mask: Tensor | None,
    documents: Tensor | None,
    cache: Cache | None,
    places: Tensor,
    more: dict[str, Any],
) -> Visible:
    """What the tokens x (B,T,n) at `places` (T,) see. `mask`: (B,S), 1 for tokens, or one for all pairs (B,·,T,S);
    `documents` (B,T): ids of packed sequences; `more`: what else an attention function may be told."""
    _check(x, mask, documents, cache, more)
    own = config._attn_implementation in (None, OWN)
    if mask is not None and mask.ndim == 4 and (own or "cache" in more):
        return Visible(given=mask if mask.is_floating_point() else mask.bool())
    if not own:
        return Visible(backend=_backend(config, x, mask, documents, cache, more))
    return _by_rule(config, x, mask, documents, cache, places)


def paged_store(more: dict[str, Any], config: HelmConfig, layer: int) -> PointStore | None:
    """The cache of transformers' continuous batching, which comes as one of the arguments of attention."""
    cache = more.get("cache")
    if cache is None:
        return None
    assert config.head_dim is not None

    def update(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return cache.update(keys, values, layer, dict(more))  # it writes into the mapping

    return PointStore(update, config.head_dim)


def eager_attention(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float = 1.0, **_: object
) -> tuple[Tensor, Tensor]:
    """Attention as it is written, with its weights (B,H,T,S): for reading and hooks, not for long texts."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = wide(q @ k.mT) * scaling
    weights = (scores if mask is None else masked(scores, mask)).softmax(dim=-1)
    return (weights.to(v.dtype) @ v).transpose(1, 2), weights


def _backend(
    config: HelmConfig,
    x: Tensor,
    mask: Tensor | None,
    documents: Tensor | None,
    cache: Cache | None,
    more: dict[str, Any],
) -> Backend:
    """The attention function that transformers has under the name the model is set to, with its mask."""
    make = create_causal_mask if config.sliding_window is None else create_sliding_window_causal_mask
    positions = None if documents is None else _positions(documents)
    mask = make(
        config=config,
        inputs_embeds=x,
        attention_mask=None if documents is not None else mask,
        past_key_values=cache,
        position_ids=positions,
    )
    name = config._attn_implementation or OWN
    function: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention)

    def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return function(module, q, k, v, mask, scaling=1.0, dropout=0.0, **more)[0].transpose(1, 2)

    return attend


def _positions(documents: Tensor) -> Tensor:
    """Positions (B,T) that start again with each document."""
    at = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    fresh = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    return at - torch.where(fresh, at, 0).cummax(dim=1).values


def _by_rule(
    config: HelmConfig, x: Tensor, mask: Tensor | None, documents: Tensor | None, cache: Cache | None, places: Tensor
) -> Visible:
    if documents is not None and mask is not None:
        documents = torch.where(mask.bool(), documents, -1)
    elif mask is not None:
        documents = mask.long() - 1  # padding is a document of its own
    window = config.sliding_window
    if cache is not None and (documents is not None or window is not None):
        # The keys of a cache need not begin with the first token (a sliding one drops what no query sees any more)
        # nor end with the last.
        keys, first = cache.get_mask_sizes(x.shape[1], 0)
        places = places - first
        if documents is not None:
            documents = documents[:, first : first + keys]
            documents = F.pad(documents, (0, keys - documents.shape[1]), value=-1)
    return visible(
        window=window,
        documents=documents,
        length=x.shape[1] if cache is None else None,  # a block mask pays where the shape comes again and again
        device=x.device,
        positions=places if _fixed(cache) else None,
    )


def _fixed(cache: Cache | None) -> bool:
    """Whether it is of fixed size, with room to spare."""
    return cache is not None and cache.is_compileable


def _check(x: Tensor, mask: Tensor | None, documents: Tensor | None, cache: Cache | None, more: dict[str, Any]) -> None:
    if documents is not None:
        if cache is not None:
            raise UsageError("documents are for training; they do not go with a cache")
        _need_shape("documents", documents, tuple(x.shape[:2]))
    if mask is None or "cache" in more:
        return
    tokens = x.shape[1]
    if mask.ndim == 4:
        if documents is not None:
            raise UsageError("documents do not go with an attention_mask (batch, heads, queries, keys), which says all")
        keys = tokens if cache is None else cache.get_mask_sizes(tokens, 0)[0]
        if mask.shape[0] not in (1, len(x)) or tuple(mask.shape[2:]) != (tokens, keys):
            wanted = f"({len(x)}, heads or 1, {tokens}, {keys})"
            raise UsageError(f"attention_mask must have shape {wanted}, got {tuple(mask.shape)}")
    elif not _fixed(cache):
        past = 0 if cache is None else cache.get_seq_length()
        _need_shape("attention_mask", mask, (len(x), past + tokens))


def _need_shape(name: str, given: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(given.shape) != shape:
        raise UsageError(f"{name} must have shape (batch, tokens) = {shape}, got {tuple(given.shape)}")
