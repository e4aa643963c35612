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
from leafward.encoders.zeroshot import class_vectors
from leafward.errors import UsageError, require
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
        return self.encoder.prepare_images(self.opened(rows))

    def opened(self, rows: Tensor) -> list[Any]:
        """The pictures themselves."""
        return [read_image(self.files[row]) for row in rows.tolist()]

    def views(self, rows: Tensor, size: int) -> list[Any]:
        """Pictures as training sees them: a random crop, resized to (size, size), turned over with probability ½. The
        draws are torch's, which follow from the seed and step of a training."""
        v2 = require("torchvision.transforms.v2", "vision")
        bicubic = v2.InterpolationMode.BICUBIC
        change = v2.Compose([v2.RandomResizedCrop(size, interpolation=bicubic), v2.RandomHorizontalFlip()])
        return [change(picture) for picture in self.opened(rows)]

    @property
    def size(self) -> int:
        """Pixels of a side."""
        return int(self.encoder.model.config.vision_config.image_size)


def open_clip_model(name: str) -> HuggingFaceEncoder:
    """A model whose encoders take prompts."""
    encoder = load_encoder(name)
    kind = getattr(getattr(encoder.model, "config", None), "model_type", type(encoder.model).__name__)
    if not isinstance(encoder, HuggingFaceEncoder) or kind != "clip":
        raise UsageError(f"model {name}: prompts inside the encoders need a Hugging Face CLIP model, not {kind!r}")
    return encoder


def image_set(
    folder: Path, encoder: HuggingFaceEncoder, template: str, teacher: HuggingFaceEncoder | None = None
) -> FeatureSet:
    """A set whose images are pixels and whose texts are the token numbers of the classes (C, L), L the longest there
    can be, so that the sets of a protocol go together; with a teacher also what that reads of the same."""
    files, labels, names, split = read_images(folder)
    target = torch.tensor(labels)
    parts = seeded_split(target) if split is None else torch.tensor(split)
    texts = [template.replace("{}", readable(name)) for name in names]
    images: Any = Pixels(encoder, files)
    found = FeatureSet(folder.name, images, target, _numbers(encoder, texts), names, parts)
    if teacher is None:
        return found
    larger: Any = Pixels(teacher, files)
    return replace(found, teacher_images=larger, teacher_texts=_numbers(teacher, texts))


def _numbers(encoder: HuggingFaceEncoder, texts: list[str]) -> Tensor:
    length = encoder.max_length
    return encoder.tokenizer(texts, padding="max_length", truncation=True, max_length=length, return_tensors="pt")[
        "input_ids"
    ]


@torch.no_grad()
def with_diverse(data: FeatureSet, templates: Sequence[str]) -> FeatureSet:
    """The set with the features of its classes averaged over templates, as they are, for every model of the set."""
    images: Any = data.images
    larger: Any = data.teacher_images
    own = class_vectors(images.encoder, data.class_names, templates, unit=False).cpu()
    above = None if larger is None else class_vectors(larger.encoder, data.class_names, templates, unit=False).cpu()
    return replace(data, diverse_texts=own, teacher_diverse_texts=above)


@torch.no_grad()
def cached(data: FeatureSet, encoder: HuggingFaceEncoder) -> FeatureSet:
    """The same set as features of the frozen model, for the methods without prompts."""
    rows = torch.arange(len(data.images)).split(CHUNK)
    images = [wide(encoder._image(data.images[part].to(encoder.device))).cpu() for part in rows]
    texts = [wide(encoder._text({"input_ids": part.to(encoder.device)})).cpu() for part in data.texts.split(CHUNK)]
    return replace(data, images=torch.cat(images), texts=torch.cat(texts))
