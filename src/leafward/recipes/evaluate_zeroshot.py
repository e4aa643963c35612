"""``leafward evaluate TARGET --task zeroshot``: classes by their names in prompts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor

SUMMARY = "Zero-shot classification with prompt templates: top-1, top-5 and, with a taxonomy, the hierarchical metrics."


@dataclass(kw_only=True)
class Args:
    target: Annotated[str | None, tyro.conf.Positional] = None
    """Model directory or name, open_clip:NAME, or a run directory; none with --features."""
    data: Path | None = None
    """Folder with one folder of images for each class, or a .parquet file. None: the test images of a hyperclip run."""
    label: str = "label"
    """Column of the class in a .parquet file."""
    split: str | None = None
    """Part of the data: value of the column split, or folder of that name; of a feature file train, val or test."""
    templates: Path | None = None
    """Prompts, one on each line, with {} for the class; default: "a photo of a {}."."""
    classes: Path | None = None
    """Names of the classes, one on each line, in the order of the features, where the feature file has none."""
    taxonomy: str | None = None
    """Taxonomy whose leaves are the classes: .csv, .json, .txt, wordnet or wordnet:NODE (the nouns under it)."""
    features: Path | None = None
    """Vectors in place of a model: a file of leafward data features (its test part counts), or arrays image, text (one
    row for each class) and label, the number of the class."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute."""
    out: Path | None = None
    """A folder for evaluation.json and report.html, or NAME.json, with the page beside it as NAME.html."""


def run(args: Args, console: Console) -> dict[str, Any]:
    from leafward.errors import DataError, UsageError
    from leafward.recipes._class_taxonomy import class_taxonomy
    from leafward.recipes._encoder_evaluation import one_source, shares, show
    from leafward.tasks.captions import read_lines
    from leafward.tasks.zeroshot import labelled_features, score

    one_source(args.target, args.features)
    if args.features is not None:
        image, text, label, names = labelled_features(args.features, args.split)
        if args.taxonomy is not None and (names is None or args.classes is not None):
            if args.classes is None:
                raise UsageError("--taxonomy with --features needs --classes, the names of the rows of text")
            names = read_lines(args.classes)
            if len(names) != len(text):
                raise DataError(f"{args.classes} names {len(names)} classes, but there are {len(text)} rows of text")
    else:
        image, text, label, names = _by_model(args)
    # The classes are not known before: WordNet's part above them is taken.
    tax = None if args.taxonomy is None or names is None else class_taxonomy(args.taxonomy, names)
    scores = score(image, text, label, names, tax)
    numbers = shares({"top1": "top-1 accuracy", "top5": "top-5 accuracy"}, scores, len(image))
    return show(console, "zeroshot", args, scores, numbers)


def _by_model(args: Args) -> tuple[Tensor, Tensor, Tensor, list[str]]:
    import torch

    from leafward.recipes._encoder_evaluation import open_target
    from leafward.tasks.zeroshot import TEMPLATES, class_vectors, labelled_images, read_templates

    if args.data is None:
        images, labels, templates = _of_run(args.target)
    else:
        (images, labels), templates = labelled_images(args.data, args.label, args.split), TEMPLATES
    if args.templates is not None:
        templates = read_templates(args.templates)
    encoder = open_target(args.target, args.device).encoder
    names = sorted(set(labels))
    number = {name: i for i, name in enumerate(names)}
    label = torch.tensor([number[name] for name in labels])
    return encoder.encode_image(images), class_vectors(encoder, names, templates), label, names


def _of_run(target: str | None) -> tuple[list[Any], list[str], tuple[str, ...]]:
    """The test images of a run of leafward train hyperclip, the names of their classes, and its prompt."""
    from leafward.engine import RunDirectory, from_dict
    from leafward.errors import UsageError
    from leafward.recipes.hyperclip import Config

    run = RunDirectory.open(target) if target and (Path(target) / "config.yaml").is_file() else None
    if run is None or run.recipe != "hyperclip":
        raise UsageError("--data must name the labelled images; vectors go to --features, without TARGET")
    from leafward.recipes._hyperclip_training import read

    config = from_dict(Config, run.config)
    if config.score != "cosine":
        raise UsageError(
            f"{target} was trained for the score {config.score}, and zero-shot is by the cosine; name --data"
        )
    data = read(config)
    rows = data.test.tolist()
    return (
        [data.files[row] for row in rows],
        [data.names[int(data.labels[row])] for row in rows],
        (config.template,),
    )
