"""Chains of captions made by a language model and filtered by a model of natural-language inference.

As HierarCaps was made: a language model is shown a caption and writes ever more general ones; a chain is kept where
each text follows from the next more specific one; a negative of a text is a text of another chain, at the same level,
that does not follow from the caption.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leafward.data.captions import ARROW, Captions
from leafward.encoders.encoder import refuse_missing
from leafward.errors import DataError, UsageError, require

PROMPT = f"""Rewrite each caption from specific to general in {{levels}} steps.
Caption: A brown dog catches a red frisbee in the park.
Chain: A brown dog catches a red frisbee in the park. {ARROW} dog catching a frisbee {ARROW} dog {ARROW} animal
Caption: Two women are eating pizza at a wooden table.
Chain: Two women are eating pizza at a wooden table. {ARROW} women eating pizza {ARROW} people eating {ARROW} people
Caption: {{caption}}
Chain: {{caption}} {ARROW}"""


class Generaliser:
    """A local Hugging Face language model, decoder-only or encoder–decoder, that writes chains."""

    def __init__(self, directory: str | Path, device: str = "cpu", prompt: str = PROMPT) -> None:
        library = require("transformers", "lm")
        config, self.tokenizer = _config_and_tokenizer(directory)
        kind = "AutoModelForSeq2SeqLM" if config.is_encoder_decoder else "AutoModelForCausalLM"
        self.model = _loaded(getattr(library, kind), directory, device)
        self.prompt, self.decoder_only = prompt, not config.is_encoder_decoder
        self.tokenizer.padding_side = "left" if self.decoder_only else "right"
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token

    @torch.no_grad()
    def write(
        self, captions: Sequence[str], levels: int, *, seed: int, tries: int = 4, temperature: float = 0.8
    ) -> list[list[str]]:
        """For each caption `tries` sampled answers to the prompt: texts of what was written, first line only."""
        asked = [self.prompt.format(caption=caption, levels=levels) for caption in captions]
        tokens = self.tokenizer(asked, return_tensors="pt", padding=True, truncation=True).to(self.model.device)
        torch.manual_seed(seed)  # generate() draws from the global generator alone
        written = self.model.generate(
            input_ids=tokens["input_ids"],
            attention_mask=tokens["attention_mask"],
            do_sample=True,
            temperature=temperature,
            num_return_sequences=tries,
            max_new_tokens=16 * levels,
            pad_token_id=self.tokenizer.pad_token_id,
        )
        if self.decoder_only:
            written = written[:, tokens["input_ids"].shape[1] :]
        texts = [text.strip().split("\n")[0] for text in self.tokenizer.batch_decode(written, skip_special_tokens=True)]
        return [texts[first : first + tries] for first in range(0, len(texts), tries)]


def parse_chain(caption: str, written: str, levels: int) -> list[str] | None:
    """The chain, general first, of an answer "less general => … => most general"; None where it is not one.

    A chain has `levels` distinct texts that never get longer towards the general end, counted in words.
    """
    texts = [caption, *(part.strip(" .\"'") for part in written.split(ARROW))]
    if texts[1].casefold() == caption.strip(" .").casefold():  # the model repeats the caption first
        del texts[1]
    chain = texts[:levels][::-1]
    words = [len(text.split()) for text in chain]
    distinct = {text.casefold() for text in chain}
    if len(chain) < levels or len(distinct) < levels or not all(words) or words != sorted(words):
        return None
    return chain


class Inference:
    """A local Hugging Face classifier of natural-language inference, such as a BART or DeBERTa trained on MNLI."""

    def __init__(self, directory: str | Path, device: str = "cpu", batch_size: int = 64) -> None:
        library = require("transformers", "lm")
        config, self.tokenizer = _config_and_tokenizer(directory)
        self.model = _loaded(library.AutoModelForSequenceClassification, directory, device)
        labels = {str(label).casefold(): int(index) for index, label in config.id2label.items()}
        if "entailment" not in labels:
            raise DataError(f"{directory} has no class 'entailment'; its classes are {', '.join(labels)}")
        self.entailment, self.batch_size = labels["entailment"], batch_size

    @torch.no_grad()
    def entails(self, premises: Sequence[str], hypotheses: Sequence[str]) -> Tensor:
        """Probability that each hypothesis follows from its premise: (P), on the CPU."""
        rows = []
        for first in range(0, len(premises), self.batch_size):
            part = slice(first, first + self.batch_size)
            tokens = self.tokenizer(
                list(premises[part]), list(hypotheses[part]), padding=True, truncation=True, return_tensors="pt"
            )
            logits = self.model(**tokens.to(self.model.device)).logits
            rows.append(logits.float().softmax(dim=-1)[:, self.entailment].cpu())
        return torch.cat(rows) if rows else torch.zeros(0)


def generate_chains(
    captions: Sequence[tuple[str, str | None]],
    generaliser: Generaliser,
    inference: Inference,
    *,
    levels: int = 4,
    accept: float = 0.5,
    refuse: float = 0.2,
    batch_size: int = 16,
    seed: int = 0,
) -> Iterator[Captions]:
    """Chains with negatives for (caption, image) pairs; captions without a chain that holds are passed over.

    Of several chains the one whose weakest step is most surely entailed is kept, where that reaches `accept`. A
    negative must follow from the caption with at most the probability `refuse`. Negatives come from the chains of
    the same batch, so a batch needs several captions.
    """
    if levels < 2 or batch_size < 2:
        raise UsageError(f"levels and batch_size must be at least 2, got {levels} and {batch_size}")
    for first in range(0, len(captions), batch_size):
        part = captions[first : first + batch_size]
        answers = generaliser.write([caption for caption, _ in part], levels, seed=seed + first)
        kept = [
            (chain, image)
            for (caption, image), written in zip(part, answers, strict=True)
            if (chain := _best_chain([parse_chain(caption, text, levels) for text in written], inference, accept))
        ]
        rng = np.random.default_rng([seed, first])
        wrong = _negatives([chain for chain, _ in kept], inference, refuse, rng)
        for (chain, image), negatives in zip(kept, wrong, strict=True):
            yield Captions.chain(chain, negatives, image)


def _best_chain(chains: Sequence[list[str] | None], inference: Inference, accept: float) -> list[str] | None:
    """The chain whose least sure step, from specific to general, is surest."""
    found = [chain for chain in chains if chain is not None]
    if not found:
        return None
    steps = [(down, up) for chain in found for up, down in pairwise(chain)]
    sure = inference.entails([down for down, _ in steps], [up for _, up in steps]).view(len(found), -1).amin(dim=1)
    best = int(sure.argmax())
    return found[best] if float(sure[best]) >= accept else None


def _negatives(
    chains: Sequence[list[str]], inference: Inference, refuse: float, rng: np.random.Generator
) -> list[list[str | None]]:
    """For each text of each chain a random text of the same level of another one that its caption does not entail."""
    pairs = [
        (own, other, level)
        for own, chain in enumerate(chains)
        for other in rng.permutation(len(chains))
        for level in range(len(chain))
        if other != own and chains[other][level] not in chain
    ]
    sure = inference.entails([chains[own][-1] for own, _, _ in pairs], [chains[o][level] for _, o, level in pairs])
    found: list[list[str | None]] = [[None] * len(chain) for chain in chains]
    for (own, other, level), probability in zip(pairs, sure.tolist(), strict=True):
        if found[own][level] is None and probability <= refuse:
            found[own][level] = chains[other][level]
    return found


def _config_and_tokenizer(directory: str | Path) -> tuple[Any, Any]:
    library = require("transformers", "lm")
    try:
        config = library.AutoConfig.from_pretrained(directory, trust_remote_code=False)
        return config, library.AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise DataError(f"cannot load the model {directory}: {error}") from error


def _loaded(cls: Any, directory: str | Path, device: str) -> Any:
    try:
        model, found = cls.from_pretrained(
            directory, use_safetensors=True, output_loading_info=True, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        raise DataError(f"cannot load the model {directory}: {error}") from error
    refuse_missing(directory, found["missing_keys"])
    return model.to(device).eval()
