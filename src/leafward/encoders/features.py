"""Features of labelled images and of the names of their classes, by an encoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from leafward.data.captions import readable
from leafward.data.fewshot import FeatureSet, seeded_split
from leafward.encoders.encoder import Encoder, Image
from leafward.encoders.zeroshot import class_vectors
from leafward.engine import Progress


def feature_set(
    encoder: Encoder,
    images: Sequence[Image],
    labels: Sequence[int],
    classes: Sequence[str],
    split: Sequence[int] | None = None,
    *,
    name: str,
    template: str = "a photo of a {}.",
    batch: int = 64,
    diverse: Sequence[str] | None = None,
) -> FeatureSet:
    """Features with their norms, since a latent hierarchy without normalisation reads them as radii.

    The text of a class is `template` with its name for {}; `diverse` are templates over which the texts are averaged as
    well. Without `split` it is drawn from a fixed seed.
    """
    texts = encoder.encode_text([template.replace("{}", readable(each)) for each in classes], unit=False)
    rows = []
    with Progress(len(images), "images", unit="image") as progress:
        for first in range(0, len(images), batch):
            rows.append(encoder.encode_image(images[first : first + batch], unit=False).cpu())
            progress.update(min(first + batch, len(images)))
    target = torch.tensor(labels)
    parts = seeded_split(target) if split is None else torch.tensor(split)
    found = FeatureSet(name, torch.cat(rows), target, texts.cpu(), tuple(classes), parts)
    if diverse is None:
        return found
    return replace(found, diverse_texts=class_vectors(encoder, classes, diverse, unit=False).cpu())


def taught_by(teacher: FeatureSet | None, data: FeatureSet) -> FeatureSet:
    """The set with another model's features of the same images and classes as its teacher's."""
    if teacher is None:
        return data
    above = {"teacher_images": teacher.images, "teacher_texts": teacher.texts}
    return replace(data, **above, teacher_diverse_texts=teacher.diverse_texts)
