"""``leafward evaluate TARGET --task hyperlex``: graded lexical entailment."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

if TYPE_CHECKING:
    from rich.console import Console

    from leafward.report import Estimate

SUMMARY = "HyperLex: Spearman's ρ of the angle about the root against people's ratings; all, nouns, verbs, splits."


@dataclass(kw_only=True)
class Args:
    target: Annotated[str | None, tyro.conf.Positional] = None
    """Model directory or name, open_clip:NAME@WEIGHTS, or a run directory; none with --features."""
    data: Path
    """HyperLex's archive: the .zip, its folder, or one of its .txt files."""
    template: str = "{}"
    """Prompt around each word; {} stands for the word."""
    features: Path | None = None
    """Vectors in place of a model: text_features, one row for each distinct word in order of appearance, and
    root."""
    geometry: Literal["euclidean", "lorentz"] | None = None
    """Space of the angles; None: that of the run, else euclidean."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute."""
    out: Path | None = None
    """A folder for evaluation.json and report.html, or NAME.json, with the page beside it as NAME.html."""


def run(args: Args, console: Console) -> dict[str, Any]:
    from leafward.data.features import read_vectors
    from leafward.encoders.evaluation import one_source, show
    from leafward.encoders.zeroshot import checked_templates
    from leafward.errors import DataError
    from leafward.systems.radial.hyperlex import read_hyperlex, score, words
    from leafward.systems.radial.roots import open_rooted

    one_source(args.target, args.features)
    (template,) = checked_templates([args.template], "template")
    parts = read_hyperlex(args.data)
    if args.features is not None:
        found = read_vectors(args.features, ("text_features", "root"))
        if found["root"].numel() != found["text_features"].shape[-1]:
            raise DataError(f"{args.features}: root must be one vector, got shape {tuple(found['root'].shape)}")
        scores = score(parts, found["text_features"], found["root"].view(-1), args.geometry or "euclidean")
    else:
        opened = open_rooted(args.target, args.device)
        text = opened.encoder.encode_text([template.replace("{}", word) for word in words(parts)])
        scores = score(parts, text, opened.root([""])[0], args.geometry or opened.geometry, opened.c)
    return show(console, "hyperlex", args, scores, _numbers(scores))


def _numbers(scores: dict[str, dict[str, float]]) -> list[Estimate]:
    from leafward.report import Estimate
    from leafward.stats.intervals import rank_correlation_interval

    return [
        Estimate(
            found["angle"],
            rank_correlation_interval(found["angle"], int(found["pairs"])),
            f"Spearman's ρ, {part.replace('_', ' ')}",
            better="higher",
            note=f"by angle; by cosine, which knows no direction, {found['cosine']:.3f}; {found['pairs']:,} pairs",
        )
        for part, found in scores.items()
    ]
