"""Adapter folders and model folders that somebody changed, or that belong to something else."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from fuzz_files import ARRAYS, TRAP
from radial_toys import make
from safetensors.torch import load_file, save_file

from leafward.adapters import BlockScaleConfig, attach, save_pretrained
from leafward.encoders import load_encoder


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A tiny sentence encoder and an adapter for it."""
    folder = tmp_path_factory.mktemp("made")
    base = make("sentence", folder)
    encoder = load_encoder(base)
    attach(encoder.model, BlockScaleConfig(block_size=8), base_model="sentence")
    save_pretrained(encoder.model, folder / "adapter")
    return folder


@pytest.fixture
def copied(made, place):
    shutil.copytree(made, place, dirs_exist_ok=True)
    return place


PLAIN = ["export", "adapter", "--to", "out"]
MERGED = [*PLAIN, "--merged", "--base", "sentence"]
TEXTS = {
    "empty": b"",
    "cut": b'{"format": ',
    "list": b"[]",
    "null": b"null",
    "latin": b'{"format": "\xe9"}',
    "pickle": TRAP,
    "deep": b"[" * 100_000,
    "nothing": b"{}",
}


@pytest.mark.parametrize("case", TEXTS)
def test_a_description_that_is_none(case, copied, refuses):
    (copied / "adapter/adapter_config.json").write_bytes(TEXTS[case])
    refuses(PLAIN, "adapter")


CHANGES = {
    "format": ({"format": "peft"}, "format"),
    "format-number": ({"format": 3}, "format"),
    "method": ({"method": "lorra"}, "lorra"),
    "method-null": ({"method": None}, "method"),
    "method-module": ({"method": "os.system"}, "os.system"),
    "config-null": ({"config": None}, "config"),
    "config-list": ({"config": []}, "config"),
    "config-unknown": ({"config": {"blok_size": 8}}, "blok_size"),
    "config-type": ({"config": {"block_size": "eight"}}, "block_size"),
    "config-zero": ({"config": {"block_size": 0}}, "block_size"),
    "config-huge": ({"config": {"block_size": 10**30}}, "block_size"),
    "config-choice": ({"config": {"constraint": "tight"}}, "constraint"),
    "config-target": ({"config": {"targets": ["x"]}}, "x"),
    "config-of-another": ({"method": "low_rank", "config": {"block_size": 8}}, "block_size"),
    "base-null": ({"base_model": None}, "base_model"),
    "base-text": ({"base_model": "sentence"}, "base_model"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_description_that_was_changed(case, copied, refuses):
    change, named = CHANGES[case]
    path = copied / "adapter/adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    refuses(PLAIN, named)


MISFITS = {
    "another-width": {"config": {"block_size": 16}},
    "does-not-divide": {"config": {"block_size": 7}},
    "another-target": {"config": {"block_size": 8, "targets": ["fc1"]}},
    "another-method": {"method": "low_rank", "config": {"rank": 2}},
}


@pytest.mark.parametrize("case", MISFITS)
def test_an_adapter_that_does_not_fit(case, copied, refuses):
    path = copied / "adapter/adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | MISFITS[case]))
    refuses(MERGED, "block_size" if case == "does-not-divide" else "adapter")


def test_an_adapter_of_another_base(copied, refuses):
    path = copied / "adapter/adapter_config.json"
    for base in ({"name": "somebody/other"}, {"name": "sentence", "class": "CLIPModel"}, {"name": ""}):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model": base}))
        refuses([*PLAIN, "--merged"], "base" if not base["name"] else str(base.get("class", base["name"])))


@pytest.mark.parametrize("case", [name for name in ARRAYS if name.endswith(".safetensors")])
def test_weights_that_are_none(case, copied, refuses):
    (copied / "adapter/adapter_model.safetensors").write_bytes(ARRAYS[case][1])
    refuses(PLAIN, "adapter_model.safetensors")


def test_weights_that_were_changed(copied, refuses):
    path = copied / "adapter/adapter_model.safetensors"
    tensors = load_file(path)
    first = min(tensors)
    spoilt = {
        "lacks": {name: each for name, each in tensors.items() if name != first},
        "holds": tensors | {"extra.weight": torch.zeros(2)},
        "shape": tensors | {first: tensors[first][..., :1].clone()},
        "finite": tensors | {first: tensors[first] * float("nan")},
        "nothing": {},
    }
    for named, each in spoilt.items():
        save_file(each, path)
        refuses(MERGED, "lacks" if named == "nothing" else named)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize("kind", ["gone", "folder", "link-out", "device"])
def test_files_that_are_not_there(name, kind, copied, refuses):
    path = copied / "adapter" / name
    path.rename(copied / "elsewhere")
    if kind == "folder":
        path.mkdir()
    elif kind != "gone":
        path.symlink_to(copied / "elsewhere" if kind == "link-out" else "/dev/zero")
    refuses(PLAIN, "adapter")


def test_places_to_write(copied, refuses):
    refuses(["export", "adapter", "--to", "sentence"], "sentence")
    refuses(["export", "adapter", "--to", "adapter/adapter_config.json"], "adapter_config.json")
    refuses(["export", "adapter", "--to", "adapter/adapter_config.json/below"], "adapter_config.json")
    refuses(["export", "adapter", "--to", "out", "--merged", "--base", "no/such"], "no/such")
    refuses(["export", "adapter", "--to", "out", "--merged", "--base", "open_clip:none"], "none")
    refuses(["export", "sentence", "--to", "out"], "sentence")


def test_models_that_hold_only_a_pickle(copied, refuses):
    """No command takes a pickle for weights, whatever it is called."""
    weights = next((copied / "sentence").rglob("model.safetensors"))
    weights.unlink()
    for name in ("pytorch_model.bin", "model.pt", "model.ckpt"):
        (weights.parent / name).write_bytes(TRAP)
        refuses(MERGED, "sentence")
        refuses(["audit", "sentence", "--out", "audit"], "sentence")
        refuses(["train", "radial", "--model", "sentence", "--data", "x.csv", "--out", "run"], "sentence")


@pytest.mark.parametrize("case", [name for name in ARRAYS if name.endswith(".safetensors")][:8])
def test_models_with_damaged_weights(case, copied, refuses):
    next((copied / "sentence").rglob("model.safetensors")).write_bytes(ARRAYS[case][1])
    refuses(MERGED, "sentence")


INDEXES = {
    "cut": b'{"weight_map": ',
    "list": b"[]",
    "nothing": b"{}",
    "numbers": b'{"weight_map": {"a": 3}}',
    "gone": b'{"weight_map": {"lm_head.weight": "gone.safetensors"}}',
    "leads-out": b'{"weight_map": {"lm_head.weight": "../secret.safetensors"}}',
    "absolute": b'{"weight_map": {"lm_head.weight": "/etc/passwd"}}',
}


@pytest.mark.parametrize("case", INDEXES)
def test_indices_of_shards(case, place, refuses):
    (place / "model").mkdir()
    save_file({"lm_head.weight": torch.randn(8, 4)}, place / "secret.safetensors")
    (place / "model/config.json").write_text("{}")
    (place / "model/model.safetensors.index.json").write_bytes(INDEXES[case])
    refuses(["audit", "model", "--out", "audit"], "model")


@pytest.mark.parametrize("case", [name for name in TEXTS if name != "nothing"])
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_files_beside_the_weights(case, name, place, refuses):
    (place / "model").mkdir()
    save_file({"lm_head.weight": torch.randn(8, 4)}, place / "model/model.safetensors")
    (place / "model/config.json").write_text('{"vocab_size": 8}')
    (place / "model/tokenizer.json").write_text('{"model": {"vocab": {"a": 0, "b": 1}}}')
    (place / "model" / name).write_bytes(TEXTS[case])
    refuses(["audit", "model", "--out", "audit"], "model")
