"""Names as they come out of files: characters that a terminal obeys, or that are no text, and far too many of them."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from fuzz_files import TRAP, Trap

from leafward import errors
from leafward.cli import dispatch
from leafward.data.tables import read_table
from leafward.errors import DataError, LeafwardError, bounded, printable

#: What may reach no terminal: all control characters but the line end and the tab, deletions, changes of direction.
OBEYED = [chr(code) for code in (*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A))]
OBEYED = [char for char in OBEYED if char not in "\n\t"]


@pytest.mark.parametrize("char", OBEYED, ids=lambda char: f"{ord(char):04x}")
def test_a_control_character_in_a_name_of_a_file(char, place, counts, capsys):
    """In an error, in what a command prints, and in its JSON, where it stays what it is."""
    name = f"dog{char}[31m"
    if char.strip():  # those that count as white space are taken off the ends, or end a line
        (place / "t.json").write_text(json.dumps({"animal": [name, name]}))
        assert dispatch.main(["data", "chains", "--taxonomy", "t.json", "--out", "c.csv"]) == 1
        assert not set(OBEYED) & set(capsys.readouterr().err)
    console = dispatch._console(as_json=False)
    console.print(f"tensor {name}", markup=False)
    console.print(name)
    assert not set(OBEYED) & set(capsys.readouterr().out)
    said = dispatch._json({name: [name]})
    assert not set(OBEYED) & set(said)
    assert json.loads(said) == {name: [name]}
    counts()


def test_what_is_no_control_character_stays():
    text = "dog\tchien 犬 🐕 é\n\\x1b"
    assert printable(text) == text
    assert json.loads(dispatch._json({"é": "犬"})) == {"é": "犬"}


def test_warnings_and_tracebacks_are_printable_too(monkeypatch, capsys):
    monkeypatch.setattr(dispatch.sys, "argv", ["leafward", "--version"])
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    with pytest.raises(SystemExit):
        dispatch.entry()
    assert "\x1b" not in warnings.formatwarning("a\x1b[2Jb", UserWarning, "f.py", 1)
    capsys.readouterr()
    try:
        raise ValueError("a\x1b[2Jb")
    except ValueError:
        dispatch._trace()
    assert "\x1b" not in capsys.readouterr().err


def test_colours_of_our_own_still_reach_a_terminal():
    console = dispatch._console(as_json=False)
    console.file, console._force_terminal, console._color_system = io.StringIO(), True, 1
    console.print("[red]hot[/red]")
    assert "\x1b[31mhot" in console.file.getvalue()


def test_no_message_is_longer_than_one_reads(place, refuses):
    name = "x" * 1_000_000
    (place / "t.json").write_text(json.dumps({"animal": [name, name]}))
    said = refuses(["data", "chains", "--taxonomy", "t.json", "--out", "c.csv"], "t.json")
    assert len(said) < 3000
    assert "characters left out" in said
    assert len(str(LeafwardError(name))) < 3000
    assert bounded("short") == "short"


HALVES = [f"\\u{code:04x}" for code in (0xD800, 0xDBFF, 0xDC00, 0xDFFF, 0xDCE9)]


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize(
    "form", ['{{"animal": {{"d{}g": {{}}}}}}', '{{"parents": {{"d{}g": ["animal"], "animal": []}}}}']
)
def test_half_a_character_in_a_taxonomy(half, form, place, refuses):
    (place / "t.json").write_text(form.format(half))
    refuses(["data", "chains", "--taxonomy", "t.json", "--out", "c.csv"], "t.json")
    refuses(["train", "taxonomy", "--data", "t.json", "--out", "run", "--device", "cpu"], "t.json")


@pytest.mark.parametrize("half", HALVES)
def test_half_a_character_in_names_of_embeddings(half, place, refuses):
    folder = place / "items"
    folder.mkdir()
    np.save(folder / "embeddings.npy", np.ones((2, 3), np.float32))
    (folder / "names.json").write_text(f'["d{half}g", "cat"]')
    refuses(["data", "index", "items", "--out", "index"], "names.json")


def test_a_pair_of_halves_is_a_character(place):
    (place / "names.json").write_text(r'["\ud83d\udc15"]')
    from leafward.files import read_json

    assert read_json(place / "names.json") == ["🐕"]


LATIN = [b"caf\xe9", b"\xff", b"dog\x80", b"\xc3\x28", b"\xed\xa0\x80"]


@pytest.mark.parametrize("name", LATIN, ids=repr)
def test_a_folder_of_a_class_whose_name_is_not_utf8(name, place, refuses):
    """Refused when it is read: it crashed when the trained model was written."""
    pytest.importorskip("PIL.Image")
    pytest.importorskip("timm")
    from PIL import Image

    for folder in (b"images/dog", b"images/" + name):
        os.makedirs(folder)
        for number in range(4):
            Image.new("RGB", (8, 8)).save(os.fsdecode(folder) + f"/{number}.png")
    said = refuses(["train", "vision", "--data", "images", "--out", "run"], "not UTF-8")
    assert "caf\\xe9" in said or name != LATIN[0]


@pytest.mark.parametrize("name", LATIN, ids=repr)
def test_a_label_folder_whose_name_is_not_utf8(name, place, refuses):
    os.makedirs(b"items/" + name)
    np.save(os.fsdecode(b"items/" + name) + "/a.npy", np.ones(3, np.float32))
    refuses(["data", "index", "items", "--out", "index"], "not UTF-8")


def test_a_header_of_many_columns_takes_time_in_proportion(tmp_path):
    """It took 5.9 s for 20,000 columns, by looking through all of them for each."""
    searched = []

    def watch(frame, event, function):
        if event == "c_call" and function.__name__ in ("count", "index"):
            searched.append(function)

    (tmp_path / "t.csv").write_text(",".join(f"c{i}" for i in range(20_000)) + "\n" + "0," * 19_999 + "0\n")
    sys.setprofile(watch)
    try:
        table = read_table(tmp_path / "t.csv")
    finally:
        sys.setprofile(None)
    assert len(table) == 20_000
    assert len(searched) < 100
    (tmp_path / "t.csv").write_text("a,b,a\n1,2,3\n")
    with pytest.raises(DataError, match="'a' stands 2 times"):
        read_table(tmp_path / "t.csv")


@pytest.mark.parametrize(
    "words",
    [
        ["train", "taxonomy", "--data", "t.csv", "--device", "cpu"],
        ["data", "chains", "--taxonomy", "t.csv"],
        ["data", "index", "points.npy"],
        ["audit", "points.npy"],
    ],
    ids=lambda words: " ".join(words[:2]),
)
@pytest.mark.parametrize("length", [300, 5000])
def test_an_out_that_is_too_long(words, length, place, refuses):
    (place / "t.csv").write_text("dog,animal\ncat,animal\ntabby,cat\n")
    np.save(place / "points.npy", np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32))
    refuses([*words, "--out", "x" * length], "xxx")


class PanicException(BaseException):
    """As pyo3 names what a panic of Rust becomes."""


@pytest.mark.parametrize("error", [PanicException("overflow"), TypeError("list"), pickle.UnpicklingError("no")])
def test_whatever_a_foreign_reader_raises_is_told(error):
    with pytest.raises(DataError, match=f"cannot read it: {error}"), errors.foreign("cannot read it"):
        raise error
    with pytest.raises(KeyboardInterrupt), errors.foreign("cannot read it"):
        raise KeyboardInterrupt


def bert(place: Path, tokenizer: object = None, **changed: object) -> None:
    folder = place / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "bert", "hidden_size": 8, **changed}))
    if tokenizer is not None:
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


@pytest.mark.parametrize("kind", [["bert"], {"a": 1}, 3, None, True, "no-such-model", [[]], 1e400])
def test_a_model_type_that_is_no_name(kind, place, counts):
    pytest.importorskip("transformers")
    from leafward.encoders.encoder import load_encoder

    bert(place, model_type=kind)
    with pytest.raises(DataError, match="model"):
        load_encoder(place / "model")
    counts()


def vocabulary(largest: int, **changed: object) -> dict[str, object]:
    model = {"type": "WordLevel", "unk_token": "a", "vocab": {"a": 0, "b": largest}}
    return {"version": "1.0", "added_tokens": [], "model": model, **changed}


@pytest.mark.parametrize("largest", [1 << 25, 1 << 31, (1 << 32) - 1, 1 << 62])
def test_a_tokenizer_that_would_take_gigabytes(largest, place, counts):
    """It ended the process with 4.8 GB."""
    pytest.importorskip("transformers")
    from leafward.data.text.tokenizer import load_tokenizer

    added = [{"id": largest, "content": "<x>", "special": True}]
    for tokenizer in (vocabulary(largest), vocabulary(1, added_tokens=added)):
        (place / "tokenizer.json").write_text(json.dumps(tokenizer))
        with pytest.raises(DataError, match="the largest token is"):
            load_tokenizer(place / "tokenizer.json")
        with pytest.raises(DataError, match="the largest token is"):
            load_tokenizer(place)
        counts()


@pytest.mark.parametrize("content", [TRAP, pickle.dumps({"a": Trap()}), b"\x80\x04."], ids=range(3))
def test_a_pickle_as_a_checkpoint_of_open_clip(content, place, counts):
    pytest.importorskip("open_clip")
    from leafward.encoders.encoder import load_encoder

    (place / "weights.pt").write_bytes(content)
    with pytest.raises(DataError, match="cannot load the open_clip model ViT-S-32-alt"):
        load_encoder("open_clip:ViT-S-32-alt@weights.pt")
    assert not (place / "hacked").exists()
    counts()


def deep(depth: int) -> bytes:
    header = json.dumps(
        {
            "__metadata__": {"class_names": "[" * depth + "]" * depth},
            "images": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
        }
    ).encode()
    return struct.pack("<Q", len(header)) + header + b"\0" * 16


@pytest.mark.parametrize("depth", [900, 5000, 100_000])
def test_class_names_that_are_nested_deeply(depth, place, refuses):
    (place / "f.safetensors").write_bytes(deep(depth))
    refuses(["train", "lathadapter", "--data", "f.safetensors", "--out", "run", "--device", "cpu"], "f.safetensors")
