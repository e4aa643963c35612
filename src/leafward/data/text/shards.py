"""Tokens on disk, memory-mapped, and packed windows of them.

A shard is two files: NAME.bin holds the tokens of all documents end to end (uint16 or uint32), NAME.documents.npy where
each document starts and how many bytes of text it was. A document is its tokens between one that begins and one that
ends it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import default_collate

from leafward.data.text.tokenizer import encode, size
from leafward.errors import DataError, UsageError

BATCH = 4_000_000
"""Characters that are tokenised at a time."""
IGNORED = -100
"""The label of what is not predicted, which PyTorch's cross-entropy and `leafward.nn.head` leave out by default."""


@dataclass(frozen=True)
class Shard:
    """Tokens (N,), first token of each document (D,), and the bytes of its text (D,)."""

    tokens: NDArray[Any]
    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]

    @classmethod
    def open(cls, folder: Path, name: str, dtype: str) -> Shard:
        """The shard `name` in `folder`, memory-mapped."""
        try:
            table = np.load(folder / f"{name}.documents.npy", allow_pickle=False)
            tokens = np.memmap(folder / f"{name}.bin", np.dtype(dtype), "r")
        except (OSError, ValueError, EOFError, TypeError, MemoryError) as error:
            raise DataError(f"{folder} has no readable shard {name!r}: {error}") from error
        if table.ndim != 2 or len(table) != 3 or table[2].sum() != len(tokens):
            raise DataError(
                f"{folder / name}.bin has {len(tokens)} tokens, which is not what its table of documents says"
            )
        return cls(tokens, table[0], table[1])

    def document(self, index: int) -> NDArray[Any]:
        """The tokens of one document."""
        end = self.starts[index + 1] if index + 1 < len(self.starts) else len(self.tokens)
        return self.tokens[self.starts[index] : end]


class ShardWriter:
    """Appends documents to a shard; nothing but the files of the shard is written."""

    def __init__(self, folder: Path, name: str, tokenizer: Any):
        self.folder, self.name, self.tokenizer = folder, name, tokenizer
        self.dtype = token_type(size(tokenizer))
        self.lengths, self.sizes = array("q"), array("q")

    def __enter__(self) -> ShardWriter:
        self.file = open(self.folder / f"{self.name}.bin", "wb")
        return self

    def add(self, text: str, tokens: list[int]) -> None:
        begin, end = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        np.array([begin, *tokens, end], self.dtype).tofile(self.file)
        self.lengths.append(len(tokens) + 2)
        self.sizes.append(len(text.encode()))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.file.close()
        if error is None:
            lengths = np.array(self.lengths, np.int64)
            starts = np.concatenate([np.zeros(1, np.int64), lengths.cumsum()[:-1]])[: len(lengths)]
            np.save(
                self.folder / f"{self.name}.documents.npy", np.stack([starts, np.array(self.sizes, np.int64), lengths])
            )


def token_type(vocabulary: int) -> str:
    """The smallest type that holds the tokens of a vocabulary."""
    return "uint16" if vocabulary <= 1 << 16 else "uint32"


def write_shards(folder: Path, labelled: Iterable[tuple[str, str]], tokenizer: Any) -> dict[str, dict[str, int]]:
    """Tokenise (shard, text) pairs into shards of `folder`; returns the counts of each."""
    writers: dict[str, ShardWriter] = {}
    with ExitStack() as stack:
        for batch in _batches(labelled):
            for (name, text), tokens in zip(batch, encode(tokenizer, [text for _, text in batch]), strict=True):
                if name not in writers:
                    writers[name] = stack.enter_context(ShardWriter(folder, name, tokenizer))
                writers[name].add(text, tokens)
    return {
        name: {"documents": len(each.lengths), "tokens": sum(each.lengths), "bytes": sum(each.sizes)}
        for name, each in writers.items()
    }


def _batches(labelled: Iterable[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    batch: list[tuple[str, str]] = []
    held = 0
    for name, text in labelled:
        batch.append((name, text))
        held += len(text)
        if held >= BATCH:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


class Windows:
    """A shard as packed training samples of `length` tokens each, for a map-style data loader.

    The shard is cut every length − 1 tokens, and a window begins with the last token of the one before, so that every
    token but a document's first is predicted exactly once. A sample has, each (length,),

    - `input_ids` and `labels`, the same tokens, with no label for the first token of a document,
    - `documents`: the number of the document, by which attention keeps them apart; −1 for padding,
    - `position_ids`: from 0 in each document (or the part of it that is in the window).
    """

    def __init__(self, shard: Shard, length: int):
        if length < 2:
            raise UsageError(f"a window needs at least 2 tokens, not {length}")
        self.shard, self.length = shard, length

    def __len__(self) -> int:
        return -(-(len(self.shard.tokens) - 1) // (self.length - 1))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        first = index * (self.length - 1)
        tokens = np.asarray(self.shard.tokens[first : first + self.length], np.int64)
        place = np.arange(first, first + len(tokens))
        document = np.searchsorted(self.shard.starts, place, side="right") - 1
        begin = self.shard.starts[document]
        sample = {
            "input_ids": (tokens, 0),
            "labels": (np.where(place == begin, IGNORED, tokens), IGNORED),
            "documents": (document, -1),
            "position_ids": (place - np.maximum(begin, first), 0),
        }
        return {name: self._padded(values, fill) for name, (values, fill) in sample.items()}

    def batch(self, numbers: Sequence[int], size: int) -> dict[str, Tensor]:
        """The samples of these numbers, each (size, length): the last is repeated without labels where there are fewer.

        So that all batches have one shape: what is compiled, attention to packed documents above all, is compiled once.
        """
        batch = default_collate([self[number] for number in (*numbers, *[numbers[-1]] * (size - len(numbers)))])
        batch["labels"][len(numbers) :] = IGNORED
        return batch

    def _padded(self, values: NDArray[np.int64], fill: int) -> Tensor:
        padded = np.full(self.length, fill, np.int64)
        padded[: len(values)] = values
        return torch.from_numpy(padded)
