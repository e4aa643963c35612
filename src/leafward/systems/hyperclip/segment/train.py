"""Training of open-vocabulary segmenters: one, or every method under the same budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from leafward.adapters import trainable_parameters
from leafward.config import checked, replace
from leafward.data.scenes import SceneSets, load_scenes
from leafward.engine import Cluster, Experiment, LoopConfig, Member, OptimConfig, RunDirectory, fit, session
from leafward.engine.experiment import batch_of
from leafward.files import read_record
from leafward.systems.hyperclip.methods import COMPARED
from leafward.systems.hyperclip.segment import model as parts
from leafward.systems.hyperclip.segment.config import MAY_CHANGE, Config, check
from leafward.systems.hyperclip.segment.task import OpenVocabularyTask, Segmenter, class_ious, confusions


class Training(Experiment[Config]):
    """The methods: each from the same decoder, on the same crops in the same order, for the same steps."""

    recipe, may_change, leftovers = "segmenter", MAY_CHANGE, (parts.ADAPTER, parts.DECODER)

    def __init__(self, config: Config, cluster: Cluster) -> None:
        super().__init__(config, cluster)
        assert config.data is not None
        self.scenes = load_scenes(config.data, config.ignore, seed=config.seed)
        task = _task(config, self.scenes, parts.build(config))  # what cannot be built is refused before the run is made
        if config.check:
            cluster.on_main(task.check)

    def arms(self) -> dict[str, Config]:
        names: Any = COMPARED if self.config.compare else (self.config.method,)
        return {name: replace(self.config, method=name) for name in names}

    def kept(self) -> str:
        return self.config.method

    def train(self, member: Member[Config], run: RunDirectory, cluster: Cluster) -> dict[str, Any]:
        return train(member, self.scenes, run, cluster)

    def conclude(
        self, run: RunDirectory, members: list[Member[Config]], results: list[dict[str, Any]]
    ) -> dict[str, Any]:
        return parts.summarise(self.config, self.scenes, results)

    def page(self, run: RunDirectory, members: list[Member[Config]], result: dict[str, Any]) -> None:
        model = parts.open_model(self.config, run.path).to(self.cluster.device)
        pictures = parts.drawn(model, self.scenes, self.config.size)
        parts.page(self.config, result, read_record(run.path / "env.json"), pictures).write(run.report)


def _task(config: Config, scenes: SceneSets, model: Segmenter) -> OpenVocabularyTask:
    return OpenVocabularyTask(scenes, config.size, config.most_scored).bind(model)


def train(member: Member[Config], scenes: SceneSets, run: RunDirectory, cluster: Cluster) -> dict[str, Any]:
    """Train a segmenter on every rank: what was trained and how it scores on the held-out scenes."""
    config = member.config
    loop = LoopConfig(
        steps=config.steps,
        batch_size=batch_of(config.batch, len(scenes.train), cluster),
        seed=config.seed,
        precision=config.precision,
        log_every=config.log_every,
        checkpoint_every=max(1, config.steps // 4),
        workers=config.workers,
        device=config.device,
    )
    optim = OptimConfig(lr=config.lr, weight_decay=config.weight_decay, warmup_steps=min(100, config.steps // 10))
    model = parts.build(config)
    lesson = _task(config, scenes, model)
    found = fit(model, lesson, loop, optim, run, cluster)

    def conclude() -> dict[str, Any]:
        if member.kept:
            parts.save(config, model, member.home)
        table = lesson.table  # none where a resumed run had nothing left to do
        if table is None:
            table = confusions(model, scenes, config.size, config.most_scored)
        return {
            "method": config.method,
            "trainable": trainable_parameters(model.encoder.model)[0],
            "metrics": found.metrics,
            "iou": parts.iou_rows(scenes.classes, class_ious(table)),
        }

    return cluster.on_main(conclude)


def run(config: Config, out: Path, *, resume: bool = False, overwrite: bool = False) -> dict[str, Any]:
    """Train in the run directory `out`; returns what result.json holds.

    decoder/ and adapter/ hold what was learned; where weights of CLIP itself were trained, model/ does.
    """
    config = checked(Config, config)
    check(config)
    with session(config.device) as cluster:
        return Training(config, cluster).run(out, resume=resume, overwrite=overwrite)
