"""``leafward evaluate TARGET --task hierarcaps``: paths from the root to an image, and the order of the radii."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

if TYPE_CHECKING:
    from rich.console import Console

    from leafward.report import Number
    from leafward.tasks.hierarcaps import Candidates, Scores

SUMMARY = "HierarCaps: precision and recall of caption paths by 50 radius thresholds, and τ_d of radius against level."


@dataclass(kw_only=True)
class Args:
    target: Annotated[str | None, tyro.conf.Positional] = None
    """Model directory or name, open_clip:NAME, or a run directory; none with --features."""
    data: Path
    """Test chains, general to specific: .csv, .jsonl or .parquet, as HierarCaps has them."""
    images: Path | None = None
    """Folder of the images that the chains name, where the file does not hold them."""
    second: Path | None = None
    """Captions file whose other captions of the same images stand for the images (for encoders without images)."""
    features: Path | None = None
    """Vectors in place of a model: text, one row for each caption, chain after chain; root; image, one for each image
    in order of appearance (.safetensors or .npz)."""
    steps: int = 50
    """Thresholds on the radius."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute."""
    out: Path | None = None
    """A folder for evaluation.json and report.html, or NAME.json, with the page beside it as NAME.html."""


def run(args: Args, console: Console) -> dict[str, Any]:
    from leafward.recipes._encoder_evaluation import one_source, open_target, show
    from leafward.recipes._radial_suite import find_queries
    from leafward.tasks.captions import read_captions
    from leafward.tasks.hierarcaps import Candidates, score

    one_source(args.target, args.features)
    candidates = Candidates(read_captions(args.data))
    if args.features is not None:
        scores = _by_features(args, candidates)
    else:
        opened = open_target(args.target, args.device)
        text, root = opened.encoder.encode_text(candidates.texts), opened.root(candidates.roots)
        queries = find_queries(candidates, args.data, opened.encoder, args.second, args.images)
        asked = (None, None) if queries is None else (queries.encode(opened.encoder), queries.keys)
        scores = score(candidates, text, root, *asked, steps=args.steps)
    return show(console, "hierarcaps", args, scores.to_dict(), _numbers(scores))


NAMES = {"tau": "τ_d: radius against level", "precision": "path precision", "recall": "path recall"}


def _numbers(scores: Scores) -> list[Number]:
    from leafward.report import Number

    found = scores.to_dict()
    return [
        Number(label, found[name], interval=scores.intervals.get(name), better="higher")
        for name, label in NAMES.items()
        if found[name] is not None
    ]


def _by_features(args: Args, candidates: Candidates) -> Scores:
    import torch

    from leafward.errors import DataError
    from leafward.tasks.features import read_features
    from leafward.tasks.hierarcaps import score

    assert args.features is not None
    found = read_features(args.features, ("text", "root"), ("image",))
    if len(found["text"]) != candidates.ids.numel():
        raise DataError(
            f"{args.features}: text must have one row for each of the {candidates.ids.numel()} captions of "
            f"{args.data}, chain after chain, got {len(found['text'])}"
        )
    text = torch.empty(len(candidates.texts), found["text"].shape[-1])
    text[candidates.ids.ravel()] = found["text"]  # equal captions have equal rows
    root = found["root"].view(-1, text.shape[-1])
    if len(root) == 1:  # serves all
        root = root.expand(len(candidates.roots), -1)
    return score(candidates, text, root, found.get("image"), steps=args.steps)
