"""``leafward fit TABLE``: scaling laws from a table of losses."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from leafward.errors import DataError, UsageError, nearest, need
from leafward.files import check_writable

if TYPE_CHECKING:
    from rich.console import Console

    from leafward.report import Result
    from leafward.stats.power_laws import Comparison, ComputeLaw, JointFit
    from leafward.stats.power_laws.tables import Table

VARIABLES = ("N", "D", "C", "m", "depth")


@dataclass
class Args:
    table: Annotated[Path | None, tyro.conf.Positional] = None
    """CSV with a column of losses and columns of what they depend on: N (params), D (tokens), C (flop), m (width),
    depth; corpus (an offset for each) and model (rows that share an error) are optional."""
    x: tuple[str, ...] = ()
    """The variables of the law: of N, D, C, m, depth. Default: m, depth and D where there is a width, else N and D."""
    columns: tuple[str, ...] = ()
    """What is where, for columns of other names: NAME=COLUMN, for example loss=eval_loss N=size."""
    budget: tuple[float, ...] = ()
    """Compute, in FLOP, at which the best size and data are wanted."""
    offset: bool = True
    """A loss that remains however large the model is, one for each corpus."""
    method: Literal["varpro", "huber"] = "varpro"
    """Least squares relative to the law by variable projection, or the Huber loss of log residuals."""
    resamples: int = 400
    """Resamples of bootstrap intervals."""
    level: float = 0.95
    """Of the intervals."""
    seed: int = 0
    """Seed of the resamples."""
    out: Path | None = None
    """Folder for fit.json and report.html (default: runs/fit-NAME)."""


def run(args: Args, console: Console) -> dict[str, Any]:
    from leafward.files import finite, write_json
    from leafward.report import Result
    from leafward.stats.power_laws.tables import read_table

    if args.table is None:
        raise UsageError("TABLE is missing; give a CSV with a column of losses")
    need(0 < args.level < 1, "--level", "strictly between 0 and 1", args.level)
    need(args.resamples >= 100, "--resamples", "at least 100", args.resamples)
    need(all(each > 0 for each in args.budget), "--budget", "positive numbers of FLOP", args.budget)
    out = args.out or Path("runs") / f"fit-{args.table.stem}"
    check_writable(out)
    table = read_table(args.table, _given(args.columns))
    names = _variables(args, args.table, table)
    page = Result("Scaling law", f"{args.table.name}: {table.rows} rows", run=True)
    result: dict[str, Any] = {"table": str(args.table), "rows": table.rows, "variables": list(names)}
    notes = list(table.notes)
    if table.unused:
        notes.append(f"columns that are not in the law: {', '.join(table.unused)}")
    law = _law(args, table, names)
    _say(console, page, law.summary())
    _show_law(console, page, law)
    result["law"] = law.to_dict()
    result["extrapolation"] = _extrapolate(args, table, names, console, page, notes)
    result["rivals"] = _rivals(args, table, names, law, console, page, notes)
    if {"N", "D"} <= set(table.numbers) and set(names) <= {"N", "D"}:
        result["compute_optimal"] = _optimal(args, table, console, page, notes)
    for note in notes:
        console.print(f"note: {note}", markup=False)
        page.note(note)
    result = finite({**result, "notes": notes})
    write_json(out / "fit.json", result)
    page.write(out / "report.html")
    console.print(f"wrote {out / 'report.html'} and {out / 'fit.json'}", markup=False)
    return {"out": str(out), **result}


def _given(pairs: tuple[str, ...]) -> dict[str, str]:
    from leafward.stats.power_laws.tables import KNOWN

    found = {}
    for pair in pairs:
        name, equals, column = pair.partition("=")
        if not equals or name not in KNOWN:
            raise UsageError(f"--columns {pair!r}: write NAME=COLUMN; {nearest(name, KNOWN)}")
        found[name] = column
    return found


def _variables(args: Args, path: Path, table: Table) -> tuple[str, ...]:
    """What the law is in; a variable that does not vary, or is not there, is refused where it was asked for."""
    import numpy as np

    there = [name for name in VARIABLES if name in table.numbers]
    varied = [name for name in there if len(np.unique(table.numbers[name])) >= 3]
    for name in args.x:
        if name not in VARIABLES:
            raise UsageError(f"--x {name}: {nearest(name, VARIABLES)}")
        if name not in there:
            raise DataError(f"--x {name}: {path} has no such column; it has {', '.join(there) or 'none of them'}")
    if args.x:
        return args.x
    usual = (
        ("m", "depth", "D") if "m" in varied else ("N", "D") if "N" in varied else ("D",) if "D" in varied else ("C",)
    )
    chosen = tuple(name for name in usual if name in varied)
    if not chosen:
        raise DataError(f"{path}: none of N, D, C, m, depth is a column with at least three different values")
    return chosen


def _law(args: Args, table: Table, names: tuple[str, ...]) -> JointFit:
    from leafward.stats.power_laws import fit_joint_law

    groups = table.labels.get("corpus")
    several = groups is not None and len(set(groups)) > 1
    models = table.labels.get("model")
    shared = models is not None and 3 <= len(set(models)) < len(models)
    return fit_joint_law(
        {name: table.numbers[name] for name in names},
        table.numbers["loss"],
        offset=args.offset,
        groups=groups if several and args.offset else None,
        clusters=models if shared else None,
        method=args.method,
        level=args.level,
        resamples=args.resamples,
        seed=args.seed,
    )


def _show_law(console: Console, page: Result, law: JointFit) -> None:
    from leafward.report import Estimate, show_rows

    rows = []
    for name, exponent in law.exponents.items():
        ends = law.intervals[name]
        rows.append((f"exponent of {name}", f"{exponent:.4g}", f"[{ends.low:.4g}, {ends.high:.4g}]"))
        rows.append((f"coefficient of {name}", f"{law.coefficients[name]:.4g}", ""))
    rows += [(f"offset of {name}", f"{value:.4g}", "") for name, value in law.offsets.items()]
    if not law.offsets:
        rows.append(("offset", f"{law.offset:.4g}", ""))
    show_rows(console, ["", "value", "interval"], rows, "L = E + Σ C_k / x_k^a_k")
    numbers = [
        Estimate(exponent, law.intervals[name], f"exponent of {name}") for name, exponent in law.exponents.items()
    ]
    page.headline(numbers)
    page.table(["", "value", "interval"], [list(row) for row in rows])


def _extrapolate(
    args: Args, table: Table, names: tuple[str, ...], console: Console, page: Result, notes: list[str]
) -> dict[str, Any] | None:
    """Predict the rows of the largest values of the first variable from all smaller ones."""
    import numpy as np

    from leafward.errors import LeafwardError
    from leafward.stats.power_laws.tables import Table as Rows

    x, y = table.numbers[names[0]], table.numbers["loss"]
    cut = np.quantile(np.unique(x), 0.8, method="lower")
    seen = x <= cut
    if seen.all() or not seen.any():
        return None
    part = Rows({k: v[seen] for k, v in table.numbers.items()}, {k: _of(v, seen) for k, v in table.labels.items()})
    try:
        law = _law(args, part, names)
        groups = _of(table.labels["corpus"], ~seen) if law.offsets else None
        predicted = law.predict({name: table.numbers[name][~seen] for name in names}, groups)
    except LeafwardError as error:
        notes.append(f"no extrapolation: {error}")
        return None
    error = float(np.sqrt(np.mean(np.log(y[~seen] / predicted) ** 2)))
    bias = float(np.mean(np.log(y[~seen] / predicted)))
    _say(
        console,
        page,
        f"extrapolation: the {int((~seen).sum())} rows with {names[0]} above {cut:.4g}, predicted from the others, are "
        f"off by {error:.2%} (rms, log), on average by {bias:+.2%}",
    )
    return {"above": float(cut), "rows": int((~seen).sum()), "error": error, "bias": bias}


def _of(labels: tuple[str, ...], keep: Any) -> tuple[str, ...]:
    return tuple(each for each, kept in zip(labels, keep, strict=True) if kept)


def _rivals(
    args: Args, table: Table, names: tuple[str, ...], law: JointFit, console: Console, page: Result, notes: list[str]
) -> dict[str, Any] | None:
    """Other laws of the same table by AICc; of one variable also a broken power law where there are points for it."""
    import numpy as np

    from leafward.report import show_rows
    from leafward.stats.power_laws import compare_laws

    name = names[0] if names else ""
    if len(names) != 1 or law.offsets:
        notes.append("rivals (exponential, logarithm, broken power law) are compared for laws of one variable only")
        return None
    x, y = table.numbers[name], table.numbers["loss"]
    least = 5 if args.offset else 4
    if len(np.unique(x)) < least + 1:
        notes.append(f"rivals need at least {least + 1} different values of {name}")
        return None
    found: Comparison = compare_laws(x, y, offset=args.offset, broken=len(np.unique(x)) >= 8)
    rows = [
        (each.name, each.formula, f"{each.delta_aicc:.1f}", f"{each.held_out_error:.2%}") for each in found.candidates
    ]
    show_rows(console, ["law", "", "ΔAICc", "held-out error"], rows, "rivals")
    _say(console, page, found.summary())
    page.table(["law", "", "ΔAICc", "held-out error"], [list(row) for row in rows])
    return found.to_dict()


def _optimal(args: Args, table: Table, console: Console, page: Result, notes: list[str]) -> list[dict[str, Any]]:
    """Chinchilla's approaches, each with its exponent and the best size and data at each budget."""
    from leafward.report import show_rows
    from leafward.stats.power_laws import compute_laws

    numbers = table.numbers
    found, missing = compute_laws(
        numbers["N"],
        numbers["D"],
        numbers["loss"],
        budgets=args.budget,
        resamples=args.resamples,
        level=args.level,
        seed=args.seed,
    )
    notes += missing
    columns = ["approach", "a of N* ∝ C^a", "interval", *(f"N* at {c:.3g} FLOP" for c in args.budget)]
    rows = [_approach(each) for each in found]
    show_rows(console, columns, rows, "compute-optimal size")
    page.section("Compute-optimal size and data")
    page.table(columns, [list(row) for row in rows])
    for each in found:
        for best in each.allocations if each.parameters else ():
            low, high = best.tokens_interval
            page.text(
                f"{each.approach}: at {best.compute:.3g} FLOP D* = {best.tokens:.3g} [{low:.3g}, {high:.3g}] tokens"
            )
    return [each.to_dict() for each in found]


def _approach(law: ComputeLaw) -> tuple[str, ...]:
    cells = [f"{best.size:.3g} [{best.size_interval[0]:.3g}, {best.size_interval[1]:.3g}]" for best in law.allocations]
    return law.approach, f"{law.exponent:.3f}", f"[{law.interval.low:.3f}, {law.interval.high:.3f}]", *cells


def _say(console: Console, page: Result, words: str) -> None:
    console.print(words, markup=False)
    page.text(words)
