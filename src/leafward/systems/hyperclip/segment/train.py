"""Training of open-vocabulary segmenters: one, or every method under the same budget."""

from __future__ import annotations

from typing import Any

from leafward.adapters import trainable_parameters
from leafward.config import replace
from leafward.data.scenes import SceneSets, load_scenes, score
from leafward.engine import Cluster, Experiment, Member, RunDirectory, train_loop
from leafward.engine.experiment import batch_of
from leafward.report import Result
from leafward.systems.hyperclip.methods import arms_of, named
from leafward.systems.hyperclip.segment import config as settings
from leafward.systems.hyperclip.segment import model as parts
from leafward.systems.hyperclip.segment.config import Config
from leafward.systems.hyperclip.segment.task import OpenVocabularyTask, Segmenter, class_ious, confusions


class Training(Experiment[Config]):
    """The methods, each with every seed; of one seed all have the same decoder at the beginning, and the same crops in
    the same order.

    decoder/ and adapter/ of the run hold what the chosen method learned with the first seed; where weights of CLIP
    itself were trained, model/ does.
    """

    recipe, settings, leftovers = "segmenter", settings, (parts.ADAPTER, parts.DECODER)

    def __init__(self, config: Config, cluster: Cluster) -> None:
        super().__init__(config, cluster)
        config, data = self.config, self.config.data
        # Where the folder does not say which scenes are held out, the seed does.
        self.scenes = {seed: load_scenes(data.source, data.ignore, seed=seed) for seed in self.seeds()}
        task = _task(config, self.scenes[config.loop.seed], parts.build(config))  # what cannot be built is refused here
        if data.check:
            cluster.on_main(task.check)

    def arms(self) -> dict[str, Config]:
        return arms_of(self.config)

    def kept(self) -> str:
        return self.config.adapt.arm

    def train(self, member: Member[Config], run: RunDirectory, cluster: Cluster) -> dict[str, Any]:
        return train(member, self.scenes[member.seed], run, cluster)

    def conclude(self, run: RunDirectory, members: list[Member[Config]], results: list[dict[str, Any]]) -> Result:
        return parts.result(self.config, self.scenes[self.config.loop.seed], results)

    def page(self, run: RunDirectory, found: Result) -> None:
        model = parts.open_model(self.config, run.path).to(self.cluster.device)
        parts.draw(found, model, self.scenes[self.config.loop.seed], self.config.data.size)
        super().page(run, found)


run = Training.launch


def _task(config: Config, scenes: SceneSets, model: Segmenter) -> OpenVocabularyTask:
    return OpenVocabularyTask(scenes, config.data.size, config.data.most_scored).bind(model)


def train(member: Member[Config], scenes: SceneSets, run: RunDirectory, cluster: Cluster) -> dict[str, Any]:
    """Train a segmenter on every rank: what was trained and how it scores on the held-out scenes."""
    config = member.config
    loop = replace(config.loop, batch_size=batch_of(config.loop.batch_size, len(scenes.train), cluster))
    model = parts.build(config)
    lesson = _task(config, scenes, model)
    found = train_loop(model, lesson, loop, config.optim, run, cluster)

    def conclude() -> dict[str, Any]:
        if member.kept:
            parts.save(config, model, member.home)
        table = lesson.table  # none where a resumed run had nothing left to do
        if table is None or found.best_step != found.step:
            table = confusions(model.eval(), scenes, config.data.size, config.data.most_scored)
        return {
            **named(config.adapt, member.seed),
            "trainable": trainable_parameters(model.encoder.model)[0],
            "metrics": score(table),
            "iou": parts.iou_rows(scenes.classes, class_ious(table)),
        }

    return cluster.on_main(conclude)
