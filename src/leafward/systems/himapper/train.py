"""Training the members of a Hi-Mapper run: the hierarchy, and what it is compared with at the same budget."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from leafward.config import checked, replace
from leafward.engine import Cluster, Experiment, Loss, Member, RunDirectory, fit, publish, session
from leafward.engine.experiment import curves
from leafward.report import Result
from leafward.systems.himapper import report
from leafward.systems.himapper.build import backbone_source, build, card_of, expected_pixels, freeze_plain, mapper_of
from leafward.systems.himapper.config import MAY_CHANGE, Config, check
from leafward.systems.vision import train as vision
from leafward.systems.vision.config import Config as VisionConfig
from leafward.systems.vision.report import show_training
from leafward.systems.vision.train import UNITS

if TYPE_CHECKING:
    from leafward.systems.vision.train import VisionTask

PLAIN = "plain"


class WithHierarchy:
    """A task whose loss has that of the hierarchy added, wherever in the model the mapper sits."""

    def __init__(self, task: VisionTask, contrast_weight: float, kl_weight: float) -> None:
        self.task, self.contrast_weight, self.kl_weight = task, contrast_weight, kl_weight

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        mapper, loss = mapper_of(model), self.task.loss(model, batch)
        assert mapper is not None
        assert mapper.losses is not None
        counts = loss.counts(len(mapper.losses.contrasts))  # each image weighs as much as in the task's loss
        contrast, kl = (mapper.losses.contrasts * counts).sum(), mapper.losses.kl * counts.sum()
        extra = self.contrast_weight * contrast + self.kl_weight * kl
        return Loss(loss.total + extra, loss.count, {**loss.metrics, "contrast": contrast, "kl": kl})

    def scalars(self, model: nn.Module) -> dict[str, Tensor | float]:
        mapper = mapper_of(model)
        assert mapper is not None
        return {"curvature": mapper.mapper.curvature}


class OnFrozenBackbone:
    """A task that leaves the backbone in evaluation mode: its heads alone learn."""

    def __init__(self, task: VisionTask, backbone: nn.Module) -> None:
        self.task, self.backbone = task, backbone

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        self.backbone.eval()  # the loop has put the whole model into training mode
        return self.task.loss(model, batch)


class Training(Experiment[Config]):
    """The tree, and what it is compared with."""

    recipe, may_change, leftovers = "himapper", MAY_CHANGE, (UNITS,)

    def __init__(self, config: Config, cluster: Cluster) -> None:
        super().__init__(config, cluster)
        self.task = vision.make_task(vision_config(config), expected_pixels(config))
        if config.check:
            cluster.on_main(self.task.check)

    def arms(self) -> dict[str, Config]:
        return arms(self.config)

    def seeds(self) -> range:
        return range(self.config.loop.seed, self.config.loop.seed + self.config.seeds)

    def train(self, member: Member[Config], run: RunDirectory, cluster: Cluster) -> dict[str, Any]:
        """Train one model, publish it and score it."""
        config, task = member.config, self.task
        with backbone_source(config) as (name, arguments, source):
            card = card_of(config, name, arguments, task.classes, task.decoder)
            model = build(card, source)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        learned: Any = task
        if not config.plain:
            learned = WithHierarchy(task, config.contrast_weight, config.kl_weight)
        elif config.freeze_backbone:
            learned = OnFrozenBackbone(task, freeze_plain(model, config.task))
        fitted = fit(model, learned, config.loop, config.optim, run, cluster)
        publish(model, member.model, card, cluster)

        record = {"arm": member.arm, "backbone": name, "parameters": parameters}
        record["step"] = fitted.best_step or fitted.step
        return vision.scored(member, task, model, cluster, self.out, record)

    def conclude(self, run: RunDirectory, members: list[Member[Config]], results: list[dict[str, Any]]) -> Result:
        monitor, units = self.task.monitor, [vision.read_units(member.path) for member in members]
        title = f"Hi-Mapper on {results[0]['backbone']}: {self.config.task}"
        made = report.result(title, str(self.config.data), monitor, results, units)
        made.values["data"] = {"classes": self.task.classes}
        show_training(made, monitor, curves(members), **report.LOGGED)
        return made


def run(config: Config, out: Path, *, resume: bool = False, overwrite: bool = False) -> dict[str, Any]:
    """Check the data, fine-tune, publish and score in the run directory `out`; returns what result.json holds.

    Start it with torchrun for several ranks. Raises `engine.Interrupted` after SIGTERM or SIGINT, once everything is
    saved; the same call with `resume` goes on from there.
    """
    config = checked(Config, config)
    check(config)
    with session(config.loop.device, config.loop.timeout) as cluster:
        return Training(config, cluster).run(out, resume=resume, overwrite=overwrite)


def arms(config: Config) -> dict[str, Config]:
    """What is compared: the tree of `config` and, with `twin`, the plain backbone and the tree in the other geometry;
    with `ablation`, the deterministic tree."""
    chosen = [replace(config, ablation=False)]
    if config.twin:
        other = "euclidean" if config.geometry == "lorentz" else "lorentz"
        chosen += [replace(chosen[0], twin=False, plain=True), replace(chosen[0], geometry=other)]
    if config.ablation:
        chosen.append(replace(chosen[0], deterministic=True))
    return {_arm(each): each for each in chosen}


def _arm(config: Config) -> str:
    """plain, or the geometry of the tree, and whether the tree is deterministic."""
    return PLAIN if config.plain else config.geometry + ("-deterministic" if config.deterministic else "")


def vision_config(config: Config) -> VisionConfig:
    """The part of the settings that says what is learned from what."""
    return VisionConfig(
        task=config.task,
        data=config.data,
        size=config.size,
        decoder=config.decoder,
        sliding=config.sliding,
        ignore=config.ignore,
        taxonomy=config.taxonomy,
        held_out=config.held_out,
        augment=config.augment,
        loop=config.loop,
    )
