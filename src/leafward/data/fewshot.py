"""Few-shot classification on features: labelled sets, the splits, and the four usual protocols.

A set is a feature file (.npz or .safetensors, see `leafward.data.features`) with `image_features` (N, d), `labels` (N),
`text_features` (C, d) and `class_names`. Optional: `split` (N) with 0 train, 1 validation, 2 test;
`teacher_image_features` (N, d′) and `teacher_text_features` (C, d′) of a larger model; `diverse_text_features` (C, d)
and `teacher_diverse_text_features` (C, d′), the texts averaged over many templates. Features are kept as they are:
their norms may matter.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from leafward.data.arrays import array_of
from leafward.data.features import CLASSES, PAIR, as_vectors, feature_arrays
from leafward.errors import DataError, UsageError
from leafward.files import check_ending, replacing

Protocol = Literal["base-to-new", "few-shot", "cross-dataset", "domain"]
TRAIN, VALIDATION, TEST = 0, 1, 2
SHARES = (0.5, 0.2, 0.3)
"""Of train, validation and test, where a file brings no split (the shares of CoOp's data sets)."""

ENDINGS = (".npz", ".safetensors")
_TEACHER = ("teacher_image_features", "teacher_text_features")


@dataclass(frozen=True)
class FeatureSet:
    """Features of N images and C classes, with names and a split."""

    name: str
    images: Tensor
    """(N, d)."""
    labels: Tensor
    """(N)."""
    texts: Tensor
    """(C, d)."""
    class_names: tuple[str, ...]
    split: Tensor
    """(N): 0 train, 1 validation, 2 test."""
    teacher_images: Tensor | None = None
    teacher_texts: Tensor | None = None
    diverse_texts: Tensor | None = None
    """(C, d): features of the classes averaged over templates, which PromptSRC is held to."""
    teacher_diverse_texts: Tensor | None = None

    def part(self, split: int, classes: Tensor | None = None) -> Tensor:
        """Rows of one part of the split, of the given classes or of all."""
        chosen = self.split == split
        if classes is not None:
            chosen &= torch.isin(self.labels, classes)
        return chosen.nonzero().squeeze(1)


def read_feature_set(path: str | os.PathLike[str]) -> FeatureSet:
    """A feature file, checked; without a split a seeded one is made, the same every time."""
    path = Path(path)
    arrays = feature_arrays(path, ENDINGS)
    if CLASSES not in arrays:
        raise DataError(f"{path} lacks the class names: an array {CLASSES!r} (.npz) or metadata (.safetensors)")
    names = tuple(map(str, arrays.pop(CLASSES)))
    images, texts = (_matrix(arrays, name, path) for name in PAIR)
    labels = _integers(arrays, "labels", path, len(images), len(texts))
    if len(names) != len(texts) or images.shape[1] != texts.shape[1]:
        raise DataError(
            f"{path}: {len(names)} class names, text_features {tuple(texts.shape)} and image_features "
            f"{tuple(images.shape)} do not go together"
        )
    if "split" in arrays:
        split = _integers(arrays, "split", path, len(images), 3)
    else:
        split = seeded_split(labels)
    teacher = _teacher(arrays, path, len(images), len(texts))
    found = FeatureSet(path.stem, images, labels, texts, names, split, *teacher)
    return replace(found, **_diverse(arrays, path, found))


def _diverse(arrays: dict[str, Any], path: Path, data: FeatureSet) -> dict[str, Tensor]:
    """The texts averaged over templates, of the shape of the others."""
    found = {}
    for name, field_name, like in (
        ("diverse_text_features", "diverse_texts", data.texts),
        ("teacher_diverse_text_features", "teacher_diverse_texts", data.teacher_texts),
    ):
        if name in arrays:
            found[field_name] = _matrix(arrays, name, path)
            if like is None or found[field_name].shape != like.shape:
                shape = None if like is None else tuple(like.shape)
                raise DataError(f"{path}: {name} {tuple(found[field_name].shape)} must be of the texts' shape, {shape}")
    return found


def _teacher(arrays: dict[str, Any], path: Path, images: int, texts: int) -> tuple[Tensor, ...]:
    """The features of a larger model, of the same images and classes; nothing where a file has none."""
    names = [name for name in _TEACHER if name in arrays]
    if not names:
        return ()
    if len(names) == 1:
        raise DataError(f"{path}: {' and '.join(_TEACHER)} come together or not at all")
    features = tuple(_matrix(arrays, name, path) for name in names)
    if [len(each) for each in features] != [images, texts]:
        raise DataError(f"{path}: the teacher's features are not of the same images and classes")
    return features


def write_feature_set(path: str | os.PathLike[str], data: FeatureSet) -> None:
    """Write a feature file of the kind that the name asks for, in one step."""
    path = Path(path)
    arrays = {
        "image_features": data.images,
        "labels": data.labels,
        "text_features": data.texts,
        "split": data.split,
    }
    if data.teacher_images is not None and data.teacher_texts is not None:
        arrays |= {"teacher_image_features": data.teacher_images, "teacher_text_features": data.teacher_texts}
    diverse = {"diverse_text_features": data.diverse_texts, "teacher_diverse_text_features": data.teacher_diverse_texts}
    arrays |= {name: values for name, values in diverse.items() if values is not None}
    check_ending(path, ENDINGS)
    with replacing(path) as temporary:
        if path.suffix == ".npz":
            with open(temporary, "wb") as file:
                plain: dict[str, Any] = {name: array.cpu().numpy() for name, array in arrays.items()}
                np.savez(file, class_names=np.array(data.class_names), **plain)
        else:
            from safetensors.torch import save_file

            metadata = {CLASSES: json.dumps(data.class_names)}
            save_file({name: array.contiguous() for name, array in arrays.items()}, temporary, metadata=metadata)


def seeded_split(labels: Tensor, seed: int = 0) -> Tensor:
    """Train, validation and test for each class in the usual shares: labels (N) -> (N)."""
    split = torch.full_like(labels, TEST)
    generator = torch.Generator().manual_seed(seed)
    for label in labels.unique():
        rows = (labels == label).nonzero().squeeze(1)
        rows = rows[torch.randperm(len(rows), generator=generator)]
        first, second = (math.ceil(share * len(rows)) for share in (SHARES[0], SHARES[0] + SHARES[1]))
        split[rows[:first]] = TRAIN
        split[rows[first:second]] = VALIDATION
    return split


def few_shot(labels: Tensor, rows: Tensor, shots: int, seed: int) -> Tensor:
    """At most `shots` of the rows of each class, drawn with a seed."""
    generator = torch.Generator().manual_seed(seed)
    order = rows[torch.randperm(len(rows), generator=generator)]
    if not len(order):
        return rows
    grouped = labels[order].sort(stable=True)
    # The place of each row within its class: its place among all, less where the class begins.
    counts = grouped.values.unique_consecutive(return_counts=True)[1]
    within = torch.arange(len(order)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    return order[grouped.indices[within < shots]]


@dataclass(frozen=True)
class Exam:
    """Where a trained model is scored: rows of a data set, against some of its classes."""

    name: str
    data: FeatureSet
    classes: Tensor
    """The classes to choose from, by their number in `data`."""
    rows: Tensor

    @property
    def targets(self) -> Tensor:
        """The place of each row's label among the classes."""
        place = torch.full((len(self.data.texts),), -1)
        place[self.classes] = torch.arange(len(self.classes))
        return place[self.data.labels[self.rows]]


@dataclass(frozen=True)
class Episode:
    """One training and what it is scored on."""

    data: FeatureSet
    shots: int
    seed: int
    classes: Tensor
    """The classes of the training."""
    train: Tensor
    validation: Tensor
    exams: tuple[Exam, ...] = field(default=())

    def targets(self, rows: Tensor) -> Tensor:
        """Labels of rows as places among the classes of the training."""
        return Exam("", self.data, self.classes, rows).targets


def episodes(
    protocol: Protocol, data: FeatureSet, targets: Sequence[FeatureSet], shots: Sequence[int], seeds: Sequence[int]
) -> list[Episode]:
    """Every training of a protocol.

    base-to-new: trained on the first half of the classes (rounded up), scored on both halves apart. few-shot: all
    classes, each number of shots. cross-dataset: scored on other data sets with their own classes. domain: the same
    classes in other pictures; a target may have fewer of them.
    """
    everything = torch.arange(len(data.texts))
    own = Exam("all", data, everything, data.part(TEST))
    trained = everything
    if protocol == "base-to-new":
        half = math.ceil(len(everything) / 2)
        trained, new = everything[:half], everything[half:]
        if not len(new):
            raise UsageError(f"base-to-new needs at least two classes; {data.name} has {len(everything)}")
        exams = [Exam("base", data, trained, data.part(TEST, trained)), Exam("new", data, new, data.part(TEST, new))]
    elif protocol == "few-shot":
        exams = [own]
    elif protocol in ("cross-dataset", "domain"):
        if not targets:
            raise UsageError(f"the protocol {protocol} needs targets: at least one other feature file")
        exams = [Exam(data.name, data, everything, own.rows)] + [_elsewhere(protocol, data, each) for each in targets]
    else:
        raise UsageError(f"protocol must be base-to-new, few-shot, cross-dataset or domain, got {protocol!r}")
    for exam in exams:
        if not len(exam.rows):
            raise DataError(f"{exam.data.name}: the part {exam.name!r} of the protocol has no test images")
    rows, held_out = data.part(TRAIN, trained), data.part(VALIDATION, trained)
    if not len(rows):
        raise DataError(f"{data.name}: none of the classes that are trained has a training image")
    return [
        Episode(data, count, seed, trained, few_shot(data.labels, rows, count, seed), held_out, tuple(exams))
        for count in shots
        for seed in seeds
    ]


def _elsewhere(protocol: Protocol, data: FeatureSet, target: FeatureSet) -> Exam:
    if target.texts.shape[1] != data.texts.shape[1]:
        widths = target.texts.shape[1], data.texts.shape[1]
        raise DataError(f"{target.name} has features of width {widths[0]}, but {data.name} of width {widths[1]}")
    if protocol == "domain":
        foreign = set(target.class_names) - set(data.class_names)
        if foreign:
            raise DataError(f"{target.name} has a class that {data.name} lacks: {min(foreign)!r}")
    return Exam(target.name, target, torch.arange(len(target.texts)), target.part(TEST))


def harmonic_mean(first: float, second: float) -> float:
    """2ab/(a+b), 0 where both are 0."""
    return 2.0 * first * second / (first + second) if first + second else 0.0


def _matrix(arrays: dict[str, np.ndarray], name: str, path: Path) -> Tensor:
    array = array_of(arrays, name, path)
    if array.ndim != 2:
        raise DataError(f"{path}: {name} must be numbers (N, d), got {array.dtype} {array.shape}")
    return as_vectors(array, name, path)


def _integers(arrays: dict[str, Any], name: str, path: Path, count: int, below: int) -> Tensor:
    array = array_of(arrays, name, path)
    if array.dtype.kind not in "iu" or array.shape != (count,):
        raise DataError(f"{path}: {name} must be {count} integers, got {array.dtype} {array.shape}")
    if array.min() < 0 or array.max() >= below:
        raise DataError(f"{path}: {name} must be in 0…{below - 1}, got {array.min()}…{array.max()}")
    return torch.from_numpy(array.astype(np.int64))
