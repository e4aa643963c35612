"""``leafward evaluate RUN --task sample --prompt TEXT``: text that a trained language model goes on with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

if TYPE_CHECKING:
    from rich.console import Console

SUMMARY = "Text that a trained language model goes on with."


@dataclass
class Args:
    target: Annotated[Path, tyro.conf.Positional]
    """A run directory, or a folder with a model."""
    prompt: str = ""
    """What to go on from; empty begins a document."""
    tokens: int | None = None
    """Tokens to add at most; by default 100, or as many as the model's context has room for."""
    temperature: float = 0.8
    """0 takes the likeliest token each time."""
    top_p: float = 1.0
    """Draw from the likeliest tokens that together have this probability."""
    seed: int = 0
    """Another seed gives another text."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute."""
    out: Path | None = None
    """A folder for evaluation.json and report.html, or NAME.json, with the page beside it as NAME.html."""


def run(args: Args, console: Console) -> dict[str, Any]:
    from leafward.engine import session
    from leafward.engine.evaluation import write_evaluation
    from leafward.report import Result
    from leafward.systems.helm import load_model, sample
    from leafward.systems.helm.open import model_folder

    with session(args.device) as cluster:
        model, tokenizer = load_model(model_folder(args.target), cluster.device)
        text = sample(
            model,
            tokenizer,
            args.prompt,
            tokens=args.tokens,
            temperature=args.temperature,
            top_p=args.top_p,
            seed=args.seed,
        )
    console.print(args.prompt + text, markup=False)
    values = {"model": str(args.target), "prompt": args.prompt, "text": text, "seed": args.seed}
    made = Result("A sample", f"{args.target}, temperature {args.temperature:g}, seed {args.seed}", values=values)
    made.text(args.prompt + text)
    return write_evaluation(args.out, made, console)
