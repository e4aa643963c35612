"""What the evaluations of encoders share: opening the target, roots, features from a file, the answer on screen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leafward.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor

    from leafward.adapters.encoders import Encoder
    from leafward.report import Number, Page


@dataclass
class Opened:
    """An encoder on its device, the learned roots and the settings of its run, where it comes from one."""

    encoder: Encoder
    roots: dict[str, Tensor] | None
    geometry: Any = "euclidean"
    c: float = 1.0

    def root(self, texts: Sequence[str]) -> Tensor:
        """Vectors of the roots of given texts: (R, d)."""
        from leafward.recipes._radial_suite import root_vectors

        return root_vectors(self.encoder, texts, self.roots)


def open_target(target: str | None, device: str) -> Opened:
    """A model by name or directory, or a run directory of the radial recipe."""
    if target is None:
        raise UsageError("TARGET is missing: give a model, a run directory, or --features FILE")
    from leafward.adapters.encoders import load_encoder
    from leafward.engine import RunDirectory, session
    from leafward.recipes._radial_training import load_roots

    with session(device) as cluster:
        opened = Opened(load_encoder(target).to(cluster.device), None)
    if (Path(target) / "config.yaml").is_file():
        objective = RunDirectory.open(target).config.get("objective", {})
        opened.roots = load_roots(Path(target))
        opened.geometry, opened.c = objective.get("geometry", "euclidean"), objective.get("c", 1.0)
    return opened


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

    from leafward.engine.config import flatten
    from leafward.recipes._evaluation_page import evaluation_page, write_evaluation

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
    from leafward.intervals import share_interval
    from leafward.report import Number

    return [
        Number(label, found[key], interval=share_interval(round(found[key] * total), total), better="higher")
        for key, label in names.items()
        if key in found
    ]
