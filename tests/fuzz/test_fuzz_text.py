"""Text for language models and captions for encoders: files that hold none, or not what was asked for."""

from __future__ import annotations

import json

import numpy as np
import pytest
from fuzz_files import TRAP, gzipped

PLAIN: dict[str, tuple[str, bytes]] = {
    "empty": ("t.txt", b""),
    "spaces": ("t.txt", b"  \n\t\n"),
    "latin": ("t.txt", b"caf\xe9\n"),
    "utf16": ("t.txt", "words".encode("utf-16")),
    "zero-byte": ("t.txt", b"words\0words"),
    "pickle": ("t.txt", TRAP),
    "gzip-empty": ("t.txt.gz", b""),
    "gzip-none": ("t.txt.gz", b"plain text"),
    "gzip-cut": ("t.txt.gz", gzipped(b"words " * 1000)[:-12]),
    "gzip-damaged": ("t.txt.gz", gzipped(b"words " * 1000)[:20] + b"\xff" * 30),
    "gzip-of-zeros": ("t.txt.gz", gzipped(b"\0" * 100)),
    "gzip-bomb": ("t.txt.gz", gzipped(b"a" * (80 << 20))),
    "jsonl-empty": ("t.jsonl", b""),
    "jsonl-blank": ("t.jsonl", b"\n\n"),
    "jsonl-cut": ("t.jsonl", b'{"text": "a"}\n{"text": \n'),
    "jsonl-list": ("t.jsonl", b"[1]\n"),
    "jsonl-number": ("t.jsonl", b"3\n"),
    "jsonl-no-field": ("t.jsonl", b'{"txt": "a"}\n'),
    "jsonl-null": ("t.jsonl", b'{"text": null}\n'),
    "jsonl-numbers": ("t.jsonl", b'{"text": 3}\n'),
    "jsonl-latin": ("t.jsonl", b'{"text": "\xe9"}\n'),
    "jsonl-deep": ("t.jsonl", b"[" * 100_000 + b"\n"),
    "jsonl-gz-none": ("t.jsonl.gz", b"not gzip"),
    "parquet-none": ("t.parquet", b"PAR1 but no"),
    "parquet-empty": ("t.parquet", b""),
    "parquet-pickle": ("t.parquet", TRAP),
    "arrow-none": ("t.arrow", b"ARROW1"),
    "unknown-ending": ("t.docx", b"words"),
    "pickled": ("t.pkl", TRAP),
    "zipped": ("t.zip", b"PK"),
}


@pytest.mark.parametrize("case", PLAIN)
def test_text_that_is_none(case, place, refuses):
    name, content = PLAIN[case]
    (place / name).write_bytes(content)
    refuses(["data", "tokenise", "--data", name, "--cache", "cache"], name)


@pytest.mark.parametrize("case", ["empty", "latin", "jsonl-no-field", "parquet-none", "gzip-bomb", "gone"])
def test_training_leaves_nothing_behind(case, place, refuses):
    name, content = PLAIN.get(case, ("gone.txt", b""))
    if case in PLAIN:
        (place / name).write_bytes(content)
    refuses(["train", "helm", "--data", name, "--loop.device", "cpu", "--loop.steps", "1", "--out", "run"], name)


FOLDERS = {
    "empty": {},
    "nothing-known": {"picture.png": b"x"},
    "hidden": {".text.txt": b"words"},
    "no-train-split": {"dataset_dict.json": b'{"splits": ["test"]}'},
    "splits-number": {"dataset_dict.json": b'{"splits": 3}'},
    "splits-list": {"dataset_dict.json": b"[]"},
    "split-gone": {"dataset_dict.json": b'{"splits": ["train"]}'},
    "state-list": {"state.json": b"[]"},
    "state-nothing": {"state.json": b"{}"},
    "state-numbers": {"state.json": b'{"_data_files": [1]}'},
    "state-no-name": {"state.json": b'{"_data_files": [{}]}'},
    "state-leads-out": {"state.json": b'{"_data_files": [{"filename": "../secret.arrow"}]}'},
    "state-absolute": {"state.json": b'{"_data_files": [{"filename": "/etc/passwd"}]}'},
    "state-gone": {"state.json": b'{"_data_files": [{"filename": "gone.arrow"}]}'},
}


@pytest.mark.parametrize("case", FOLDERS)
def test_a_folder_without_text(case, place, refuses):
    (place / "texts").mkdir()
    (place / "secret.arrow").write_bytes(b"not yours")
    for name, content in FOLDERS[case].items():
        (place / "texts" / name).write_bytes(content)
    refuses(["data", "tokenise", "--data", "texts", "--cache", "cache"], "texts")


def test_links_that_leave_a_folder_of_texts(place, refuses):
    (place / "texts").mkdir()
    (place / "secret.txt").write_text("not yours")
    (place / "texts/link.txt").symlink_to(place / "secret.txt")
    refuses(["data", "tokenise", "--data", "texts", "--cache", "cache"], "link.txt")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--field", "txet"], "txet"),
        (["--tokenizer", "gone.json"], "gone.json"),
        (["--tokenizer", "good.jsonl"], "good.jsonl"),
        (["--tokenizer", "bad.json"], "bad.json"),
        (["--tokenizer", "no/such/name"], "no/such/name"),
        (["--vocab-size", "10"], "vocab_size"),
        (["--vocab-size", "-3"], "vocab_size"),
        (["--validation", "0"], "validation"),
        (["--cache", "good.jsonl"], "good.jsonl"),
    ],
)
def test_what_goes_with_text(words, named, place, refuses):
    (place / "good.jsonl").write_text('{"text": "some words"}\n{"text": "more words"}\n')
    (place / "bad.json").write_text('{"version": "1.0", "model": {"type": "none"}}')
    given = [] if "--cache" in words else ["--cache", "cache"]
    refuses(["data", "tokenise", "--data", "good.jsonl", *given, *words], named)


CHAINS: dict[str, tuple[str, str | bytes]] = {
    "empty": ("c.csv", ""),
    "header": ("c.csv", "positive,negative\n"),
    "no-column": ("c.csv", "caption\na dog\n"),
    "too-many-fields": ("c.csv", "positive\na,b\n"),
    "negatives": ("c.csv", "positive,negative\na => b => c,x => y\n"),
    "empty-text": ("c.csv", "positive\na =>  => c\n"),
    "one-level": ("c.csv", "positive\na\n"),
    "latin": ("c.csv", "positive\ncaf\xe9 => b\n".encode("latin-1")),
    "giant": ("c.csv", "positive\n" + "x" * 200_000 + " => b\n"),
    "zero": ("c.csv", "positive\na\0 => b\n"),
    "jsonl-cut": ("c.jsonl", '{"positive": ["a", \n'),
    "jsonl-list": ("c.jsonl", "[]\n"),
    "jsonl-numbers": ("c.jsonl", '{"positive": [1, 2]}\n'),
    "jsonl-number": ("c.jsonl", '{"positive": 3}\n'),
    "jsonl-deep": ("c.jsonl", "[" * 100_000),
    "tree-text": ("c.jsonl", '{"tree": "a"}\n'),
    "tree-no-text": ("c.jsonl", '{"tree": {"children": []}}\n'),
    "tree-unknown": ("c.jsonl", '{"tree": {"text": "a", "kids": []}}\n'),
    "tree-children": ("c.jsonl", '{"tree": {"text": "a", "children": 3}}\n'),
    "tree-child": ("c.jsonl", '{"tree": {"text": "a", "children": ["b"]}}\n'),
    "tree-number": ("c.jsonl", '{"tree": {"text": 3}}\n'),
    "gz": ("c.csv.gz", b"no gzip"),
    "gz-bomb": ("c.csv.gz", gzipped(b"positive\n" + b"a" * (80 << 20))),
    "parquet": ("c.parquet", b"PAR1"),
    "ending": ("c.xml", b"<a/>"),
    "pickle": ("c.pkl", TRAP),
}


@pytest.fixture
def vectors(place):
    """Features for the tasks that need no model."""
    with open(place / "f.npz", "wb") as file:
        rows = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
        np.savez(file, text=rows, root=rows[:1])


@pytest.mark.parametrize("case", CHAINS)
def test_chains(case, place, vectors, refuses):
    name, content = CHAINS[case]
    (place / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    refuses(["evaluate", "--task", "hierarcaps", "--data", name, "--features", "f.npz", "--out", "r.json"], name)


def test_training_an_encoder_that_is_not_there(refuses):
    """The model is asked for first; what is wrong is named, and no run directory stays."""
    refuses(
        ["train", "radial", "--model", "no/such", "--data", "gone.csv", "--out", "run", "--device", "cpu"], "no/such"
    )


WORDS = {
    "empty": "",
    "header": "WORD1 WORD2 POS TYPE AVG_SCORE\n",
    "short": "WORD1 WORD2 POS TYPE AVG_SCORE\na b N x 1\n",
    "fields": "WORD1 WORD2 POS TYPE AVG_SCORE\na b\n",
    "number": "WORD1 WORD2 POS TYPE AVG_SCORE\na b N x much\n",
    "nan": "WORD1 WORD2 POS TYPE AVG_SCORE\n" + "a b N x nan\n" * 4,
}


@pytest.mark.parametrize("case", WORDS)
def test_hyperlex(case, place, vectors, refuses):
    (place / "words.txt").write_text(WORDS[case])
    refuses(
        ["evaluate", "--task", "hyperlex", "--data", "words.txt", "--features", "f.npz", "--out", "r.json"], "words"
    )


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", TRAP], ids=["empty", "cut", "pickle"])
def test_hyperlex_archives(content, place, vectors, refuses):
    (place / "words.zip").write_bytes(content)
    refuses(["evaluate", "--task", "hyperlex", "--data", "words.zip", "--features", "f.npz"], "words.zip")


def test_breeds(place, vectors, refuses):
    (place / "tree").mkdir()
    for name, content in (
        ("class_hierarchy.txt", "a b c\n"),
        ("class_hierarchy.txt", "a b\nb a\n"),
        ("class_hierarchy.txt", "a b\n"),
        ("node_names.txt", "no tab\n"),
        ("node_names.txt", "a\tanimal\n"),
        ("dataset_class_info.json", "{"),
        ("dataset_class_info.json", "3"),
        ("dataset_class_info.json", "[1]"),
        ("dataset_class_info.json", json.dumps([[0, "unknown", ""]])),
    ):
        (place / "tree" / name).write_text(content)
        refuses(["evaluate", "--task", "breeds", "--tree", "tree", "--features", "f.npz", "--out", "r.json"], "tree")
