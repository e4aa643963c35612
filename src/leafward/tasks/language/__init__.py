"""Language modelling: text to tokens, tokens to packed windows, the task for the engine, scores, samples.

    from leafward.tasks.language import prepare, LanguageTask
    corpus = prepare("my.txt", "cache", vocab_size=2048)
    task = LanguageTask(corpus, context=256)

Names are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from leafward._lazy import lazy

if TYPE_CHECKING:
    from leafward.tasks.language.corpus import Corpus, prepare
    from leafward.tasks.language.harness import run_tasks
    from leafward.tasks.language.hub import load_model, save_model
    from leafward.tasks.language.sampling import sample
    from leafward.tasks.language.scoring import Scores, score
    from leafward.tasks.language.shards import Shard, Windows, write_shards
    from leafward.tasks.language.task import LanguageTask
    from leafward.tasks.language.text import find_files, read_documents
    from leafward.tasks.language.tokenizer import load_tokenizer, train_tokenizer

_HOME = {
    "corpus": ("Corpus", "prepare"),
    "harness": ("run_tasks",),
    "hub": ("load_model", "save_model"),
    "sampling": ("sample",),
    "scoring": ("Scores", "score"),
    "shards": ("Shard", "Windows", "write_shards"),
    "task": ("LanguageTask",),
    "text": ("find_files", "read_documents"),
    "tokenizer": ("load_tokenizer", "train_tokenizer"),
}

__all__ = [
    "Corpus",
    "LanguageTask",
    "Scores",
    "Shard",
    "Windows",
    "find_files",
    "load_model",
    "load_tokenizer",
    "prepare",
    "read_documents",
    "run_tasks",
    "sample",
    "save_model",
    "score",
    "train_tokenizer",
    "write_shards",
]

__getattr__, __dir__ = lazy(__name__, _HOME)
