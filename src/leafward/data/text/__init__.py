"""Text to tokens, tokens to packed windows.

from leafward.data.text import prepare
corpus = prepare("my.txt", "cache", vocab_size=2048)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from leafward._lazy import lazy

if TYPE_CHECKING:
    from leafward.data.text.corpus import Corpus, prepare
    from leafward.data.text.documents import find_files, read_documents
    from leafward.data.text.shards import Shard, Windows, write_shards
    from leafward.data.text.tokenizer import load_tokenizer, train_tokenizer

_HOME = {
    "corpus": (
        "Corpus",
        "prepare",
    ),
    "shards": (
        "Shard",
        "Windows",
        "write_shards",
    ),
    "documents": (
        "find_files",
        "read_documents",
    ),
    "tokenizer": (
        "load_tokenizer",
        "train_tokenizer",
    ),
}

__all__ = [
    "Corpus",
    "Shard",
    "Windows",
    "find_files",
    "load_tokenizer",
    "prepare",
    "read_documents",
    "train_tokenizer",
    "write_shards",
]

__getattr__, __dir__ = lazy(__name__, _HOME)
