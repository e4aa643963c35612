"""``leafward evaluate TARGET --task breeds``: classification at every level of the BREEDS tree."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

if TYPE_CHECKING:
    import numpy as np
    from rich.console import Console
    from torch import Tensor

    from leafward.encoders.encoder import Encoder
    from leafward.report import Result
    from leafward.systems.radial.breeds import Breeds

SUMMARY = "BREEDS: images, or names of classes, assigned to the nodes of every level of its ImageNet tree."


@dataclass(kw_only=True)
class Args:
    target: Annotated[str | None, tyro.conf.Positional] = None
    """Model directory or name, open_clip:NAME@WEIGHTS, or a run directory; none with --features."""
    tree: Path
    """Folder with BREEDS' class_hierarchy.txt, node_names.txt and dataset_class_info.json."""
    data: Path | None = None
    """Images labelled by WordNet id: a folder of folders, or a .parquet file. None: the names of the classes are
    classified, each among the nodes above it."""
    label: str = "wnid"
    """Column of the WordNet id in a .parquet file."""
    split: str | None = None
    """Part of the data: value of the column split, or folder of that name."""
    templates: Path | None = None
    """Prompts, one on each line, with {} for the name; default: "a photo of a {}."."""
    features: Path | None = None
    """Vectors in place of a model: image_features, text_features (one row for each node of the tree, in its order) and
    labels, the number of the node of each image's class."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute."""
    out: Path | None = None
    """A folder for evaluation.json and report.html, or NAME.json, with the page beside it as NAME.html."""


def run(args: Args, console: Console) -> dict[str, Any]:
    from leafward.data.features import read_vectors
    from leafward.encoders.evaluation import one_source, open_target, shares, show
    from leafward.encoders.zeroshot import TEMPLATES, class_vectors, read_templates
    from leafward.report import Estimate
    from leafward.systems.radial.breeds import read_breeds, score

    one_source(args.target, args.features)
    breeds = read_breeds(args.tree)
    if args.features is not None:
        found = read_vectors(args.features, ("image_features", "text_features", "labels"))
        scores = score(breeds, found["image_features"], found["labels"].numpy(), found["text_features"])
    else:
        encoder = open_target(args.target, args.device)
        templates = TEMPLATES if args.templates is None else read_templates(args.templates)
        nodes = class_vectors(encoder, breeds.words, templates)
        queries, label = _queries(args, breeds, encoder, nodes)
        scores = score(breeds, queries, label, nodes, with_leaf=args.data is not None)
    numbers = [Estimate(scores["mean_accuracy"], name="mean accuracy over the depths", better="higher")]
    numbers += shares({"consistent_paths": "paths that hang together"}, scores, scores["queries"])
    return show(console, "breeds", args, scores, numbers, lambda page: _draw(page, breeds, scores))


def _draw(page: Result, breeds: Breeds, scores: dict[str, Any]) -> None:
    """Accuracy against depth, beside what guessing among the nodes of that depth would give."""
    from leafward.report import legend, line_with_band, new_figure, points_with_bars
    from leafward.stats.intervals import share_interval

    depths, accuracy = zip(*scores["accuracy_by_depth"].items(), strict=True)
    counts = scores["queries_by_depth"].values()
    ends = [share_interval(round(share * count), count) for share, count in zip(accuracy, counts, strict=True)]
    figure, axes = new_figure()
    points_with_bars(axes, depths, accuracy, *zip(*ends, strict=True), label="nearest node")
    guessed = [1.0 / float((breeds.tax.depth == depth).sum()) for depth in depths]
    line_with_band(axes, depths, guessed, label="guessing", linestyle="--")
    axes.set(xlabel="depth in the tree (the root is 0)", ylabel="accuracy", ylim=(0.0, 1.02), xticks=depths)
    legend(axes, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    page.section("Accuracy by depth")
    page.figure(figure, "Share of the queries whose nearest node of a depth is the right one, with Wilson's intervals.")


def _queries(args: Args, breeds: Breeds, encoder: Encoder, nodes: Tensor) -> tuple[Tensor, np.ndarray]:
    """What is classified, and the node of its class; images of classes that the tree lacks are passed over."""
    import torch

    from leafward.encoders.zeroshot import labelled_images
    from leafward.errors import DataError

    if args.data is None:
        leaves = breeds.tax.leaves
        return nodes[torch.from_numpy(leaves)], leaves
    images, labels = labelled_images(args.data, args.label, args.split)
    pairs = [(image, name) for image, name in zip(images, labels, strict=True) if name in breeds.tax]
    if not pairs:
        raise DataError(f"no image of {args.data} is of a class of the tree; labels must be WordNet ids, n01440764")
    return encoder.encode_image([image for image, _ in pairs]), breeds.tax.ids([name for _, name in pairs])
