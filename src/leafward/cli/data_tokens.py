"""``leafward data tokenise --data PATH --cache DIR``: tokens for `leafward train helm --cache DIR`, made beforehand."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leafward.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

SUMMARY = "Tokenise text once into memory-mapped shards that runs share."


@dataclass
class Args:
    data: Path
    """Text, JSONL, Parquet, a folder of them, or a Hugging Face data set on disk."""
    cache: Path
    """Where tokens are kept, under a hash of the content; give the same folder to leafward train helm."""
    field: str = "text"
    """Field of JSONL, Parquet and data sets that holds the text."""
    tokenizer: str | None = None
    """A tokenizer.json, a folder with one, or the name of a Hugging Face tokenizer; None: train one on the data."""
    vocab_size: int | None = None
    """Tokens of a tokenizer that is trained (default: 32,000)."""
    validation: float = 0.05
    """Part of the documents that is held out."""

    def __post_init__(self) -> None:
        if self.vocab_size is not None and self.tokenizer is not None:
            raise UsageError("give --tokenizer or --vocab-size, not both: a given tokenizer has its own size")


def run(args: Args, console: Console) -> dict[str, Any]:
    from leafward.data.text import prepare

    corpus = prepare(
        args.data,
        args.cache,
        field=args.field,
        tokenizer=args.tokenizer,
        vocab_size=args.vocab_size,
        validation=args.validation,
    )
    for name, count in corpus.counts.items():
        console.print(f"{name}: {count['documents']:,} documents, {count['tokens']:,} tokens, {count['bytes']:,} bytes")
    console.print(f"wrote {corpus.folder}")
    return {"folder": str(corpus.folder), "vocabulary": len(corpus.tokenizer), **corpus.counts}
