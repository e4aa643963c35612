"""``leafward evaluate TARGET --task hierarcaps``: paths from the root to an image, and the order of the radii."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

if TYPE_CHECKING:
    import numpy as np
    from rich.console import Console
    from torch import Tensor

    from leafward.report import Estimate, Result
    from leafward.systems.radial.hierarcaps import Candidates, Scores

SUMMARY = "HierarCaps: precision and recall of caption paths by 50 radius thresholds, and τ_d of radius against level."


@dataclass(kw_only=True)
class Args:
    target: Annotated[str | None, tyro.conf.Positional] = None
    """Model directory or name, open_clip:NAME@WEIGHTS, or a run directory; none with --features."""
    data: Path
    """Test chains, general to specific: .csv, .jsonl or .parquet, as HierarCaps has them."""
    images: Path | None = None
    """Folder of the images that the chains name, where the file does not hold them."""
    second: Path | None = None
    """Captions file whose other captions of the same images stand for the images (for encoders without images)."""
    features: Path | None = None
    """Vectors in place of a model: text_features, one row for each caption, chain after chain; root; image_features,
    one for each image in order of appearance (.safetensors or .npz)."""
    steps: int = 50
    """Thresholds on the radius."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute."""
    out: Path | None = None
    """A folder for evaluation.json and report.html, or NAME.json, with the page beside it as NAME.html."""


def run(args: Args, console: Console) -> dict[str, Any]:
    from leafward.data.captions import read_captions
    from leafward.encoders.evaluation import one_source, show
    from leafward.systems.radial.hierarcaps import Candidates, chain_radii, score
    from leafward.systems.radial.roots import open_rooted
    from leafward.systems.radial.suite import find_queries

    one_source(args.target, args.features)
    candidates = Candidates(read_captions(args.data))
    asked: tuple[Tensor | None, Any] = None, None
    if args.features is not None:
        text, root, image = _by_features(args, candidates)
        asked = image, None
    else:
        opened = open_rooted(args.target, args.device)
        text, root = opened.encoder.encode_text(candidates.texts), opened.root(candidates.roots)
        queries = find_queries(candidates, args.data, opened.encoder, args.second, args.images)
        if queries is not None:
            asked = queries.encode(opened.encoder), queries.keys
    scores = score(candidates, text, root, *asked, steps=args.steps)
    radii = chain_radii(candidates, text, root).double().cpu().numpy()
    return show(console, "hierarcaps", args, scores.to_dict(), _numbers(scores), lambda page: _draw(page, radii))


def _draw(page: Result, radii: np.ndarray) -> None:
    """The radius against the level, over all chains: radii (chains, levels)."""
    import numpy as np

    from leafward.report import legend, line_with_band, new_figure, points_with_bars
    from leafward.stats.intervals import mean_interval

    levels = np.arange(1, radii.shape[1] + 1)
    means, ends = zip(*(mean_interval(column, 0.0) for column in radii.T), strict=True)
    low, high = np.array([(mean, mean) if end is None else end for mean, end in zip(means, ends, strict=True)]).T
    figure, axes = new_figure()
    points_with_bars(axes, levels, means, low, high, label="mean, 95 % interval")
    spread = np.quantile(radii, [0.1, 0.9], axis=0)
    line_with_band(axes, levels, np.median(radii, axis=0), *spread, label="median, and 80 % of the chains")
    axes.set(xlabel="level, general to specific", ylabel="radius: distance from the root", xticks=levels)
    legend(axes)
    page.section("Radius by level")
    page.figure(figure, f"How far from the root the captions of each level lie, over {len(radii)} chains.")


NAMES = {"tau": "τ_d: radius against level", "precision": "path precision", "recall": "path recall"}


def _numbers(scores: Scores) -> list[Estimate]:
    from leafward.report import Estimate

    found = scores.to_dict()
    return [
        Estimate(found[name], scores.intervals.get(name), label, better="higher")
        for name, label in NAMES.items()
        if found[name] is not None
    ]


def _by_features(args: Args, candidates: Candidates) -> tuple[Tensor, Tensor, Tensor | None]:
    """The vectors of a file: of the distinct texts (U, d), of the roots (R, d), and of the images where it has them."""
    import torch

    from leafward.data.features import read_vectors
    from leafward.errors import DataError

    assert args.features is not None
    found = read_vectors(args.features, ("text_features", "root"), ("image_features",))
    if len(found["text_features"]) != candidates.ids.numel():
        raise DataError(
            f"{args.features}: text_features must have one row for each of the {candidates.ids.numel()} captions of "
            f"{args.data}, chain after chain, got {len(found['text_features'])}"
        )
    text = torch.empty(len(candidates.texts), found["text_features"].shape[-1])
    text[candidates.ids.ravel()] = found["text_features"]  # equal captions have equal rows
    root = found["root"].view(-1, text.shape[-1])
    if len(root) == 1:  # serves all
        root = root.expand(len(candidates.roots), -1)
    return text, root, found.get("image_features")
