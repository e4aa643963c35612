"""Several models of one family: bits per byte, overlap against width, and the width exponent."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leafward.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console

    from leafward.measure import AuditReport
    from leafward.measure.audit_family import Family, LossTable
    from leafward.measure.language import LanguageModel
    from leafward.report import Result
    from leafward.stats.power_laws import PowerLawFit

COLUMNS = ["model", "m", "m·⟨o²⟩ raw", "mean removed"]


def run_family(args: Any, out: Path, console: Console) -> dict[str, Any]:
    """Audit the output matrix of each model, measure its losses or read them, and fit both against width."""
    from leafward.cli.audit import audit_one, audit_page, short_names, show, write_result
    from leafward.measure.audit_family import check_names, read_losses

    if args.losses is not None and args.text:
        raise UsageError("--losses and --text both give losses; give one of them")
    names = short_names(args.targets)
    table = None if args.losses is None else read_losses(args.losses)
    if table is not None:
        check_names(names, table)
    result: dict[str, Any] = {}
    if args.text:
        table, result["language"] = measure_losses(args, names, console)
    reports = [audit_one(target, args) for target in args.targets]
    for report in reports:
        show(console, report)
    result["audits"] = [report.to_dict() for report in reports]
    page = audit_page(reports)
    result["family"] = add_family(reports, names, table, console, page)
    if table is not None:
        write_losses(table, out / "losses.csv")
    write_result(out, result, page)
    console.print(f"wrote {out / 'report.html'} and {out / 'audit.json'}")
    return {"out": str(out), **result}


def measure_losses(args: Any, names: Sequence[str], console: Console) -> tuple[LossTable, list[dict[str, Any]]]:
    """Bits per byte of every model on every corpus. All see windows of the shortest context."""
    from leafward.data.text import find_files
    from leafward.registry import register
    from leafward.report import show_rows

    register("transformers")
    corpora = [each.stem for each in args.text]
    if len(set(corpora)) < len(corpora):
        raise UsageError(f"--text: two corpora are called alike: {', '.join(corpora)}")
    for corpus in args.text:
        find_files(corpus)  # what is not there is said before any model is opened
    folders = [_folder(target) for target in args.targets]
    context = min(_context(folder) for folder in folders)
    lines = []
    for name, folder in zip(names, folders, strict=True):
        lines += _losses_of(name, folder, args.text, context)
    rows = [
        (each["model"], str(each["m"]), f"{each['params']:,}", each["corpus"], f"{each['bits_per_byte']:.4g}",
         "–" if each["interval"] is None else "[{:.4g}, {:.4g}]".format(*each["interval"]))
        for each in lines
    ]  # fmt: skip
    columns = ["model", "m", "parameters", "corpus", "bits per byte", "95 % interval"]
    show_rows(console, columns, rows, f"bits per byte, windows of {context:,} tokens")
    return _table(lines), lines


def _folder(target: str) -> Path:
    """The folder of a causal language model."""
    from leafward.measure.targets import open_target

    folder = open_target(target).folder
    if folder is None or not (folder / "config.json").is_file():
        raise UsageError(f"--text: {target} is not the folder or hub name of a language model, nor a run of one")
    return folder


def _context(folder: Path) -> int:
    from leafward.files import read_record

    config = read_record(folder / "config.json")
    found = config.get("max_position_embeddings") or config.get("n_positions") or 2048
    return min(int(found), 2048)


def _losses_of(name: str, folder: Path, texts: Sequence[Path], context: int) -> list[dict[str, Any]]:
    """One record for each corpus."""
    from dataclasses import replace

    from leafward.engine import Progress
    from leafward.measure.language import bits_per_byte, load_language_model

    language: LanguageModel = replace(load_language_model(folder, name), context=context)
    found = []
    for text in texts:
        done = 0
        with Progress(0, f"{name} on {text.stem}", unit="token") as progress:

            def advance(tokens: int, progress: Progress = progress) -> None:
                nonlocal done
                done += tokens
                progress.update(done)

            score = bits_per_byte(language, text, advance=advance)
        found.append(
            {
                "model": name,
                "corpus": text.stem,
                "m": language.width,
                "depth": language.depth,
                "params": language.params,
                "bits_per_byte": score.value,
                "interval": score.interval,
                "nats_per_token": score.nats_per_token,
                "tokens_scored": score.tokens,
                "bytes": score.bytes,
            }
        )
    return found


def _table(lines: list[dict[str, Any]]) -> LossTable:
    import numpy as np

    from leafward.measure.audit_family import LossTable

    def column(name: str) -> Any:
        return np.array([each[name] for each in lines], dtype=float)

    deep = None if any(each["depth"] is None for each in lines) else column("depth")
    models, corpora = (tuple(each[name] for each in lines) for name in ("model", "corpus"))
    return LossTable(models, corpora, column("m"), column("bits_per_byte"), column("params"), deep)


def write_losses(table: LossTable, path: Path) -> None:
    """The table as a file that --losses and leafward fit read."""
    from leafward.files import write_text

    columns = {"model": table.model, "corpus": table.corpus, "m": table.width, "loss": table.loss}
    columns |= {name: values for name in ("params", "depth", "tokens") if (values := getattr(table, name)) is not None}
    lines = [",".join(columns)]
    lines += [",".join(str(each) for each in row) for row in zip(*columns.values(), strict=True)]
    write_text(path, "\n".join(lines) + "\n")


def add_family(
    reports: list[AuditReport], names: list[str], losses: LossTable | None, console: Console, page: Result
) -> dict[str, Any]:
    """Widths side by side, the exponent of the overlap, and with losses the fit L = C/m^a + …"""
    from leafward.measure.audit_family import audit_family
    from leafward.report import show_rows

    family = audit_family(*reports, names=names, losses=losses)
    numbers = list(
        zip(
            family.names,
            family.width.tolist(),
            family.scaled_overlap.tolist(),
            family.centred_scaled_overlap.tolist(),
            strict=True,
        )
    )
    rows = [(name, str(width), f"{raw:.4g}", f"{centred:.4g}") for name, width, raw, centred in numbers]
    show_rows(console, COLUMNS, rows, "family")
    page.section("The family")
    page.table(COLUMNS, [list(row) for row in numbers])
    result: dict[str, Any] = {
        "models": [dict(zip(("model", "m", "raw", "centred"), row, strict=True)) for row in numbers]
    }
    fits = family.overlap_fits()
    result["overlap_fits"] = {name: fit.to_dict() for name, fit in fits.items()}
    for name, fit in fits.items():
        line = (
            f"mean squared overlap, {name}: falls as width^-{fit.exponent:.3g}, interval {fit.interval}; random rows: 1"
        )
        console.print(line, markup=False)
        page.text(line)
    if fits:
        page.figure(
            _overlap_figure(family, fits), "Mean squared overlap against width; dashed: 1/m, as of random rows."
        )
    if family.losses is not None:
        result["width_fit"] = _width_fit(family, console, page)
    return result


def _overlap_figure(family: Family, fits: dict[str, PowerLawFit]) -> Figure:
    import numpy as np

    from leafward.report import SERIES, legend, log_axis, new_figure

    figure, axes = new_figure()
    grid = np.geomspace(family.width.min(), family.width.max(), 50)
    seen = {"raw": family.scaled_overlap, "mean removed": family.centred_scaled_overlap}
    for colour, (name, fit) in zip(SERIES, fits.items(), strict=False):
        axes.plot(family.width, seen[name] / family.width, "o", color=colour, label=name)
        axes.plot(grid, fit.predict(grid), color=colour)
    axes.plot(grid, 1 / grid, "--", color="grey", label="1/m")
    axes.set(xlabel="width m", ylabel="mean squared overlap", title="")
    log_axis(axes)
    legend(axes)
    return figure


def _width_fit(family: Family, console: Console, page: Result) -> dict[str, Any]:
    from leafward.report import Estimate
    from leafward.stats.power_laws import fit_width

    table = family.losses
    assert table is not None
    fit = fit_width(
        table.width,
        table.loss,
        models=table.model,
        corpora=table.corpus,
        params=table.params,
        depth=table.depth,
        tokens=table.tokens,
    )
    console.print(f"width fit: {fit.summary()}", markup=False)
    page.headline([Estimate(fit.exponent, fit.interval, "α of L = C/m^α + offsets")])
    page.text(fit.summary())
    return fit.to_dict()
