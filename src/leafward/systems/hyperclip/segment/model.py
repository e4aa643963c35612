"""The parts of an open-vocabulary segmentation run: model, files, result and page."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from leafward.adapters import adapters, from_pretrained, save_pretrained, trainable_parameters
from leafward.config import checked, to_dict
from leafward.data.scenes import SceneSets
from leafward.encoders import load_encoder
from leafward.engine import RunDirectory, load_published, publish
from leafward.errors import UsageError, need
from leafward.report import Estimate, Number, Page
from leafward.stats.intervals import mean_interval
from leafward.systems.hyperclip.methods import adapt
from leafward.systems.hyperclip.report import Row, by_method, over_seeds
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


def summarise(config: Config, scenes: SceneSets, rows: Sequence[Row]) -> dict[str, Any]:
    """The content of result.json; the rows of a method follow one another, one for each seed."""
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
        numbers += [replace(found[0], name=f"{label}: mIoU")] if config.arms.compare else found
    return {
        "headline": [number.to_json() for number in numbers],
        "metrics": {name: mean_interval([row["metrics"][name] for row in own])[0] for name in own[0]["metrics"]},
        "iou": [_mean_iou(several) for several in zip(*(row["iou"] for row in own), strict=True)],
        "methods": [{key: value for key, value in row.items() if key != "iou"} for row in rows],
        "data": {"classes": len(scenes.classes), "train": len(scenes.train), "held_out": len(scenes.held_out)},
        "notes": [over_seeds(config.arms.seeds) or "One seed was trained: there is no interval."],
    }


def _mean_iou(rows: Sequence[Row]) -> Row:
    """Of one class over the seeds; None where it is nowhere."""
    found = [row["iou"] for row in rows if row["iou"] is not None]
    return {"class": rows[0]["class"], "iou": mean_interval(found)[0] if found else None}


def _percent(metrics: Sequence[Row], name: str) -> Estimate:
    """The mean over seeds of a share, with its interval; of one seed there is none.

    Pixels of a scene are not independent, so neither has an interval over pixels.
    """
    return Estimate(*mean_interval([100.0 * each[name] for each in metrics], 0.0, 100.0))


def headline(
    metrics: Sequence[Row], scenes: SceneSets, most: int | None, more: str = "", twin: Sequence[Row] | None = None
) -> list[Number]:
    """mIoU and pixel accuracy over the (first `most`) held-out scenes, of each seed; `more` ends the remark on the
    first. `twin`: the rows of the same method with the cosine."""
    scored = min(len(scenes.held_out), most or len(scenes.held_out))
    notes = {"mIoU": f"{scored} held-out scene{'s' * (scored != 1)}{more}", "pixel accuracy": ""}
    numbers = []
    for name, key in SCORES.items():
        own, other = _percent(metrics, key), _percent([row["metrics"] for row in twin], key) if twin else Estimate(None)
        about: dict[str, Any] = {"unit": "%", "better": "higher", "note": notes[name], "twin_name": "cosine"}
        numbers.append(Number(name, own.value, own.interval, other.value, other.interval, **about))
    return numbers


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


def page(
    config: Config, result: dict[str, Any], environment: dict[str, Any], pictures: Sequence[tuple[str, bytes]]
) -> Page:
    """The page of a run, not yet written; `pictures` of scenes by name."""
    data = result["data"]
    made = Page(
        "Open-vocabulary segmentation",
        subtitle=f"{config.model}, {config.adapt.label}: {data['classes']} classes, {data['train']} scenes, "
        f"{config.loop.length}",
    )
    for note in result["notes"]:
        made.note(note)
    made.headline([Number.from_json(number) for number in result["headline"]])
    methods = by_method(result["methods"])
    if len(methods) > 1:
        made.section("Methods under the same budget")
        made.table(
            ["method", "trained parameters in CLIP", *(f"{name}, %" for name in SCORES)],
            [
                [
                    label,
                    rows[0]["trainable"],
                    *(_percent([row["metrics"] for row in rows], key) for key in SCORES.values()),
                ]
                for label, rows in methods.items()
            ],
            f"The same decoder at the beginning, crops, order and steps; {config.adapt.label} is the one that was kept",
        )
    made.section("Classes")
    names, ious = [row["class"] for row in result["iou"]], [row["iou"] for row in result["iou"]]
    caption = "IoU over the held-out scenes, in the colours of the pictures below"
    more = sum(iou is not None for iou in ious) - MOST_BARS
    made.figure(bars(names, ious, "IoU, %"), caption + (f"; {more} lower ones are in result.json" if more > 0 else ""))
    made.section("Held-out scenes")
    for name, data in pictures:
        made.image(data, alt=f"{name}: photo, truth and answer", caption=f"{name}: photo, truth, answer")
    made.section("How it was run")
    made.command(shlex.join(environment["argv"]))
    made.details("Configuration", to_dict(config))
    made.environment(environment)
    return made
