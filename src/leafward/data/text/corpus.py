"""From a path to tokens: the split into training and held-out documents, the tokenizer, the shards, once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from leafward.data.text.documents import digest, find_files, read_documents
from leafward.data.text.folders import replacing_folder
from leafward.data.text.shards import Shard, token_type, write_shards
from leafward.data.text.tokenizer import identity, load_tokenizer, size, train_tokenizer
from leafward.errors import DataError, UsageError
from leafward.files import read_record, write_json

FORMAT, VERSION = "leafward-tokens", 1
INDEX, TOKENIZER = "index.json", "tokenizer"
TRAIN, HELD_OUT = "train", "validation"
DEFAULT_VOCABULARY = 32_000


@dataclass(frozen=True)
class Corpus:
    """Tokenised documents in `folder`: training and held-out shards, and the tokenizer that made them."""

    folder: Path
    train: Shard
    held_out: Shard
    tokenizer: Any
    counts: dict[str, dict[str, int]]

    @property
    def key(self) -> str:
        """The hash of the content that the folder is named by."""
        return self.folder.name

    @classmethod
    def open(cls, folder: str | Path) -> Corpus:
        """What `prepare` wrote."""
        folder = Path(folder)
        try:
            index = read_record(folder / INDEX)
        except DataError as error:
            raise DataError(f"{folder} holds no tokens: {error}") from error
        whole = index.get("dtype") in ("uint16", "uint32") and isinstance(index.get("shards"), dict)
        if index.get("format") != FORMAT or index.get("version") != VERSION or not whole:
            raise DataError(f"{folder / INDEX} is not of format {FORMAT!r}, version {VERSION}")
        train, held_out = (Shard.open(folder, name, index["dtype"]) for name in (TRAIN, HELD_OUT))
        return cls(folder, train, held_out, load_tokenizer(folder / TOKENIZER), index["shards"])


def prepare(
    data: str | Path,
    cache: str | Path,
    *,
    field: str = "text",
    tokenizer: str | Path | None = None,
    vocab_size: int | None = None,
    validation: float = 0.05,
) -> Corpus:
    """The tokens of `data`, made now or found in `cache` under a hash of content, tokenizer and split.

    Without a `tokenizer`, one of at most `vocab_size` tokens (default 32,000) is trained on the training documents.
    `validation` is the part of the documents that is held out, chosen by a hash of their content; of a single
    document it is the last part.
    """
    if not 0.0 < validation < 1.0:
        raise UsageError(f"validation must be a part of the documents between 0 and 1, not {validation!r}")
    files = find_files(data)
    given = None if tokenizer is None else load_tokenizer(tokenizer)
    wanted = vocab_size or DEFAULT_VOCABULARY
    settings = [VERSION, digest(files), field, validation, identity(given) if given is not None else wanted]
    folder = Path(cache) / hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:32]
    if not (folder / INDEX).is_file():
        with replacing_folder(folder) as partial:
            _build(files, partial, field, given, wanted, validation)
    return Corpus.open(folder)


def _build(files: Sequence[Path], folder: Path, field: str, tokenizer: Any, wanted: int, validation: float) -> None:
    held = held_out(np.fromiter(map(_hash, read_documents(files, field)), np.uint64), validation)

    def labelled() -> Iterator[tuple[str, str]]:
        for index, text in enumerate(read_documents(files, field)):
            if len(held) == 1:
                cut = _cut(text, validation)
                yield from ((TRAIN, text[:cut]), (HELD_OUT, text[cut:]))
            else:
                yield (HELD_OUT if held[index] else TRAIN), text

    if tokenizer is None:
        tokenizer = train_tokenizer((text for name, text in labelled() if name == TRAIN), wanted)
    counts = write_shards(folder, labelled(), tokenizer)
    tokenizer.save_pretrained(folder / TOKENIZER)
    dtype = token_type(size(tokenizer))
    write_json(folder / INDEX, {"format": FORMAT, "version": VERSION, "dtype": dtype, "shards": counts})


def held_out(hashes: NDArray[np.uint64], part: float) -> NDArray[np.bool_]:
    """Which documents are held out: those with the smallest hashes, so that equal documents stay together.

    At least one is held out and one is not; a single document is left to be cut.
    """
    if len(hashes) < 2:
        return np.zeros(len(hashes), bool)
    count = min(max(round(part * len(hashes)), 1), len(hashes) - 1)
    chosen = hashes <= np.partition(hashes, count - 1)[count - 1]
    if chosen.all():
        chosen = hashes < hashes.max()
    if not chosen.any():
        raise DataError(f"all of the {len(hashes)} documents are the same, so none can be held out")
    return chosen


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _cut(text: str, part: float) -> int:
    """Where the last part of a document begins: at the next end of a line or a word, if one is near."""
    if len(text) < 2:
        raise DataError("the only document has one character: too short to hold a part of it out")
    place = min(max(round((1.0 - part) * len(text)), 1), len(text) - 1)
    for gap in ("\n", " "):
        found = text.find(gap, place, min(place + 1000, len(text) - 1))
        if found >= 0:
            return found + 1
    return place
