"""What the evaluations of encoders share: opening the target, the answer on screen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leafward.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from leafward.encoders.encoder import Encoder
    from leafward.report import Number, Page


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
    numbers: Sequence[Number],
    draw: Callable[[Page], None] | None = None,
) -> dict[str, Any]:
    """The numbers of a result as a table, and as files where --out asks for them; returns the result.

    draw: adds figures to the page.
    """
    from rich.markup import escape
    from rich.table import Table

    from leafward.config import flatten
    from leafward.engine.evaluation import evaluation_page, write_evaluation

    table = Table("", "value", title=title)
    for name, value in flatten(found).items():
        if value != {}:
            shown = "–" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)
            table.add_row(escape(name), escape(shown))
    console.print(table)
    result = {"task": title, **found, "headline": [number.to_json() for number in numbers]}
    if args.out is not None:
        source = str(args.target if args.features is None else args.features)
        page = evaluation_page(f"Evaluation: {title}", source, numbers, found, draw)
        write_evaluation(args.out, result, page, console)
    return result


def shares(names: Mapping[str, str], found: Mapping[str, Any], total: int) -> list[Number]:
    """Headline numbers that are shares of `total` queries, with Wilson's intervals; names: key of `found` -> label."""
    from leafward.report import Number
    from leafward.stats.intervals import share_interval

    return [
        Number(label, found[key], interval=share_interval(round(found[key] * total), total), better="higher")
        for key, label in names.items()
        if key in found
    ]
