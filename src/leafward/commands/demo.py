"""``leafward demo``: the main job from end to end on embedded data, offline, in a few minutes on two cores."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

if TYPE_CHECKING:
    from rich.console import Console

    from leafward.report import Page

PARTS = ("measure",)


@dataclass
class Args:
    only: Annotated[Literal["measure"] | None, tyro.conf.arg(help="Run one part alone.")] = None
    out: Path = Path("demo")
    """Folder for the report and the runs; what an earlier demo left there is replaced."""


def run(args: Args, console: Console) -> dict[str, Any]:
    from leafward.report import Page

    began = time.monotonic()
    page = Page("leafward demo", subtitle="Real embedded data, this machine's own numbers")
    result: dict[str, Any] = {}
    for part in PARTS if args.only is None else (args.only,):
        result[part] = {"measure": _measure}[part](args.out, console, page)
    page.section("How this was made")
    page.command("leafward demo")
    page.write(args.out / "report.html")
    console.print(f"done in {time.monotonic() - began:.0f} s; open {args.out / 'report.html'}")
    return {"report": str(args.out / "report.html"), **result}


def _measure(out: Path, console: Console, page: Page) -> dict[str, Any]:
    """Audit a real embedding matrix, then train a small fleet of toy models and fit its scaling exponents."""
    from leafward.commands._show import CLAIM_COLUMNS, claim_rows, show_headline
    from leafward.commands.audit import add_audit, show
    from leafward.data import embedded
    from leafward.engine import Progress
    from leafward.recipes import superposition as recipe
    from leafward.report import Number
    from leafward.superposition import audit

    console.rule("measure: how superposed is a real language model's head?")
    with Progress(100, "audit", unit="%") as progress:
        report = audit(
            embedded("stories260k_embedding.npy"),
            exact=True,
            progress=lambda done, total: progress.update(100 * done // total),
        )
    show(console, report)
    add_audit(page, report)

    console.rule("measure: a fleet of toy models, and the exponents of its loss")
    sweep = recipe.run(recipe.PRESETS["quick"](), out / "superposition", overwrite=True)
    show_headline(console, sweep)
    page.section("A fleet of toy models")
    page.headline([Number.from_json(entry) for entry in sweep["headline"]])
    caption = "The full sweep, with figures, is in superposition/report.html beside this page."
    page.table(CLAIM_COLUMNS, claim_rows(sweep["claims"]), caption=caption)
    return {"audit": report.to_dict(), "superposition": {key: sweep[key] for key in ("headline", "claims")}}
