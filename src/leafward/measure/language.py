"""Bits per byte of any causal language model on a text, in windows of its context."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from leafward.data.text import find_files, read_documents
from leafward.errors import DataError, LeafwardError, UsageError, require
from leafward.stats.intervals import around

MOST_CONTEXT = 2048
BATCH_TOKENS = 8192


@dataclass(frozen=True)
class BitsPerByte:
    """Bits per byte with its 95 % interval over windows, nats per token, and how much text that was."""

    value: float
    interval: tuple[float, float] | None
    nats_per_token: float
    tokens: int
    bytes: int


@dataclass(frozen=True, eq=False)
class LanguageModel:
    """A causal language model and its tokenizer; `width` is that of its hidden states."""

    name: str
    model: Any
    tokenizer: Any
    width: int
    depth: int | None
    params: int
    context: int


def load_language_model(folder: Path, name: str, device: str | torch.device = "cpu") -> LanguageModel:
    """Open the causal language model of a Hugging Face folder; code that it brings is never run."""
    transformers = require("transformers", "lm")
    from leafward.measure.matrix_hub import tokenizer_length

    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, use_safetensors=True, trust_remote_code=False
        )
    except (ValueError, KeyError, OSError, ImportError) as error:
        raise DataError(f"{name}: no causal language model in {folder} ({_first_line(error)})") from error
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (ValueError, KeyError, OSError, ImportError) as error:
        raise DataError(f"{name}: no tokenizer in {folder} ({_first_line(error)})") from error
    if not getattr(tokenizer, "is_fast", False) or tokenizer_length(folder) is None:
        raise UsageError(f"{name}: its tokenizer must be a fast one (tokenizer.json), which says where each token lies")
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None) or MOST_CONTEXT
    return LanguageModel(
        name=name,
        model=model.eval().to(device),
        tokenizer=tokenizer,
        width=int(text.hidden_size),
        depth=getattr(text, "num_hidden_layers", None),
        params=sum(each.numel() for each in model.parameters()),
        context=min(int(positions), MOST_CONTEXT),
    )


@torch.no_grad()
def bits_per_byte(
    language: LanguageModel, corpus: Path, field: str = "text", advance: Callable[[int], None] = lambda tokens: None
) -> BitsPerByte:
    """−Σ log₂ p(token | those before it in its window) over the bytes that the tokens stand for.

    Windows follow one another with one token in common, so every token but a document's first is predicted once; the
    bytes of that first token do not count either. The interval is over windows (a ratio of two sums), by Student's t.
    """
    nats, sizes, tokens = [], [], 0
    device = next(language.model.parameters()).device
    for batch in _batches(windows(language, corpus, field)):
        longest = max(len(ids) for ids, _ in batch)
        ids = torch.zeros(len(batch), longest, dtype=torch.long)
        for row, (own, _) in zip(ids, batch, strict=True):
            row[: len(own)] = own
        ids = ids.to(device)
        logits = language.model(ids, use_cache=False).logits[:, :-1].float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        # Padding stands behind the window, where a causal model's predictions inside it cannot see it.
        for row, (own, size) in zip(loss.view(len(batch), -1).double().cpu(), batch, strict=True):
            nats.append(float(row[: len(own) - 1].sum()))
            sizes.append(size)
            tokens += len(own) - 1
            advance(len(own) - 1)
    if not tokens or not sum(sizes):
        raise DataError(f"{corpus} holds fewer than two tokens of {language.name}: nothing can be predicted")
    if not all(map(math.isfinite, nats)):
        raise LeafwardError(f"{language.name} predicts what is not finite on {corpus}")
    bits, size = np.array(nats) / math.log(2), np.array(sizes, dtype=np.float64)
    value = float(bits.sum() / size.sum())
    interval = None
    if len(bits) > 1:
        scatter = bits - value * size
        interval = around(value, float(scatter.std(ddof=1) * len(bits) ** 0.5 / size.sum()), len(bits))
    return BitsPerByte(value, interval, float(sum(nats) / tokens), tokens, int(size.sum()))


def windows(language: LanguageModel, corpus: Path, field: str = "text") -> Iterator[tuple[torch.Tensor, int]]:
    """Token ids (k,) of each window of a corpus, and the bytes of all its tokens but the first."""
    for text in read_documents(find_files(corpus), field):
        coded = language.tokenizer(text, return_offsets_mapping=True, add_special_tokens=False, verbose=False)
        ids, ends = coded["input_ids"], [end for _, end in coded["offset_mapping"]]
        for start in range(0, len(ids) - 1, language.context - 1):
            stop = min(start + language.context, len(ids))
            yield torch.tensor(ids[start:stop]), len(text[ends[start] : ends[stop - 1]].encode())


def _batches(found: Iterator[tuple[torch.Tensor, int]]) -> Iterator[list[tuple[torch.Tensor, int]]]:
    batch: list[tuple[torch.Tensor, int]] = []
    for each in found:
        batch.append(each)
        if sum(len(ids) for ids, _ in batch) >= BATCH_TOKENS:
            yield batch
            batch = []
    if batch:
        yield batch


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
