"""Zero-shot classification: images against the embeddings of class names in prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from leafward.adapters.encoders import Encoder
from leafward.errors import DataError, UsageError
from leafward.hierarchy import Taxonomy, decide, metrics
from leafward.tasks import fewshot
from leafward.tasks.captions import parquet_columns, read_lines, readable
from leafward.tasks.features import load_arrays, read_features
from leafward.tasks.images import ENDINGS

TEMPLATES = ("a photo of a {}.",)
#: CLIP's usual temperature: probabilities are softmax(100 · cosine)
LOGIT_SCALE = 100.0


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


def class_vectors(encoder: Encoder, names: Sequence[str], templates: Sequence[str] = TEMPLATES) -> Tensor:
    """For each class the mean over the templates of its unit embeddings, scaled to unit length: (C, d)."""
    prompts = [template.format(readable(name)) for name in names for template in checked_templates(templates)]
    features = encoder.encode_text(prompts)
    return normalize(features.view(len(names), len(templates), -1).mean(dim=1), dim=-1)


def labelled_images(path: str | Path, label: str = "label", split: str | None = None) -> tuple[list[Any], list[str]]:
    """Images and the names of their classes: a folder with one folder of images for each class, or a parquet file
    with the images' bytes (column jpeg or image) and the class in column `label`.

    `split`: take the rows whose column split says so, or the folder of that name; where nothing is said, the folder
    test of one with train and test.
    """
    path = Path(path)
    if path.suffix == ".parquet":
        rows = parquet_columns(path, ("jpeg", "image", "split", label))
        rows = [row for row in rows if split is None or row.get("split") == split]
        try:
            pairs = [(row["jpeg"] if "jpeg" in row else row["image"], str(row[label])) for row in rows]
        except KeyError as error:
            raise DataError(f"{path} lacks the column {error}") from error
    else:
        parts = split is None and (path / "train").is_dir() and (path / "test").is_dir()
        base = path / ("test" if parts else split or "")
        files = sorted(file for file in base.glob("*/*") if file.suffix.lower() in ENDINGS)
        pairs = [(file, file.parent.name) for file in files]
    if not pairs:
        raise DataError(f"{path} holds no labelled image" + (f" of split {split!r}" if split else ""))
    images, labels = zip(*pairs, strict=True)
    return list(images), list(labels)


def labelled_features(path: str | Path, split: str | None = None) -> tuple[Tensor, Tensor, Tensor, list[str] | None]:
    """Unit vectors of images (N, d) and classes (C, d), labels (N), and class names where the file has them.

    Either a file of ``leafward data features``, of which the part `split` is taken (train, val or test; test where
    nothing is said), or one with the arrays image, text and label.
    """
    arrays, _ = load_arrays(path)
    if "image_features" not in arrays:
        if split is not None:
            raise UsageError(f"{path} has no parts, so that split cannot be {split!r}")
        found = read_features(path, ("image", "text", "label"))
        return found["image"], found["text"], found["label"], None
    parts = {"train": fewshot.TRAIN, "val": fewshot.VALIDATION, "test": fewshot.TEST}
    part = "test" if split is None else split
    if part not in parts:
        raise UsageError(f"split of a feature file must be one of {', '.join(parts)}, got {split!r}")
    data = fewshot.read_features(path)
    rows = data.part(parts[part])
    if not len(rows):
        raise DataError(f"{path} has no images in its part {part!r}")
    return normalize(data.images[rows], dim=-1), normalize(data.texts, dim=-1), data.labels[rows], [*data.class_names]


def score(
    image: Tensor, classes: Tensor, label: Tensor, names: Sequence[str] | None = None, tax: Taxonomy | None = None
) -> dict[str, Any]:
    """Top-1 and top-5 of unit vectors (M, d) against classes (C, d), labels (M) numbers of classes.

    With a taxonomy whose leaves are `names` (C): the hierarchical metrics of the most probable class, and those of the
    answer of least expected distance.
    """
    if label.shape != (len(image),) or int(label.min()) < 0 or int(label.max()) >= len(classes):
        raise UsageError(f"label must name one of {len(classes)} classes for each of {len(image)} images")
    logits = LOGIT_SCALE * (image @ classes.mT)
    ranked = logits.topk(min(5, len(classes)), dim=1).indices
    right = ranked == label.to(ranked.device)[:, None]
    found: dict[str, Any] = {
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
        answer = decide.expected_cost(tax, logits.double().softmax(dim=1).cpu(), "distance", list(names))
        found["least_expected_distance"] = metrics.evaluate(tax, answer, truth).to_dict()
    return found
