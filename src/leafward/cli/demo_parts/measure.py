"""Measure: how superposed a real language model's head is, and how the loss of toy models falls with their width."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leafward.systems.superposition import config as superposition
from leafward.systems.superposition import train as train_superposition

if TYPE_CHECKING:
    from rich.console import Console

    from leafward.cli.demo_parts.part import Part
    from leafward.measure import AuditReport
    from leafward.report import Result

MATRIX = "stories260k_embedding.npy"


def sweep() -> superposition.Config:
    """Strong and weak superposition under four laws: less than a minute on two cores."""
    return superposition.Config(
        widths=(6, 9, 14, 21, 32),
        decays=(-1.0, 5 / 9),
        laws=("power:0", "power:0.5", "power:1", "power:2"),
        loop=superposition.FleetLoop(steps=3000, batch_size=256, checkpoint_every=2000),
    )


def run(out: Path, console: Console) -> Part:
    from leafward.cli.audit import show
    from leafward.cli.demo_parts.part import Part
    from leafward.data.samples import embedded
    from leafward.engine import Progress
    from leafward.files import replacing
    from leafward.measure import audit
    from leafward.report import Estimate, Result

    console.rule("measure: how superposed is a real language model's head?")
    with Progress(100, "audit", unit="%") as progress:
        report = audit(embedded(MATRIX), exact=True, progress=lambda done, total: progress.update(100 * done // total))
    show(console, report)
    console.rule("measure: a fleet of toy models, and the exponents of its loss")
    found = train_superposition.run(sweep(), out / "superposition", overwrite=True)
    Result.of(found).show(console)
    numbers = [
        Estimate(report.scaled_overlap, name="m·⟨overlap²⟩ of a real head", note="1 for random directions"),
        *(Estimate.from_json(each) for each in found["headline"] if each["name"] in HEADLINES),
    ]
    result = {"audit": report.to_dict(), "superposition": {key: found[key] for key in ("claims", "fits")}}
    with replacing(out / MATRIX) as temporary:
        shutil.copyfile(embedded(MATRIX), temporary)
    explore = shlex.join(["leafward", "explore", str(out / MATRIX), "--centre"])
    return Part(numbers, result, lambda page: _draw(page, report, found), explore, "the rows of the real head")


HEADLINES = ("strong exponent, α ≤ 1", "strong − weak exponent")
"""What the sweep says in the table at the end; its own report has the rest."""


def _draw(page: Result, report: AuditReport, found: dict[str, Any]) -> None:
    from leafward.cli.audit import add_audit
    from leafward.report import Estimate
    from leafward.systems.superposition.figures import exponents, losses
    from leafward.systems.superposition.report import models

    add_audit(page, report)
    page.section("A fleet of toy models")
    page.text(
        "Toy models y = ReLU(W Wᵀx + b) of several widths m, trained together. A negative decay γ packs more features "
        "than dimensions into them (strong superposition), a positive one keeps about m of them (weak). How fast the "
        "loss falls with the width tells the two apart."
    )
    rows = models(found)
    for drawn in (losses(rows, found["fits"], "strong"), losses(rows, found["fits"], "weak"), exponents(found["fits"])):
        if drawn is not None:
            page.figure(drawn.figure, drawn.caption)
    tested = [
        [each["claim"], Estimate.of(each["value"], each["interval"]), each["verdict"]]
        for each in found["claims"]
        if each["value"] is not None
    ]
    page.table(["claim", "here", "verdict"], tested, "Claims of arXiv 2505.10465, on this small sweep")
