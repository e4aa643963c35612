"""What the evaluations of encoders share: opening the target, the answer on screen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leafward.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from leafward.encoders.encoder import Encoder
    from leafward.report import Result
    from leafward.stats import Estimate


def open_target(target: str | None, device: str) -> Encoder:
    """A model by name or directory, or of a run directory, on its device."""
    if target is None:
        raise UsageError("TARGET is missing: give a model, a run directory, or --features FILE")
    from leafward.encoders.encoder import load_encoder
    from leafward.engine import session

    with session(device) as cluster:
        return load_encoder(target).to(cluster.device)


def one_source(target: str | None, features: Path | None) -> None:
    """Refuse both a model and features, and neither."""
    if (target is None) == (features is None):
        raise UsageError("give either TARGET, a model or run, or --features FILE")


def show(
    console: Console,
    title: str,
    args: Any,
    found: Mapping[str, Any],
    numbers: Sequence[Estimate],
    draw: Callable[[Result], None] | None = None,
) -> dict[str, Any]:
    """The numbers of a result as a table, and as files where --out asks for them; returns the result.

    draw: adds figures to the page.
    """
    from leafward.engine.evaluation import write_evaluation
    from leafward.report import Result

    source = str(args.target if args.features is None else args.features)
    made = Result(f"Evaluation: {title}", source, numbers, values={"task": title, **found})
    if draw is not None:
        draw(made)
    made.scores(found)
    return write_evaluation(args.out, made, console, title)


def shares(names: Mapping[str, str], found: Mapping[str, Any], total: int) -> list[Estimate]:
    """Headline numbers that are shares of `total` queries, with Wilson's intervals; names: key of `found` -> label."""
    from leafward.stats import Estimate, share_interval

    return [
        Estimate(found[key], share_interval(round(found[key] * total), total, "queries"), label, better="higher")
        for key, label in names.items()
        if key in found
    ]
