"""From the table of trained models to fitted exponents: every (law, γ) over the widths, and the joint laws.

A *cell* is a (law, γ): one curve of loss against width, once for each seed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from leafward.errors import LeafwardError
from leafward.files import finite
from leafward.stats.power_laws import compare_laws, fit_joint_law, fit_power_law, fit_ranges, leave_largest_out
from leafward.stats.power_laws.separable import EXPONENT_RANGE
from leafward.systems.superposition import claims
from leafward.systems.superposition.packs import NORM_EDGES, effective_decays

if TYPE_CHECKING:
    from leafward.stats.power_laws import PowerLawFit
    from leafward.systems.superposition.config import Config

Row = dict[str, Any]
CLUSTERS = 3  # seeds from which on intervals are over seeds
RANGE_POINTS = 5  # widths from which on an automatic range is looked for


def analyse(config: Config, trained: dict[str, Any]) -> dict[str, Any]:
    """What result.json holds: claims, exponents with intervals, joint laws, the table of models."""
    rows = ordered(config, trained["rows"])
    final = [row for row in rows if row["step"] == config.loop.steps and row["dataset_rows"] is None]
    fits = [fit_cell(config, law, decay, cell) for (law, decay), cell in cells(final).items()]
    tested = claims.test(final, fits, config.features, squared=config.loss == "mse")
    return finite(
        {
            "headline": claims.headline(tested),
            "claims": [asdict(claim) for claim in tested],
            "fits": fits,
            "joint": joint_fits(config, rows),
            "models": {name: [row[name] for row in final] for name in final[0]},
            "norms": _norms(final, trained["norms"]),
            "notes": _notes(config, final, trained["failures"]),
            "failures": trained["failures"],
            "time": trained["time"],
        }
    )


def ordered(config: Config, rows: Iterable[Row]) -> list[Row]:
    """The rows in the order of the grid, numbered, with α of the power laws, whatever pack they come from."""
    laws = list(dict.fromkeys(row["law"] for row in rows))
    key = lambda row: (  # noqa: E731
        row["dataset_rows"] or 0,
        laws.index(row["law"]),
        row["seed"],
        row["decay"],
        row["width"],
        row["step"],
    )
    return [{**row, "model": index, "alpha": alpha(row["law"])} for index, row in enumerate(sorted(rows, key=key))]


def alpha(law: str) -> float | None:
    """α of a power law (also of the uniform one, α = 0), else None."""
    name, _, argument = law.partition(":")
    if name == "uniform":
        return 0.0
    return float(argument or 1) if name == "power" else None


def cells(rows: Iterable[Row]) -> dict[tuple[str, float], list[Row]]:
    """The rows by (law, decay)."""
    found: dict[tuple[str, float], list[Row]] = {}
    for row in rows:
        found.setdefault((row["law"], row["decay"]), []).append(row)
    return found


def excess(row: Row) -> float | None:
    """The loss above its floor (0 for the squared error); None where it is not a positive number."""
    if row["loss"] is None:
        return None
    above = row["loss"] - row["loss_floor"]
    return above if above > 0 else None


def fit_cell(config: Config, law: str, decay: float, rows: Sequence[Row]) -> dict[str, Any]:
    """The exponent of one cell with its interval, per seed, by range, against other laws, and of its overlaps."""
    usable = [(row["width"], value, row["seed"]) for row in rows if (value := excess(row)) is not None]
    overlaps = [
        (row["width"], row["strong_overlap_mean"], row["seed"]) for row in rows if claims.crowded(row, config.features)
    ]
    cell = {
        "law": law,
        "alpha": alpha(law),
        "decay": decay,
        "regime": claims.regime(decay, config.constraint),
        "ambiguity": float(np.mean([row["ambiguity"] for row in rows])),
        **_exponent(usable),
        "overlap": _exponent(overlaps),
        "automatic": None,
        "by_hand": None,
        "leave_largest_out": None,
        "alternatives": None,
    }
    cell["theory"] = claims.theory(cell["alpha"], cell["regime"])
    widths, values = _curve(usable)
    if len(widths) >= 4:
        without = leave_largest_out(widths, values)
        cell["leave_largest_out"] = {"exponent": without.fit.exponent, "log_error": without.error}
    if len(widths) >= RANGE_POINTS:
        hand = paper_range(law, decay, widths) if config.paper_ranges else None
        ranges = fit_ranges(widths, values, hand=hand, min_points=RANGE_POINTS)
        chosen = ranges.automatic
        cell["automatic"] = _brief(chosen.fit) | {"low": chosen.low, "high": chosen.high, "straight": chosen.stable}
        if ranges.hand is not None and hand is not None:
            cell["by_hand"] = _brief(ranges.hand) | {"low": hand[0], "high": hand[1]}
        compared = compare_laws(widths, values)
        cell["alternatives"] = {
            "verdict": compared.verdict,
            "delta_aicc": {each.name: each.delta_aicc for each in compared.candidates},
        }
    return cell


def paper_range(law: str, decay: float, widths: Sequence[float]) -> tuple[float, float]:
    """The widths that the paper fitted for its large models, chosen there by eye.

    Strong: power and linear from the third width, exponential all. Weak: power the last five, others all.
    """
    name = law.partition(":")[0]
    first = 0
    if decay < 0 and name in ("power", "linear"):
        first = 2
    elif decay > 0 and name == "power":
        first = len(widths) - 5
    return float(widths[max(0, first)]), float(widths[-1])


def _exponent(points: Sequence[tuple[int, float, int]]) -> dict[str, Any]:
    """OLS of ln y on ln m (as the paper) over all seeds, with its interval, and for each seed alone.

    Widths of one seed share their data, so from `CLUSTERS` seeds on the interval is a bootstrap of whole seeds.
    """
    seeds = sorted({seed for _, _, seed in points})
    per_seed = []
    for seed in seeds:
        fit = _fit([(m, y, s) for m, y, s in points if s == seed])
        if fit is not None:
            per_seed.append({"seed": seed, **_brief(fit)})
    fit = _fit(points, clusters=len(seeds) >= CLUSTERS)
    return (_brief(fit) if fit else dict.fromkeys(_BRIEF)) | {"seeds": len(seeds), "per_seed": per_seed}


def _fit(points: Sequence[tuple[int, float, int]], clusters: bool = False) -> PowerLawFit | None:
    if len({m for m, _, _ in points}) < 3:
        return None
    widths, values, seeds = zip(*points, strict=True)
    return fit_power_law(widths, values, clusters=seeds if clusters else None)


_BRIEF = ("exponent", "interval", "standard_error", "interval_method", "coefficient", "r_squared")


def _brief(fit: PowerLawFit) -> dict[str, Any]:
    (coefficient,) = fit.coefficients.values()
    values = (
        fit.exponent,
        list(fit.interval),
        fit.interval.standard_error,
        fit.interval.method,
        coefficient,
        fit.r_squared,
    )
    return dict(zip(_BRIEF, values, strict=True))


def _curve(points: Sequence[tuple[int, float, int]]) -> tuple[list[int], list[float]]:
    """Widths and the geometric mean over seeds at each."""
    widths = sorted({m for m, _, _ in points})
    logs = [np.mean([np.log(y) for width, y, _ in points if width == m]) for m in widths]
    return widths, np.exp(logs).tolist() if logs else []


def joint_fits(config: Config, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """L = C/m^a + K/t^c (+ J/D^d) for every cell, where the run has more axes than the width."""
    if not config.axis:
        return []
    fixed = "data" in config.axis
    chosen = [row for row in rows if (row["dataset_rows"] is not None) == fixed]
    if "steps" not in config.axis:
        chosen = [row for row in chosen if row["step"] == config.loop.steps]
    columns = {"m": "width", "steps": "step", "data": "dataset_rows"}
    names = ["m", *config.axis]
    found = []
    for (law, decay), cell in cells(chosen).items():
        usable = [(row, value) for row in cell if (value := excess(row)) is not None]
        variables = {name: [row[columns[name]] for row, _ in usable] for name in names}
        # The snapshots of one model share its luck.
        models = [f"{row['width']} {row['seed']} {row['dataset_rows']}" for row, _ in usable]
        entry: dict[str, Any] = {"law": law, "alpha": alpha(law), "decay": decay, "rows": len(usable)}
        try:
            fit = fit_joint_law(
                variables,
                [value for _, value in usable],
                offset=False,
                clusters=models if "steps" in config.axis else None,
            )
            entry |= {
                "exponents": dict(fit.exponents),
                "intervals": {name: list(interval) for name, interval in fit.intervals.items()},
                "interval_method": next(iter(fit.intervals.values())).method,
                "undetermined": [name for name, (low, high) in fit.intervals.items() if _open(low, high)],
                "coefficients": dict(fit.coefficients),
                "rms_log_error": fit.rms_log_error,
            }
        except LeafwardError as error:  # too few points, or a loss that does not fall along an axis
            entry["error"] = str(error)
        found.append(entry)
    return found


def _open(low: float, high: float) -> bool:
    """Whether an interval reaches an end of the exponents that are searched: the data do not settle it."""
    lowest, highest = EXPONENT_RANGE
    return low < 1.01 * lowest or high > 0.999 * highest


def curves(config: Config, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """For metrics.jsonl: the geometric mean loss of strong and weak models at each step measured."""
    records = []
    for step in sorted({row["step"] for row in rows}):
        record: dict[str, Any] = {"step": step}
        for name in ("strong", "weak"):
            values = [
                value
                for row in rows
                if row["step"] == step
                and row["dataset_rows"] is None
                and claims.regime(row["decay"], config.constraint) == name
                and (value := excess(row)) is not None
            ]
            if values:
                record[f"{name} loss"] = float(np.exp(np.mean(np.log(values))))
        records.append(record)
    return records


def _norms(final: Sequence[Row], histograms: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The histograms that are shown: one law, one width, the first seed, every γ."""
    if not histograms:
        return None
    law = reference_law(final)
    widths = sorted({row["width"] for row in final})
    width = widths[min(1, len(widths) - 1)]
    seed = min(row["seed"] for row in final)
    shown = [h for h in histograms if (h["law"], h["width"], h["seed"]) == (law, width, seed)]
    shown.sort(key=lambda histogram: histogram["decay"])
    return {
        "law": law,
        "width": width,
        "edges": NORM_EDGES,
        "decays": [histogram["decay"] for histogram in shown],
        "counts": [histogram["counts"] for histogram in shown],
    }


def reference_law(rows: Sequence[Row]) -> str:
    """The law of figures that show one: the power law nearest to α = 1, else the first."""
    known = {row["law"]: row["alpha"] for row in rows}
    powers = {law: abs(value - 1) for law, value in known.items() if value is not None}
    return min(powers, key=lambda law: powers[law]) if powers else next(iter(known))


def _notes(config: Config, final: Sequence[Row], failures: Sequence[dict[str, Any]]) -> list[str]:
    notes = []
    if effective_decays(config) != config.decays:
        why = f"constraint {config.constraint}" if config.constraint == "sphere" else f"optimiser {config.optim.name}"
        notes.append(f"Decay has no meaning with the {why}: γ is 0 in place of {len(config.decays)} decays.")
    diverged = sum(row["loss"] is None for row in final)
    if diverged:
        notes.append(f"{diverged} models have no finite loss; they are left out of the fits.")
    notes += [f"A pack of {each['models']} models (law {each['law']}) failed: {each['message']}" for each in failures]
    return notes
