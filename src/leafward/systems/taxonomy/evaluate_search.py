"""``leafward evaluate INDEX --task search``: the nearest items to queries, by name, and how near in the taxonomy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from leafward.errors import DataError, UsageError, named, nearest

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console

    from leafward.hierarchy import LorentzIndex
    from leafward.report import Result

SUMMARY = (
    "Search an index made by 'leafward data index': neighbours by name, in a subtree, coarse to fine, or in a cone."
)
MOST_SHOWN = 20
MOST_DRAWN = 6  # as many as there are colours


@dataclass
class Args:
    target: Annotated[Path, tyro.conf.Positional]
    """The folder of the index."""
    queries: Path | None = None
    """Vectors to search for, of the kind that the index was built from: a file or a folder, as for data index; also
    a file with a single vector."""
    like: tuple[str, ...] = ()
    """Items of the index to search for, by name (instead of --queries); an item is no neighbour of its own."""
    k: int = 10
    """Neighbours for each query."""
    under: str | None = None
    """Only the points of this node of the taxonomy and of those below it."""
    coarse_to_fine: bool = False
    """Walk down the taxonomy from the root and rank only the points met."""
    beam: int = 4
    """Children that go on at each level of a walk."""
    entailed: float | None = None
    """Instead of the nearest: the points in each query's entailment cone of this aperture (0.1 is usual)."""
    probes: int = 16
    """Cells looked into, in an index of kind ivf."""
    true: Path | None = None
    """The node of each query (.txt, .json or .csv with a column label): scores the neighbours' nodes against it."""
    out: Path | None = None
    """A folder for evaluation.json and report.html, or NAME.json, with the page beside it as NAME.html."""


def run(args: Args, console: Console) -> dict[str, Any]:
    from leafward.engine.evaluation import write_evaluation
    from leafward.systems.taxonomy.index import load

    _check(args)
    index, settings = load(args.target)
    _check_taxonomy(args, index)
    queries, names = _queries(args, index, settings)
    with named(args.queries or args.target):
        hits = _search(args, index, queries)
    found = [_neighbours(index, settings["names"], *hit) for hit in hits]
    if args.like:
        found = [[near for near in row if near["name"] != own][: args.k] for own, row in zip(names, found, strict=True)]
    result: dict[str, Any] = {
        "queries": [{"query": name, "neighbours": row} for name, row in zip(names, found, strict=True)]
    }
    if args.true is not None:
        result["scores"] = _scores(args, index, found)
    _show(result, console)
    if args.entailed is not None and not all(query["neighbours"] for query in result["queries"]):
        console.print("cones hold what lies below where the embedding was trained with --objective cones")
    return write_evaluation(args.out, _result(args, result), console)


def _result(args: Args, result: dict[str, Any]) -> Result:
    from leafward.report import Estimate, Result

    scores = {name: value for name, value in result.get("scores", {}).items() if isinstance(value, float)}
    asked = len(result["queries"])
    some = "one query" if asked == 1 else f"{asked} queries"
    limit = f"at most {args.k} neighbours each" if args.entailed is None else f"cones of aperture {args.entailed:g}"
    numbers = [Estimate(value, name=name.replace("_", " ")) for name, value in scores.items()]
    page = Result("Search", f"{some} in {args.target}, {limit}", numbers, values=result)
    page.section("Neighbours")
    figure = _distances(result["queries"])
    if figure is not None:
        page.figure(figure, "How far the neighbours lie, by their rank: a step parts those that belong from the rest.")
    for query in result["queries"][:MOST_SHOWN]:
        rows = [[near["name"], near.get("node"), near["distance"]] for near in query["neighbours"][:MOST_SHOWN]]
        page.table(["item", "node", "distance"], rows, query["query"])
    if len(result["queries"]) > MOST_SHOWN:
        page.note(f"The first {MOST_SHOWN} of {len(result['queries'])} queries; the JSON file has them all.")
    return page


def _distances(queries: list[dict[str, Any]]) -> Figure | None:
    """Distance against rank for the first queries that found two neighbours or more; None where there is none."""
    from leafward.report import legend, line_with_band, literal, new_figure, whole_numbers

    shown = [query for query in queries if len(query["neighbours"]) > 1][:MOST_DRAWN]
    if not shown:
        return None
    figure, axes = new_figure()
    for query in shown:
        distances = [near["distance"] for near in query["neighbours"]]
        line_with_band(axes, range(1, len(distances) + 1), distances, label=literal(query["query"]), marker="o")
    axes.set(xlabel="rank", ylabel="distance")
    whole_numbers(axes)
    legend(axes)
    return figure


def _check(args: Args) -> None:
    if (args.queries is None) == (not args.like):
        raise UsageError("give --queries FILE or --like NAME…, one of them")
    if args.k < 1:
        raise UsageError(f"k must be a whole number ≥ 1, got {args.k}")
    for flag, chosen in (("coarse-to-fine", args.coarse_to_fine), ("entailed", args.entailed is not None)):
        if chosen and args.under is not None:
            raise UsageError(f"--{flag} looks at the whole taxonomy; leave out --under")
    if args.coarse_to_fine and args.entailed is not None:
        raise UsageError("give --coarse-to-fine or --entailed, not both")


def _check_taxonomy(args: Args, index: LorentzIndex) -> None:
    wanted = {"under": args.under is not None, "coarse-to-fine": args.coarse_to_fine, "true": args.true is not None}
    flags = [f"--{flag}" for flag, given in wanted.items() if given]
    if flags and index.taxonomy is None:
        raise UsageError(f"{flags[0]} needs an index with a taxonomy; {args.target} was built without --taxonomy")
    if args.under is not None and index.taxonomy is not None:
        index.taxonomy.ids(args.under, "--under")


def _queries(args: Args, index: LorentzIndex, settings: dict[str, Any]) -> tuple[Any, list[str]]:
    """Lorentz points (B, n+1) and a name for each."""
    from leafward.data.items import read_items
    from leafward.systems.taxonomy.index import to_points

    if args.queries is not None:
        items = read_items(args.queries, vector=True)
        points = to_points(items.vectors, settings["vectors"], settings["scale"], index.c)
        if points.shape[1] != index.width + 1:
            built = index.width + (settings["vectors"] == "points")
            raise DataError(
                f"{args.queries}: vectors of {items.vectors.shape[1]} numbers, but the index {args.target} was built "
                f"from vectors of {built}"
            )
        return points, items.names
    place = {name: row for row, name in enumerate(settings["names"])}
    for name in args.like:
        if name not in place:
            hint = nearest(name, place) if len(place) <= 10_000 else f"it holds {len(place):,} items"
            raise UsageError(f"--like {name!r} is not an item of {args.target}; {hint}")
    return index.points([place[name] for name in args.like]), list(args.like)


def _search(args: Args, index: LorentzIndex, queries: Any) -> list[tuple[Any, Any]]:
    """(ids, distances) for each query, nearest first."""
    if args.entailed is not None:
        return list(index.entailed(queries, args.entailed))
    k = args.k + bool(args.like)  # one more, as an item finds itself
    if args.coarse_to_fine:
        hits = index.coarse_to_fine(queries, k, args.beam)
    else:
        hits = index.search(queries, k, under=args.under, probes=args.probes)
    return list(zip(*hits, strict=True))


def _neighbours(index: LorentzIndex, names: list[str], ids: Any, distances: Any) -> list[dict[str, Any]]:
    """What was found for one query, without the gaps at its end."""
    rows = ids[ids >= 0]
    found = [
        {"name": names[row], "distance": distance}
        for row, distance in zip(rows.tolist(), distances.tolist(), strict=False)
    ]
    if index.taxonomy is not None:
        for near, node in zip(found, index.nodes(rows).tolist(), strict=True):
            near["node"] = index.taxonomy.names[node]
    return found


def _show(result: dict[str, Any], console: Console) -> None:
    for query in result["queries"][:MOST_SHOWN]:
        console.print(f"{query['query']}:{'' if query['neighbours'] else ' nothing found'}", markup=False)
        for near in query["neighbours"][:MOST_SHOWN]:
            node = f" ({near['node']})" if near.get("node", near["name"]) != near["name"] else ""
            console.print(f"  {near['distance']:<10.4g} {near['name']}{node}", markup=False)
        if len(query["neighbours"]) > MOST_SHOWN:
            console.print(f"  … and {len(query['neighbours']) - MOST_SHOWN} more", markup=False)
    if len(result["queries"]) > MOST_SHOWN:
        console.print(f"… and {len(result['queries']) - MOST_SHOWN} more queries; --out has them all")


def _scores(args: Args, index: LorentzIndex, found: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Hierarchical metrics of the neighbours' nodes against the queries' own."""
    from leafward.data.tables import read_names
    from leafward.hierarchy import metrics

    assert args.true is not None
    assert index.taxonomy is not None
    truth = read_names(args.true, "label")
    if len(truth) != len(found):
        raise DataError(f"{args.true}: {len(truth)} labels for {len(found)} queries")
    depth = min(len(row) for row in found)
    if not depth:
        raise DataError(f"{args.target}: at least one query found no neighbour, so there is nothing to score")
    with named(args.true):
        return metrics.evaluate(index.taxonomy, [[n["node"] for n in row[:depth]] for row in found], truth).to_dict()
