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
from leafward.errors import UsageError, need
from leafward.report import Estimate, Result
from leafward.stats.estimate import PERCENT
from leafward.stats.intervals import over_seeds
from leafward.systems.hyperclip.methods import adapt
from leafward.systems.hyperclip.report import Row, by_method, means_over
from leafward.systems.hyperclip.segment.figures import MOST_BARS, bars, overlay, png
from leafward.systems.hyperclip.segment.task import Segmenter, as_bytes, segment

if TYPE_CHECKING:
    from leafward.systems.hyperclip.segment.config import Config

SHOWN = 4
"""Held-out scenes on the page."""
ADAPTER, CLIP, DECODER = "adapter", "model", "decoder"
SCORES = {"mIoU": "miou", "pixel accuracy": "pixel_accuracy"}


def build(config: Config) -> Segmenter:
    """An untrained segmenter with its adapter."""
    torch.manual_seed(config.loop.seed)
    assert config.model is not None
    model = _segmenter(config, config.model)
    adapt(model.encoder.model, config.adapt, config.loop.seed, config.model)
    model.encoder.lr_ratio = config.clip_lr_ratio  # pyright: ignore[reportArgumentType]
    return model


def _segmenter(config: Config, clip: str | Path) -> Segmenter:
    model = Segmenter(
        load_encoder(clip),
        channels=config.channels,
        window=config.window,
        score=config.adapt.score,
        c=config.adapt.c,
        radius_weight=config.adapt.radius_weight,
        templates=config.data.templates,
    )
    size = config.data.size
    need(size % model.patch == 0, "data.size", f"a multiple of the model's patch size {model.patch}", size)
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


def result(config: Config, scenes: SceneSets, rows: Sequence[Row]) -> Result:
    """What a run found; the rows of a method follow one another, one for each seed."""
    methods = by_method(rows)
    own = methods[config.adapt.label]
    numbers = []
    for label, several in methods.items():
        if several[0]["score"] != config.adapt.score:
            continue
        twin = methods.get(several[0]["name"]) if config.arms.twin else None
        more = f"; {several[0]['trainable']:,} trained parameters in CLIP"
        found = headline([row["metrics"] for row in several], scenes, config.data.most_scored, more, twin)
        # Of several methods the mIoU alone: the table has the rest.
        numbers += [found[0].named(f"{label}: mIoU")] if config.arms.compare else found
    counts = {"classes": len(scenes.classes), "train": len(scenes.train), "held_out": len(scenes.held_out)}
    values = {
        "metrics": {name: over_seeds([row["metrics"][name] for row in own]).value for name in own[0]["metrics"]},
        "iou": [_mean_iou(several) for several in zip(*(row["iou"] for row in own), strict=True)],
        "methods": [{key: value for key, value in row.items() if key != "iou"} for row in rows],
        "data": counts,
    }
    title = f"{config.model}, {config.adapt.label}: {counts['classes']} classes, {counts['train']} scenes, "
    notes = [means_over(config.arms.seeds) or "One seed was trained: there is no interval."]
    made = Result("Open-vocabulary segmentation", title + config.loop.length, numbers, notes=notes, values=values)
    if len(methods) > 1:
        made.section("Methods under the same budget")
        made.table(
            ["method", "trained parameters in CLIP", *(f"{name}, %" for name in SCORES)],
            [
                [
                    label,
                    several[0]["trainable"],
                    *(_percent([row["metrics"] for row in several], key) for key in SCORES.values()),
                ]
                for label, several in methods.items()
            ],
            f"The same decoder at the beginning, crops, order and steps; {config.adapt.label} is the one that was kept",
        )
    made.section("Classes")
    names, ious = [row["class"] for row in values["iou"]], [row["iou"] for row in values["iou"]]
    more = sum(iou is not None for iou in ious) - MOST_BARS
    caption = "IoU over the held-out scenes, in the colours of the pictures below"
    caption += f"; {more} lower ones are in result.json" if more > 0 else ""
    made.figure(partial(bars, names, ious, "IoU, %"), caption)
    return made


def draw(made: Result, model: Segmenter, scenes: SceneSets, size: int) -> None:
    """The first held-out scenes: the photo, the truth and the answer side by side."""
    made.section("Held-out scenes")
    for name, data in drawn(model, scenes, size):
        made.image(data, alt=f"{name}: photo, truth and answer", caption=f"{name}: photo, truth, answer")


def _mean_iou(rows: Sequence[Row]) -> Row:
    """Of one class over the seeds; None where it is nowhere."""
    found = [row["iou"] for row in rows if row["iou"] is not None]
    return {"class": rows[0]["class"], "iou": over_seeds(found).value if found else None}


def _percent(metrics: Sequence[Row], name: str) -> Estimate:
    """The mean over seeds of a share, with its interval; of one seed there is none.

    Pixels of a scene are not independent, so neither has an interval over pixels.
    """
    return over_seeds([100.0 * each[name] for each in metrics], PERCENT)


def headline(
    metrics: Sequence[Row], scenes: SceneSets, most: int | None, more: str = "", twin: Sequence[Row] | None = None
) -> list[Estimate]:
    """mIoU and pixel accuracy over the (first `most`) held-out scenes, of each seed; `more` ends the remark on the
    first. `twin`: the rows of the same method with the cosine."""
    scored = min(len(scenes.held_out), most or len(scenes.held_out))
    notes = {"mIoU": f"{scored} held-out scene{'s' * (scored != 1)}{more}", "pixel accuracy": ""}
    return [
        _percent(metrics, key).named(
            name,
            unit="%",
            better="higher",
            note=notes[name],
            twin=_percent([row["metrics"] for row in twin], key) if twin else None,
            twin_name="cosine",
        )
        for name, key in SCORES.items()
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
