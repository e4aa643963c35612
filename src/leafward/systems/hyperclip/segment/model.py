"""The parts of an open-vocabulary segmentation run: model, files and result."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from leafward.adapters import adapters, from_pretrained, save_pretrained, trainable_parameters
from leafward.config import checked
from leafward.data.scenes import SceneSets
from leafward.encoders import load_encoder
from leafward.engine import RunDirectory, load_published, publish
from leafward.errors import UsageError
from leafward.report import Estimate, Result
from leafward.systems.hyperclip.methods import adapt
from leafward.systems.hyperclip.segment.figures import MOST_BARS, bars, overlay, png
from leafward.systems.hyperclip.segment.task import Segmenter, as_bytes, segment

if TYPE_CHECKING:
    from leafward.systems.hyperclip.segment.config import Config

SHOWN = 4
"""Held-out scenes on the page."""
ADAPTER, CLIP, DECODER = "adapter", "model", "decoder"


def build(config: Config) -> Segmenter:
    """An untrained segmenter with its adapter."""
    torch.manual_seed(config.seed)
    assert config.model is not None
    model = _segmenter(config, config.model)
    adapt(model.encoder.model, config, config.method)  # pyright: ignore[reportArgumentType]
    model.encoder.lr_ratio = config.clip_lr_ratio  # pyright: ignore[reportArgumentType]
    return model


def _segmenter(config: Config, clip: str | Path) -> Segmenter:
    model = Segmenter(
        load_encoder(clip),
        channels=config.channels,
        window=config.window,
        score=config.score,
        c=config.c,
        radius_weight=config.radius_weight,
        templates=config.templates,
    )
    if config.size % model.patch:
        raise UsageError(f"size must be a multiple of the model's patch size {model.patch}, got {config.size}")
    return model


def save(config: Config, model: Segmenter, folder: Path) -> None:
    """Write the decoder of a run, and its adapter, or CLIP itself where its own weights were trained."""
    publish(model.decoder, folder / DECODER, {"channels": config.channels, "window": config.window})
    if adapters(model.encoder.model):
        save_pretrained(model.encoder.model, folder / ADAPTER)
    elif trainable_parameters(model.encoder.model)[0]:
        model.encoder.save_pretrained(folder / CLIP)


def open_run(path: Path) -> tuple[Config, Segmenter]:
    """The trained segmenter of a run directory."""
    from leafward.systems.hyperclip.segment.config import Config

    run = RunDirectory.open(path)
    if run.recipe != "segmenter" or not run.finished:
        raise UsageError(f"{path} is not a finished run of leafward train hyperclip --task segment")
    config = checked(Config, run.config)
    return config, open_model(config, path)


def open_model(config: Config, path: Path) -> Segmenter:
    """The segmenter that was trained by `config` and saved in `path`."""
    assert config.model is not None
    model = _segmenter(config, path / CLIP if (path / CLIP).is_dir() else config.model)
    if (path / ADAPTER).is_dir():
        from_pretrained(model.encoder.model, path / ADAPTER)
    model.decoder.load_state_dict(load_published(path / DECODER)[1])
    return model.eval()


def result(config: Config, scenes: SceneSets, rows: Sequence[dict[str, Any]]) -> Result:
    """What a run found; a row for each method that was trained."""
    own = next(row for row in rows if row["method"] == config.method)
    numbers = []
    for row in rows:
        more = f"; {row['trainable']:,} trained parameters in CLIP"
        found = headline(row["metrics"], scenes, config.most_scored, more)
        # Of several methods the mIoU alone: the table has the rest.
        numbers += found if len(rows) == 1 else [found[0].named(f"{row['method']}: mIoU")]
    counts = {"classes": len(scenes.classes), "train": len(scenes.train), "held_out": len(scenes.held_out)}
    values = {
        "metrics": own["metrics"],
        "iou": own["iou"],
        "methods": [{key: row[key] for key in ("method", "trainable", "metrics")} for row in rows],
        "data": counts,
    }
    of = f"{counts['classes']} classes, {counts['train']} scenes, {config.steps} steps"
    notes = ["One seed was trained: there is no interval."]
    title = f"{config.model}, {config.method}: {of}"
    made = Result("Open-vocabulary segmentation", title, numbers, notes=notes, values=values)
    if len(rows) > 1:
        made.section("Methods under the same budget")
        made.table(
            ["method", "trained parameters in CLIP", "mIoU, %", "pixel accuracy, %"],
            [
                [row["method"], row["trainable"], *(100.0 * row["metrics"][key] for key in ("miou", "pixel_accuracy"))]
                for row in rows
            ],
            f"The same decoder at the beginning, crops, order and steps; {config.method} is the one that was kept",
        )
    made.section("Classes")
    ious = [row["iou"] for row in own["iou"]]
    more = sum(iou is not None for iou in ious) - MOST_BARS
    caption = "IoU over the held-out scenes, in the colours of the pictures below"
    caption += f"; {more} lower ones are in result.json" if more > 0 else ""
    made.figure(partial(bars, [row["class"] for row in own["iou"]], ious, "IoU, %"), caption)
    return made


def draw(made: Result, model: Segmenter, scenes: SceneSets, size: int) -> None:
    """The first held-out scenes: the photo, the truth and the answer side by side."""
    made.section("Held-out scenes")
    for name, data in drawn(model, scenes, size):
        made.image(data, alt=f"{name}: photo, truth and answer", caption=f"{name}: photo, truth, answer")


def headline(metrics: dict[str, float], scenes: SceneSets, most: int | None, more: str = "") -> list[Estimate]:
    """mIoU and pixel accuracy over the (first `most`) held-out scenes; `more` ends the remark on the first.

    Pixels of a scene are not independent, so neither has an interval over pixels.
    """
    scored = min(len(scenes.held_out), most or len(scenes.held_out))
    note = f"{scored} held-out scene{'s' * (scored != 1)}{more}"
    return [
        Estimate(100.0 * metrics["miou"], name="mIoU", unit="%", better="higher", note=note),
        Estimate(100.0 * metrics["pixel_accuracy"], name="pixel accuracy", unit="%", better="higher"),
    ]


def iou_rows(classes: Sequence[str], ious: Sequence[float | None]) -> list[dict[str, Any]]:
    """The IoU of each class as result.json holds it."""
    return [{"class": name, "iou": iou} for name, iou in zip(classes, ious, strict=True)]


def drawn(model: Segmenter, scenes: SceneSets, size: int) -> list[tuple[str, bytes]]:
    """The first held-out scenes as PNG: the photo, the truth and the answer side by side."""
    classes = scenes.classes
    with torch.no_grad():
        text = model.text([name.replace("_", " ") for name in classes])
    pictures = []
    for index in range(min(SHOWN, len(scenes.held_out))):
        image = as_bytes(scenes.held_out.image(index))
        places = (scenes.held_out.mask(index), segment(model, image, text, size).numpy())
        photo = image.permute(1, 2, 0).numpy()
        row = [photo, *(overlay(photo, each, len(classes)) for each in places)]
        pictures.append((scenes.held_out.pairs[index][0].name, png(np.concatenate(row, axis=1))))
    return pictures
