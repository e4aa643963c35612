"""Build: a tiny hyperbolic language model beside its Euclidean twin, and a vision backbone that clusters."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leafward.config import replace
from leafward.data.samples import embedded
from leafward.engine.config import Arms, LoopConfig, OptimConfig
from leafward.systems.hcformer import config as hcformer
from leafward.systems.hcformer import train as train_hcformer
from leafward.systems.helm import config as helm
from leafward.systems.helm import train as train_helm
from leafward.systems.vision.config import Data

if TYPE_CHECKING:
    from rich.console import Console

    from leafward.cli.demo_parts.part import Part
    from leafward.report import Estimate, Result

TEXT, TAXONOMY = "shakespeare.txt.gz", "clothing.csv"
DRAWN = ("dress", "outwear", "shoes")
"""Classes whose first test photo is drawn with its clusters."""
DRAWN_SIZE = 160
"""Pixels of the shorter side of a drawing."""


def language() -> helm.Config:
    """HELM-D with 0.16 million weights and its twin: about a minute on two cores."""
    return helm.Config(
        data=helm.Data(source=embedded(TEXT), eval_tokens=4000),
        context=128,
        prompt="ROMEO:\n",
        arms=Arms(twin=True),
        loop=LoopConfig(steps=250, batch_size=16, eval_every=50, checkpoint_every=250),
        optim=OptimConfig(lr=1e-2, weight_decay=0.01, warmup_steps=20),
    )


def vision() -> hcformer.Config:
    """HCFormer-Nano on small photos for a moment."""
    return hcformer.Config(
        data=Data(taxonomy=embedded(TAXONOMY), size=64),
        loop=LoopConfig(steps=80, batch_size=32, checkpoint_every=80),
        optim=OptimConfig(lr=2e-3, betas=(0.9, 0.999), weight_decay=0.05, warmup_steps=20),
    )


def run(out: Path, console: Console) -> Part:
    from leafward.cli.demo_parts.part import Part

    spoken = _language(out, console)
    seen, drawn = _vision(out, console)
    result = {
        "helm": {key: spoken[key] for key in ("headline", "members")},
        "hcformer": {key: seen[key] for key in ("headline", "members")} | {"drawn": drawn},
    }

    def draw(page: Result) -> None:
        _draw_language(page, out / "helm", spoken)
        _draw_vision(page, seen, drawn)

    explore = shlex.join(["leafward", "explore", str(out / "helm")])
    return Part(_numbers(spoken, seen), result, draw, explore, "the tokens of the language model and of its twin")


def _language(out: Path, console: Console) -> dict[str, Any]:
    console.rule("build: a tiny HELM language model and its Euclidean twin")
    config = language()
    found = train_helm.run(config, out / "helm", overwrite=True)
    for member in found["members"]:
        console.print(f"{member['name']} goes on:", style="bold")
        console.print(config.prompt + member["sample"], markup=False)
    return found


def _vision(out: Path, console: Console) -> tuple[dict[str, Any], list[str]]:
    """Train on the photos, then draw what was grouped with what; the result and the pictures' files."""
    from leafward.data.samples import write_photos
    from leafward.systems.hcformer import explain

    console.rule("build: HCFormer-Nano, a backbone that clusters, on photos")
    write_photos(out / "photos")
    found = train_hcformer.run(replace(vision(), data=str(out / "photos")), out / "hcformer", overwrite=True)
    images = tuple(out / "photos" / "test" / label / f"{label}-test-001.jpg" for label in DRAWN)
    drawn = explain.run(
        explain.Args(str(out / "hcformer"), images, out / "clusters", DRAWN_SIZE),
        console,
    )
    return found, drawn["pictures"]


def _numbers(spoken: dict[str, Any], seen: dict[str, Any]) -> list[Estimate]:
    """Held-out loss of the language model, accuracy of the vision model."""
    from leafward.report import Estimate

    loss = next(each for each in spoken["headline"] if each["name"] == "held-out loss")
    top = next(each for each in seen["headline"] if each["name"] == "top-1 accuracy")
    return [
        Estimate.from_json(loss).named("HELM: held-out loss, per token"),
        Estimate.from_json(top).named("HCFormer-Nano: top-1 accuracy"),
    ]


def _draw_language(page: Result, run: Path, found: dict[str, Any]) -> None:
    from leafward.engine.layout import members_of
    from leafward.report import Estimate
    from leafward.systems.helm.report import LOSSES

    members = found["members"]
    page.section("A tiny language model")
    page.text(
        f"HELM-D with {members[0]['parameters']:,} weights in Lorentz space and its Euclidean twin, on the same "
        f"{members[0]['tokens']:,} tokens of Shakespeare in the same order."
    )
    page.headline([Estimate.from_json(number) for number in found["headline"]])
    page.curves({each.path.name: each.metrics() for each in members_of(run)}, LOSSES, ylabel="nats per token")
    page.text(
        "Samples after “ROMEO:”, lines divided by strokes. After a minute of training they have the look of the text, "
        "not its sense.\n\n" + "\n\n".join(f"{member['name']}: {_verse(member['sample'])}" for member in members)
    )


def _verse(text: str) -> str:
    return " / ".join(line for line in text.splitlines() if line.strip()) or "(the document ended at once)"


def _draw_vision(page: Result, found: dict[str, Any], drawn: list[str]) -> None:
    from leafward.report import Estimate

    page.section("A backbone that clusters")
    page.text(
        "HCFormer-Nano mixes an image by clustering its tokens, small groups first; here it was trained for a moment, "
        "from scratch, on the embedded photos."
    )
    page.headline([Estimate.from_json(number) for number in found["headline"]])
    page.text(
        "First the photo as the model sees it, then for each stage the regions whose tokens went to the same centre, "
        "in their mean colours. Beside it the window level: one colour for each global centre."
    )
    for file in map(Path, drawn):
        name = file.stem.partition("-")[2]  # without the number in front
        page.image(file.read_bytes(), alt=f"clusters of {name}", caption=name)
