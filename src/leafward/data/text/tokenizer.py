"""Tokenizers: byte-level BPE trained on the data, or one that is given."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leafward import register
from leafward.errors import DataError, UsageError, foreign, require
from leafward.files import read_record

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END = "<|endoftext|>"
"""Begins and ends every document of a tokenizer that is trained here."""
LEAST = 257
"""All bytes, and the token that ends a document."""
LARGEST_ID = 1 << 24
"""Beyond the largest vocabularies there are, which have about a million tokens."""
_ENDS = (END, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")


def train_tokenizer(documents: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE with at most `vocab_size` tokens; any text is encoded without loss.

    `tokenizer(text)` begins with the token that begins a document, as in training.
    """
    if vocab_size < LEAST:
        raise UsageError(f"vocab_size must be at least {LEAST} (256 bytes and the end of a document), not {vocab_size}")
    tokenizers = require("tokenizers", "lm")
    transformers = require("transformers", "lm")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(documents, trainer)
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{END} $A", special_tokens=[(END, backend.token_to_id(END))]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=END,
        eos_token=END,
        pad_token=END,
        clean_up_tokenization_spaces=False,
    )


def check_tokenizer(path: Path) -> None:
    """Refuse a tokenizer.json, if there is one, whose ids would take gigabytes.

    Its reader makes room for every id up to the largest, whatever that is.
    """
    if not path.is_file():
        return
    record = read_record(path)
    model, added = record.get("model"), record.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else []
    ids += [token.get("id") for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    largest = max((number for number in ids if isinstance(number, int)), default=0)
    if largest > LARGEST_ID:
        raise DataError(f"{path}: the largest token is {largest:,}, and at most {LARGEST_ID:,} is read")


def load_tokenizer(name: str | Path) -> PreTrainedTokenizerFast:
    """A tokenizer.json, a folder with one, or the name of a Hugging Face tokenizer. It must know an end of text."""
    transformers = require("transformers", "lm")
    path = Path(name)
    if not path.exists() and (path.suffix == ".json" or len(path.parts) > 2):
        raise DataError(f"there is no tokenizer at {name}")
    check_tokenizer(path if path.is_file() else path / "tokenizer.json")
    with foreign(f"cannot read the tokenizer {name}"):
        if path.is_file():
            tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path))
        else:
            register("transformers")  # so that the folder of a HELM is known, and its own code need not run
            tokenizer = transformers.AutoTokenizer.from_pretrained(str(name), use_fast=True, trust_remote_code=False)
    if not getattr(tokenizer, "is_fast", False):
        raise DataError(f"the tokenizer {name} has no tokenizer.json; only fast tokenizers can be used")
    if tokenizer.eos_token is None:
        vocabulary = tokenizer.get_vocab()
        ends = [token for token in _ENDS if token in vocabulary]
        if not ends:
            raise DataError(
                f"the tokenizer {name} says no token that ends a text (one of {', '.join(_ENDS)}); "
                "give a folder whose tokenizer_config.json has an eos_token"
            )
        tokenizer.eos_token = ends[0]
    if tokenizer.bos_token is None:
        tokenizer.bos_token = tokenizer.eos_token
    return tokenizer


def encode(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Tokens of each text, all of it and alone: nothing is added, and the name of a special token is only text."""
    backend = tokenizer.backend_tokenizer
    # Many a tokenizer.json, above all of encoders, says that texts are cut or filled up to some length.
    backend.no_truncation()
    backend.no_padding()
    before = backend.encode_special_tokens
    backend.encode_special_tokens = True
    try:
        with foreign("the tokenizer cannot encode the text"):  # for instance where nothing stands for an unknown word
            return [encoding.ids for encoding in backend.encode_batch_fast(list(texts), add_special_tokens=False)]
    finally:
        backend.encode_special_tokens = before


def size(tokenizer: Any) -> int:
    """Rows that an embedding needs: one more than the largest token. (`len` counts tokens, and there may be gaps.)"""
    return max(tokenizer.get_vocab().values()) + 1


def identity(tokenizer: Any) -> list[Any]:
    """What makes a tokenizer the one it is, for a hash."""
    return [tokenizer.backend_tokenizer.to_str(), tokenizer.bos_token_id, tokenizer.eos_token_id]
