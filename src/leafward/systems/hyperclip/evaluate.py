"""``leafward evaluate TARGET --task zeroshot``: classes by their names in prompts.

Images and classes are compared by the cosine; those of a run of leafward train hyperclip by the score of that run.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from leafward.errors import DataError, UsageError

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor

    from leafward.encoders.zeroshot import Comparison
    from leafward.systems.hyperclip.config import Config

SUMMARY = "Zero-shot classification with prompt templates: top-1, top-5 and, with a taxonomy, the hierarchical metrics."


@dataclass(kw_only=True)
class Args:
    target: Annotated[str | None, tyro.conf.Positional] = None
    """Model directory or name, open_clip:NAME@WEIGHTS, or a run directory; none with --features."""
    data: Path | None = None
    """Labelled images: a folder as for leafward data features, whose test part counts where it brings a split, or a
    .parquet file. None: the test images of a hyperclip run."""
    label: str = "label"
    """Column of the class in a .parquet file."""
    split: str | None = None
    """Part of the data: value of the column split, or folder of that name; train, val or test of a feature file or a
    folder with a split file."""
    templates: Path | None = None
    """Prompts, one on each line, with {} for the class; default: that of a hyperclip run, else "a photo of a {}."."""
    classes: Path | None = None
    """Names of the classes, one on each line, in the order of the features, where the feature file has none."""
    taxonomy: str | None = None
    """Taxonomy whose leaves are the classes: .csv, .json, .txt, wordnet or wordnet:NODE (the nouns under it)."""
    features: Path | None = None
    """Vectors in place of a model: a file of leafward data features (its test part counts), or the arrays
    image_features, text_features (one row for each class) and labels under their short names, image, text and label."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute."""
    out: Path | None = None
    """A folder for evaluation.json and report.html, or NAME.json, with the page beside it as NAME.html."""


def run(args: Args, console: Console) -> dict[str, Any]:
    from leafward.data.captions import read_lines
    from leafward.data.taxonomy import class_taxonomy
    from leafward.encoders.evaluation import one_source, shares, show
    from leafward.encoders.zeroshot import labelled_features, score

    one_source(args.target, args.features)
    compare = None
    if args.features is not None:
        image, text, label, names = labelled_features(args.features, args.split)
        if args.taxonomy is not None and (names is None or args.classes is not None):
            if args.classes is None:
                raise UsageError("--taxonomy with --features needs --classes, the names of the rows of text")
            names = read_lines(args.classes)
            if len(names) != len(text):
                raise DataError(f"{args.classes} names {len(names)} classes, but there are {len(text)} rows of text")
    else:
        image, text, label, names, compare = _by_model(args)
    # The classes are not known before: WordNet's part above them is taken.
    tax = None if args.taxonomy is None or names is None else class_taxonomy(args.taxonomy, names)
    scores = score(image, text, label, names, tax, compare)
    numbers = shares({"top1": "top-1 accuracy", "top5": "top-5 accuracy"}, scores, len(image))
    return show(console, "zeroshot", args, scores, numbers)


def _by_model(args: Args) -> tuple[Tensor, Tensor, Tensor, list[str], Comparison]:
    import torch

    from leafward.encoders.evaluation import open_target
    from leafward.encoders.zeroshot import TEMPLATES, Comparison, class_vectors, labelled_images, read_templates

    config = _hyperclip(args.target)
    if args.data is not None:
        images, labels = labelled_images(args.data, args.label, args.split)
        names = sorted(set(labels))
        number = {name: place for place, name in enumerate(names)}
        label = torch.tensor([number[name] for name in labels])
    elif config is not None:
        if args.split is not None:
            raise UsageError("--split goes with --data: without it the test images of the run are scored")
        images, label, names = _test_images(config)
    else:
        raise UsageError("--data must name the labelled images; vectors go to --features, without TARGET")
    templates, compare = TEMPLATES, Comparison()
    if config is not None:
        templates, adapt = (config.data.template,), config.adapt
        compare = Comparison(adapt.score, adapt.c, adapt.radius_weight, config.scale)
    if args.templates is not None:
        templates = read_templates(args.templates)
    target = args.target
    if config is not None and config.adapt.method == "frozen":  # such a run holds no model of its own
        target = config.model
    encoder = open_target(target, args.device)
    unit = compare.score == "cosine"  # the other scores see the norms
    image = encoder.encode_image(images, unit=unit)
    return image, class_vectors(encoder, names, templates, unit=unit), label, names, compare


def _hyperclip(target: str | None) -> Config | None:
    """The configuration of a run of leafward train hyperclip; None where the target is something else."""
    from leafward.config import checked
    from leafward.engine import RunDirectory, is_run
    from leafward.systems.hyperclip.config import Config

    run = RunDirectory.open(target) if target and is_run(target) else None
    return checked(Config, run.config) if run is not None and run.recipe == "hyperclip" else None


def _test_images(config: Config) -> tuple[list[Any], Tensor, list[str]]:
    """The test images of a run, their labels, and the names of all its classes."""
    from leafward.systems.hyperclip.methods import read

    data = read(config)
    return [data.files[row] for row in data.test.tolist()], data.labels[data.test], list(data.names)
