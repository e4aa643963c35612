"""Training of open-vocabulary segmenters: one, or every method under the same budget."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from leafward.adapters import trainable_parameters
from leafward.engine import LoopConfig, OptimConfig, RunDirectory, fit
from leafward.files import read_record, write_json
from leafward.recipes._hyperclip_training import COMPARED
from leafward.recipes._segmenter import build, iou_rows, save
from leafward.tasks.open_vocabulary import OpenVocabularyTask, Segmenter, class_ious, confusions
from leafward.tasks.segmentation import SceneSets

if TYPE_CHECKING:
    from leafward.recipes.segmenter import Config


def task(config: Config, scenes: SceneSets, model: Segmenter) -> OpenVocabularyTask:
    return OpenVocabularyTask(scenes, config.size, config.most_scored).bind(model)


def compare(config: Config, scenes: SceneSets, run: RunDirectory) -> list[dict[str, Any]]:
    """Train every method from the same decoder, on the same crops in the same order, for the same steps.

    What the method of the configuration learned is kept in the run directory. Trainings that are done are kept.
    """
    rows = []
    for name in COMPARED:
        folder = run.checkpoints / name
        done = folder / "scores.json"
        if not done.is_file():
            each: Any = replace(config, method=name)  # pyright: ignore[reportArgumentType]
            model = build(each)
            training = folder / "training"
            cell = RunDirectory.create(training, {"method": name}, resume=(training / "config.yaml").is_file())
            row = train(each, scenes, model, cell)
            if name == config.method:
                save(config, model, run.path)
            write_json(done, row)
        rows.append(read_record(done))
    return rows


def train(config: Config, scenes: SceneSets, model: Segmenter, run: RunDirectory) -> dict[str, Any]:
    """Train a segmenter in `run`: what was trained and how it scores on the held-out scenes."""
    loop = LoopConfig(
        steps=config.steps,
        batch_size=min(config.batch, len(scenes.train)),
        seed=config.seed,
        checkpoint_every=max(1, config.steps // 4),
        workers=config.workers,
        device=config.device,
    )
    optim = OptimConfig(lr=config.lr, weight_decay=config.weight_decay, warmup_steps=min(100, config.steps // 10))
    lesson = task(config, scenes, model)
    found = fit(model, lesson, loop, optim, run)
    table = lesson.table  # none where a resumed run had nothing left to do
    if table is None:
        table = confusions(model, scenes, config.size, config.most_scored)
    return {
        "method": config.method,
        "trainable": trainable_parameters(model.encoder.model)[0],
        "metrics": found.metrics,
        "iou": iou_rows(scenes.classes, class_ious(table)),
    }
