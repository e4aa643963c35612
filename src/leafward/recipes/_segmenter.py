"""The parts of an open-vocabulary segmentation run: model, files, result and page."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from leafward.adapters import adapters, from_pretrained, load_encoder, save_pretrained, trainable_parameters
from leafward.engine import RunDirectory, from_dict, load_published
from leafward.engine.config import to_dict
from leafward.errors import UsageError
from leafward.recipes._hyperclip_training import adapt
from leafward.report import Number, Page
from leafward.tasks.open_vocabulary import Segmenter
from leafward.tasks.segmentation import SceneSets

if TYPE_CHECKING:
    from leafward.recipes.segmenter import Config

ADAPTER, DECODER = "adapter", "decoder"


def build(config: Config) -> Segmenter:
    """An untrained segmenter with its adapter."""
    torch.manual_seed(config.seed)
    model = _segmenter(config)
    adapt(model.encoder.model, config, config.method)  # pyright: ignore[reportArgumentType]
    return model


def _segmenter(config: Config) -> Segmenter:
    assert config.model is not None
    model = Segmenter(
        load_encoder(config.model),
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


def save(model: Segmenter, folder: Path) -> None:
    """Write the adapter of a run, where it has one."""
    if adapters(model.encoder.model):
        save_pretrained(model.encoder.model, folder / ADAPTER)


def open_run(path: Path) -> tuple[Config, Segmenter]:
    """The trained segmenter of a run directory."""
    from leafward.recipes.segmenter import Config

    run = RunDirectory.open(path)
    if run.recipe != "segmenter" or not run.finished:
        raise UsageError(f"{path} is not a finished run of leafward train segmenter")
    config = from_dict(Config, run.config)
    model = _segmenter(config)
    if (path / ADAPTER).is_dir():
        from_pretrained(model.encoder.model, path / ADAPTER)
    model.decoder.load_state_dict(load_published(path / DECODER)[1])
    return config, model.eval()


def summarise(config: Config, scenes: SceneSets, model: Segmenter, metrics: dict[str, float]) -> dict[str, Any]:
    """The content of result.json."""
    scored = min(len(scenes.held_out), config.most_scored or len(scenes.held_out))
    trained = trainable_parameters(model.encoder.model)[0]
    note = f"{scored} held-out scenes; {trained:,} trained parameters in CLIP"
    headline = [
        Number("mIoU", 100.0 * metrics["miou"], unit="%", better="higher", note=note),
        Number("pixel accuracy", 100.0 * metrics["pixel_accuracy"], unit="%", better="higher"),
    ]
    return {
        "headline": [number.to_json() for number in headline],
        "metrics": metrics,
        "data": {"classes": len(scenes.classes), "train": len(scenes.train), "held_out": len(scenes.held_out)},
        "notes": ["One seed was trained: there is no interval."],
    }


def page(config: Config, result: dict[str, Any], environment: dict[str, Any]) -> Page:
    """The page of a run, not yet written."""
    data = result["data"]
    made = Page(
        "Open-vocabulary segmentation",
        subtitle=f"{config.model}, {config.method}: {data['classes']} classes, {data['train']} scenes, "
        f"{config.steps} steps",
    )
    for note in result["notes"]:
        made.note(note)
    made.headline([Number.from_json(number) for number in result["headline"]])
    made.section("How it was run")
    made.command(shlex.join(environment["argv"]))
    made.details("Configuration", to_dict(config))
    made.environment(environment)
    return made
