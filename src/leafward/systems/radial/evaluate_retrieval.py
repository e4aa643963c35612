"""``leafward evaluate TARGET --task retrieval``: images from captions and captions from images."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor

SUMMARY = "Image–text retrieval: recall at k both ways, on images with captions or on features."


@dataclass(kw_only=True)
class Args:
    target: Annotated[str | None, tyro.conf.Positional] = None
    """Model directory or name, open_clip:NAME@WEIGHTS, or a run directory; none with --features."""
    data: Path | None = None
    """Captions with their images: .csv, .jsonl or .parquet; the finest caption of each row counts."""
    images: Path | None = None
    """Folder of the images that the captions name, where the file does not hold them."""
    features: Path | None = None
    """Vectors in place of a model: image_features, text_features and, where they do not pair up, owner, the image's
    number for each text (.safetensors, .npz), or .npy of shape (2, N, d)."""
    ks: tuple[int, ...] = (1, 5, 10)
    """How many answers count."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute."""
    out: Path | None = None
    """A folder for evaluation.json and report.html, or NAME.json, with the page beside it as NAME.html."""


def run(args: Args, console: Console) -> dict[str, Any]:
    from leafward.data.features import read_vectors
    from leafward.encoders.evaluation import one_source, shares, show
    from leafward.systems.radial.retrieval import recall_at_k

    one_source(args.target, args.features)
    if args.features is not None:
        found = read_vectors(args.features, ("image_features", "text_features"), ("owner",))
        image, text, owner = found["image_features"], found["text_features"], found.get("owner")
    else:
        image, text, owner = _by_model(args)
    scores = recall_at_k(image, text, owner, args.ks)
    numbers = shares({f"image_to_text@{k}": f"image → text, R@{k}" for k in args.ks}, scores, len(image))
    numbers += shares({f"text_to_image@{k}": f"text → image, R@{k}" for k in args.ks}, scores, len(text))
    return show(console, "retrieval", args, {"images": len(image), "texts": len(text), **scores}, numbers)


def _by_model(args: Args) -> tuple[Tensor, Tensor, Tensor]:
    import torch

    from leafward.data.captions import Captions, image_key, read_captions
    from leafward.encoders.evaluation import open_target
    from leafward.errors import UsageError
    from leafward.systems.radial.hierarcaps import Candidates
    from leafward.systems.radial.suite import find_queries

    if args.data is None:
        raise UsageError("--data must name the captions and their images; vectors go to --features, without TARGET")
    encoder = open_target(args.target, args.device)
    captions = [Captions.chain(each.texts[-1:], image=each.image) for each in read_captions(args.data) if each.image]
    if not captions:
        raise UsageError(f"{args.data} names no image")
    candidates = Candidates(captions)
    queries = find_queries(candidates, args.data, encoder, None, args.images)
    if queries is None:
        raise UsageError("there are no images: the model has no image side, or --images is missing")
    number = {key: i for i, key in enumerate(candidates.images)}
    owner = torch.tensor([number[image_key(each.image or "")] for each in captions], device=encoder.device)
    text = encoder.encode_text([each.texts[0] for each in captions])
    return queries.encode(encoder), text, owner
