"""Taxonomies that are none: broken files, and whole ones that say what cannot be."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

DEEP = "[" * 100_000 + "]" * 100_000

BROKEN: dict[str, tuple[str, bytes]] = {
    "csv-empty": ("t.csv", b""),
    "csv-bom-only": ("t.csv", b"\xef\xbb\xbf"),
    "csv-header-only": ("t.csv", b"child,parent\n"),
    "csv-blank-lines": ("t.csv", b"\n\n\n"),
    "csv-one-field": ("t.csv", b"child,parent\ndog\n"),
    "csv-three-fields": ("t.csv", b"child,parent\ndog,animal,brown\n"),
    "csv-cycle": ("t.csv", b"a,b\nb,c\nc,a\n"),
    "csv-cycle-below-a-root": ("t.csv", b"child,parent\nroot,\na,b\nb,a\n"),
    "csv-own-parent": ("t.csv", b"dog,dog\n"),
    "csv-orphan": ("t.csv", b"child,parent\nanimal,\ndog,anmial\n"),
    "csv-duplicate": ("t.csv", b"dog,animal\ndog,animal\n"),
    "csv-root-with-parent": ("t.csv", b"dog,\ndog,animal\nanimal,\n"),
    "csv-two-roots": ("t.csv", b"dog,animal\noak,plant\n"),
    "csv-empty-child": ("t.csv", b"child,parent\n,animal\n"),
    "csv-blank-child": ("t.csv", b"child,parent\n  ,animal\n"),
    "csv-open-quote": ("t.csv", b'child,parent\n"dog,animal\n'),
    "csv-text-after-quote": ("t.csv", b'child,parent\n"dog"x,animal\n'),
    "csv-giant-field": ("t.csv", b"child,parent\n" + b"x" * 200_000 + b",animal\n"),
    "csv-latin": ("t.csv", "child,parent\ncaf\xe9,place\n".encode("latin-1")),
    "csv-utf16": ("t.csv", "child,parent\ndog,animal\n".encode("utf-16")),
    "csv-binary": ("t.csv", bytes(range(256))),
    "csv-zeros": ("t.csv", b"\0" * 64),
    "csv-semicolons": ("t.csv", b"child;parent\ndog;animal\n"),
    "csv-carriage-returns": ("t.csv", b"dog,animal\rcat\r"),
    "json-empty": ("t.json", b""),
    "json-cut": ("t.json", b'{"animal": {"dog": {}'),
    "json-number": ("t.json", b"3"),
    "json-null": ("t.json", b"null"),
    "json-text": ("t.json", b'"animal"'),
    "json-nothing": ("t.json", b"{}"),
    "json-numbers-as-names": ("t.json", b'{"animal": [1, 2]}'),
    "json-value": ("t.json", b'{"animal": 3}'),
    "json-truth": ("t.json", b'{"animal": {"dog": true}}'),
    "json-key-twice": ("t.json", b'{"animal": {"dog": {}, "dog": {}}}'),
    "json-name-twice": ("t.json", b'{"animal": {"dog": {}, "cat": {"dog": {}}}}'),
    "json-empty-name": ("t.json", b'{"": {"dog": {}}}'),
    "json-deep": ("t.json", DEEP.encode()),
    "json-parents-text": ("t.json", b'{"parents": {"dog": "animal"}}'),
    "json-parents-number": ("t.json", b'{"parents": {"dog": [1]}}'),
    "json-parents-cycle": ("t.json", b'{"parents": {"a": ["b"], "b": ["a"]}}'),
    "json-latin": ("t.json", b'{"caf\xe9": {}}'),
    "json-huge-number": ("t.json", b"1" * 10_000),
    "text-empty": ("t.txt", b""),
    "text-spaces": ("t.txt", b"   \n\t\n"),
    "text-name-twice": ("t.txt", b"animal\n  dog\n  dog\n"),
    "text-indent-that-fits-nothing": ("t.txt", b"animal\n    dog\n  cat\n"),
    "text-tabs-and-spaces": ("t.txt", b"animal\n\tdog\n    cat\n\tpoodle\n"),
    "text-latin": ("t.txt", b"caf\xe9\n"),
    "unknown-ending": ("t.xlsx", b"PK\x03\x04"),
    "no-ending": ("taxonomy", b"dog,animal\n"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_taxonomy(case, place, refuses):
    name, content = BROKEN[case]
    (place / name).write_bytes(content)
    refuses(["data", "chains", "--taxonomy", name, "--out", "chains.csv"], name)


@pytest.mark.parametrize("case", ["csv-cycle", "csv-orphan", "csv-latin", "json-deep", "csv-two-roots", "text-empty"])
def test_training_refuses_it_as_well(case, place, refuses):
    name, content = BROKEN[case]
    (place / name).write_bytes(content)
    refuses(["train", "taxonomy", "--data", name, "--out", "run", "--device", "cpu"], name)


def folder(place: Path) -> None:
    (place / "t.csv").mkdir()


def loop(place: Path) -> None:
    (place / "t.csv").symlink_to(place / "t.csv")


def dangling(place: Path) -> None:
    (place / "t.csv").symlink_to(place / "gone.csv")


def pipe(place: Path) -> None:
    os.mkfifo(place / "t.csv")


def device(place: Path) -> None:
    (place / "t.csv").symlink_to("/dev/zero")


def sparse(place: Path) -> None:
    """Five gigabytes that take no room."""
    with open(place / "t.csv", "wb") as file:
        file.truncate(5 << 30)


@pytest.mark.parametrize("made", [folder, loop, dangling, pipe, device, sparse, None])
def test_what_is_no_file_to_read(made, place, refuses):
    if made is not None:
        made(place)
    refuses(["data", "chains", "--taxonomy", "t.csv", "--out", "chains.csv"], "t.csv")


def test_a_taxonomy_too_small_to_embed(place, refuses):
    (place / "t.json").write_text(json.dumps({"animal": ["dog"]}))
    refuses(["train", "taxonomy", "--data", "t.json", "--out", "run"], "t.json")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--data", "wordnet:no-such-node.n.01"], "ordnet"),
        (["--data", "good.csv", "--root", "animal"], "animal"),
        (["--data", "good.csv", "--twin", "--geometry", "euclidean"], "twin"),
        (["--data", "good.csv", "--resume", "--overwrite"], "overwrite"),
        (["--data", "good.csv", "--out", "good.csv"], "good.csv"),
        (["--data", "good.csv", "--out", "good.csv/run"], "good.csv"),
        (["--data", "good.csv", "--out", "full"], "full"),
        (["--data", ""], "data"),
        (["--data", "\0.csv"], ".csv"),
        (["--data", "x" * 5000 + ".csv"], "xxx"),
        (["--data", "good.csv", "--device", "cuda", "--out", "run"], "cuda"),
    ],
    ids=lambda value: " ".join(value)[:40].replace("\0", "0") if isinstance(value, list) else "",
)
def test_options_that_do_not_go_together(words, named, place, refuses):
    import torch

    if "cuda" in words and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    (place / "good.csv").write_text("dog,animal\ncat,animal\ntabby,cat\n")
    (place / "full").mkdir()
    (place / "full" / "notes.txt").write_text("mine")
    refuses(["train", "taxonomy", *words], named)
