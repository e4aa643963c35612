"""No encoder has random weights that nobody asked for: what lacks weights is refused, by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from radial_toys import make
from rich.console import Console
from safetensors.torch import load_file, save_file, save_model

from leafward.cli import data_features
from leafward.encoders.encoder import load_encoder
from leafward.errors import DataError, UsageError

open_clip: Any = pytest.importorskip("open_clip")

TINY = {
    "embed_dim": 24,
    "vision_cfg": {"layers": 2, "width": 32, "head_width": 16, "patch_size": 8, "image_size": 16},
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2},
}


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[str]:
    """The name of an architecture that open_clip builds, without pretrained weights."""
    (tmp_path / "leafward-tiny.json").write_text(json.dumps(TINY))
    open_clip.add_model_config(tmp_path / "leafward-tiny.json")
    yield "leafward-tiny"
    open_clip.factory._MODEL_CONFIGS.pop("leafward-tiny")


def without(folder: Path, gone: str) -> None:
    """Take the weights whose names hold `gone` out of the model's file."""
    file = folder / "model.safetensors"
    state = load_file(file)
    kept = {name: value for name, value in state.items() if gone not in name}
    assert len(kept) < len(state)
    save_file(kept, file, metadata={"format": "pt"})


def test_a_name_of_open_clip_without_weights_is_refused_with_its_tags() -> None:
    with pytest.raises(UsageError, match=r"open_clip:ViT-B-32 names no weights.*@WEIGHTS") as refused:
        load_encoder("open_clip:ViT-B-32")
    tags = open_clip.list_pretrained_tags_by_model("ViT-B-32")
    assert "laion2b_s34b_b79k" in tags
    assert all(tag in str(refused.value) for tag in tags)
    for empty in ("open_clip:ViT-B-32@", "open_clip:RN50"):
        with pytest.raises(UsageError, match="names no weights"):
            load_encoder(empty)
    with pytest.raises(UsageError, match="no model 'ViT-B32'; did you mean 'ViT-B-32'"):
        load_encoder("open_clip:ViT-B32")


def test_no_features_are_written_of_a_random_model(tmp_path: Path) -> None:
    for colour in ("red", "blue"):
        (tmp_path / "photos" / colour).mkdir(parents=True)
        for n in range(3):
            Image.new("RGB", (32, 32), colour).save(tmp_path / "photos" / colour / f"{n}.png")
    args = data_features.Args(
        images=tmp_path / "photos", model="open_clip:ViT-B-32", out=tmp_path / "features.npz", device="cpu"
    )
    with pytest.raises(UsageError, match="names no weights"):
        data_features.run(args, Console(quiet=True))
    assert not (tmp_path / "features.npz").exists()


def test_an_open_clip_name_with_a_file_has_the_weights_of_the_file(tiny: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no pretrained weights of this model"):
        load_encoder(f"open_clip:{tiny}")
    torch.manual_seed(3)
    model = open_clip.CLIP(**TINY).eval()
    save_model(model, str(tmp_path / "weights.safetensors"))
    encoder = load_encoder(f"open_clip:{tiny}@{tmp_path / 'weights.safetensors'}")
    with torch.no_grad():
        expected = model.encode_text(open_clip.tokenize(["a dog"], context_length=16), normalize=True)
    torch.testing.assert_close(encoder.encode_text(["a dog"]), expected)
    with pytest.raises(DataError, match="cannot load the open_clip model"):
        load_encoder(f"open_clip:{tiny}@no_such_tag")


def test_a_folder_of_open_clip_without_its_weights_is_refused(tmp_path: Path) -> None:
    folder = make("open_clip", tmp_path)
    load_encoder(folder)
    (folder / "open_clip_model.safetensors").unlink()
    with pytest.raises(DataError, match=r"cannot load the open_clip model.*could not be loaded"):
        load_encoder(folder)


@pytest.mark.parametrize(
    ("kind", "gone"),
    [("clip", "text_projection"), ("clip", "vision_model.encoder.layers.1"), ("siglip", "vision_model.head"),
     ("sentence", "encoder.layer.1.output")],
)  # fmt: skip
def test_a_file_that_lacks_weights_is_refused(kind: str, gone: str, tmp_path: Path) -> None:
    folder = make(kind, tmp_path)
    without(folder, gone)
    with pytest.raises(DataError, match=rf"weights of the model are not in its files, for instance '.*{gone}"):
        load_encoder(folder)


def test_a_sentence_encoder_needs_no_pooler(tmp_path: Path) -> None:
    """Many are published without; their token states are pooled."""
    folder = make("sentence", tmp_path)
    shutil.copytree(folder, tmp_path / "bare")
    without(tmp_path / "bare", "pooler.")
    texts = ["a small dog", "animal"]
    expected = load_encoder(folder).encode_text(texts)
    torch.testing.assert_close(load_encoder(tmp_path / "bare").encode_text(texts), expected)
