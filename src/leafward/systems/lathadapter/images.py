"""Labelled images in place of features: prompts then are tokens inside a CLIP model, as the papers have them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from leafward.data.captions import readable
from leafward.data.fewshot import FeatureSet, seeded_split
from leafward.data.image_files import read_image
from leafward.data.standard_sets import read_images
from leafward.encoders import load_encoder
from leafward.encoders.encoder import HuggingFaceEncoder
from leafward.errors import UsageError
from leafward.geometry.scalars import wide

CHUNK = 256
"""Images that go through the model at once where no gradient is wanted."""


@dataclass(frozen=True)
class Pixels:
    """Image files as a model's pixels, read when they are asked for: rows (n) -> (n, 3, H, W)."""

    encoder: HuggingFaceEncoder
    files: Sequence[Path]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, rows: Tensor) -> Tensor:
        return self.encoder.prepare_images([read_image(self.files[row]) for row in rows.tolist()])

    def take(self, rows: Tensor) -> Pixels:
        return Pixels(self.encoder, [self.files[row] for row in rows.tolist()])


def open_clip_model(name: str) -> HuggingFaceEncoder:
    """A model whose encoders take prompts."""
    encoder = load_encoder(name)
    kind = getattr(getattr(encoder.model, "config", None), "model_type", type(encoder.model).__name__)
    if not isinstance(encoder, HuggingFaceEncoder) or kind != "clip":
        raise UsageError(f"model {name}: prompts inside the encoders need a Hugging Face CLIP model, not {kind!r}")
    return encoder


def image_set(folder: Path, encoder: HuggingFaceEncoder, template: str) -> FeatureSet:
    """A set whose images are pixels and whose texts are the token numbers of the classes (C, L), L the longest there
    can be, so that the sets of a protocol go together."""
    files, labels, names, split = read_images(folder)
    target = torch.tensor(labels)
    parts = seeded_split(target) if split is None else torch.tensor(split)
    texts = [template.replace("{}", readable(name)) for name in names]
    length = encoder.max_length
    tokens = encoder.tokenizer(texts, padding="max_length", truncation=True, max_length=length, return_tensors="pt")
    images: Any = Pixels(encoder, files)
    return FeatureSet(folder.name, images, target, tokens["input_ids"], names, parts)


@torch.no_grad()
def cached(data: FeatureSet, encoder: HuggingFaceEncoder) -> FeatureSet:
    """The same set as features of the frozen model, for the methods without prompts."""
    rows = torch.arange(len(data.images)).split(CHUNK)
    images = [wide(encoder._image(data.images[part].to(encoder.device))).cpu() for part in rows]
    texts = [wide(encoder._text({"input_ids": part.to(encoder.device)})).cpu() for part in data.texts.split(CHUNK)]
    return replace(data, images=torch.cat(images), texts=torch.cat(texts))
