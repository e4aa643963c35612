"""Zero-shot classification: images against the embeddings of class names in prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from leafward.data import fewshot
from leafward.data.arrays import array_names
from leafward.data.captions import parquet_columns, read_lines, readable
from leafward.data.features import PAIR, read_vectors
from leafward.data.image_files import encoded_image
from leafward.data.standard_sets import PARTS, read_images
from leafward.encoders.encoder import Encoder
from leafward.encoders.scores import Score, similarity
from leafward.errors import DataError, UsageError
from leafward.hierarchy import Taxonomy, metrics
from leafward.hierarchy.answers import decided

TEMPLATES = ("a photo of a {}.",)
#: CLIP's usual temperature: probabilities are softmax(100 · cosine)
LOGIT_SCALE = 100.0


@dataclass(frozen=True)
class Comparison:
    """How images and classes are compared: logits are the `scale` times their `similarity`."""

    score: Score = "cosine"
    c: float = 0.1
    weight: float = 0.1
    scale: float = LOGIT_SCALE

    def logits(self, image: Tensor, classes: Tensor) -> Tensor:
        """(M, d), (C, d) -> (M, C)."""
        return self.scale * similarity(image, classes, self.score, c=self.c, weight=self.weight)


def read_templates(path: str | Path) -> tuple[str, ...]:
    """Prompts, one on each line, each with {} where the name of the class goes."""
    return checked_templates(read_lines(path), str(path))


def checked_templates(templates: Sequence[str], source: str = "templates") -> tuple[str, ...]:
    """The templates, each of which must hold {} exactly once."""
    for template in templates:
        if template.count("{}") != 1:
            raise UsageError(f"{source}: a template must hold {{}} once, for the name of the class, got {template!r}")
    if not templates:
        raise UsageError(f"{source}: at least one template is needed")
    return tuple(templates)


def class_vectors(
    encoder: Encoder, names: Sequence[str], templates: Sequence[str] = TEMPLATES, *, unit: bool = True
) -> Tensor:
    """For each class the mean over the templates of its embeddings: (C, d).

    unit: of embeddings of unit length, and scaled to it again; else of embeddings as they are.
    """
    prompts = [template.replace("{}", readable(name)) for name in names for template in checked_templates(templates)]
    mean = encoder.encode_text(prompts, unit=unit).view(len(names), len(templates), -1).mean(dim=1)
    return normalize(mean, dim=-1) if unit else mean


def labelled_images(path: str | Path, label: str = "label", split: str | None = None) -> tuple[list[Any], list[str]]:
    """Images and the names of their classes: a folder in one of the layouts of `leafward.data.standard_sets`, or a
    parquet file with the images' bytes (column jpeg or image) and the class in column `label`.

    `split`: take the rows whose column split says so, the folder of that name, or that part (train, val, test) of a
    folder that brings a split; of such a one the test part where nothing is said.
    """
    path = Path(path)
    if path.suffix == ".parquet":
        rows = parquet_columns(path, ("jpeg", "image", "split", label))
        rows = [row for row in rows if split is None or row.get("split") == split]
        try:
            cells = [row["jpeg"] if "jpeg" in row else row["image"] for row in rows]
            labels = [str(row[label]) for row in rows]
        except KeyError as error:
            raise DataError(f"{path} lacks the column {error}") from error
        images = [encoded_image(cell, f"{path}: image {i} has no encoded image") for i, cell in enumerate(cells)]
        pairs = list(zip(images, labels, strict=True))
    else:
        pairs = _of_folder(path, split)
    if not pairs:
        raise DataError(f"{path} holds no labelled image" + (f" of split {split!r}" if split else ""))
    images, labels = zip(*pairs, strict=True)
    return list(images), list(labels)


def _of_folder(path: Path, split: str | None) -> list[tuple[Any, str]]:
    folder = path / split if split is not None and (path / split).is_dir() else path
    files, labels, names, parts = read_images(folder)
    pairs = [(file, names[label]) for file, label in zip(files, labels, strict=True)]
    if folder != path or (parts is None and split is None):
        return pairs
    if parts is None:
        raise DataError(f"{path} brings no split and has no folder {split!r}")
    wanted = _part(split)
    return [pair for pair, part in zip(pairs, parts, strict=True) if part == wanted]


def _part(split: str | None) -> int:
    """The number of a part by its name; that of the test part where nothing is said."""
    if split is not None and split not in PARTS:
        raise UsageError(f"split must be one of {', '.join(PARTS)}, got {split!r}")
    return fewshot.TEST if split is None else PARTS.index(split)


def labelled_features(path: str | Path, split: str | None = None) -> tuple[Tensor, Tensor, Tensor, list[str] | None]:
    """Unit vectors of images (N, d) and classes (C, d), labels (N), and class names where the file has them.

    Either a file of ``leafward data features``, of which the part `split` is taken (train, val or test; test where
    nothing is said), or one with the arrays image, text and label.
    """
    if PAIR[0] not in array_names(Path(path)):
        if split is not None:
            raise UsageError(f"{path} has no parts, so that split cannot be {split!r}")
        found = read_vectors(path, (*PAIR, "labels"))
        return found["image_features"], found["text_features"], found["labels"], None
    data = fewshot.read_feature_set(path)
    rows = data.part(_part(split))
    if not len(rows):
        raise DataError(f"{path} has no images in its part {split or 'test'!r}")
    return normalize(data.images[rows], dim=-1), normalize(data.texts, dim=-1), data.labels[rows], [*data.class_names]


def score(
    image: Tensor,
    classes: Tensor,
    label: Tensor,
    names: Sequence[str] | None = None,
    tax: Taxonomy | None = None,
    compare: Comparison | None = None,
) -> dict[str, Any]:
    """Top-1 and top-5 of vectors (M, d) against classes (C, d), labels (M) numbers of classes; by the cosine, where
    `compare` says nothing else.

    With a taxonomy whose leaves are `names` (C): the hierarchical metrics of the most probable class, of the node of
    least expected distance and of the deepest node with a probability of at least ½, with the share of those that are
    true, that is, the class or above it.
    """
    if label.shape != (len(image),) or int(label.min()) < 0 or int(label.max()) >= len(classes):
        raise UsageError(f"label must name one of {len(classes)} classes for each of {len(image)} images")
    compare = compare or Comparison()
    logits = compare.logits(image, classes)
    ranked = logits.topk(min(5, len(classes)), dim=1).indices
    right = ranked == label.to(ranked.device)[:, None]
    found: dict[str, Any] = {
        "score": compare.score,
        "images": len(image),
        "classes": len(classes),
        "top1": float(right[:, 0].double().mean()),
        "top5": float(right.any(dim=1).double().mean()),
    }
    if tax is not None:
        if names is None:
            raise UsageError("with a taxonomy, names must say which leaf each class is")
        columns = torch.from_numpy(tax.leaf_ids(list(names), "names"))
        truth = columns[label.cpu()]
        found["hierarchical"] = metrics.evaluate(tax, columns[ranked.cpu()], truth).to_dict()
        answers = decided(tax, logits.double().softmax(dim=1).cpu(), names)
        found |= {name: metrics.evaluate(tax, nodes, truth).to_dict() for name, nodes in answers.items()}
        found["backed_off"]["true"] = float(tax.entails(answers["backed_off"], truth).mean())
    return found
