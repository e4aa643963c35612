"""Training the members of a Hi-Mapper run: the hierarchy, and what it is compared with at the same budget."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from leafward.config import replace, to_dict
from leafward.engine import Cluster, Experiment, Loss, Member, RunDirectory, publish, train_loop
from leafward.engine.experiment import curves
from leafward.report import Result
from leafward.systems.himapper import config as settings
from leafward.systems.himapper import report
from leafward.systems.himapper.build import backbone_source, build, card_of, expected_pixels, freeze_plain, mapper_of
from leafward.systems.himapper.config import Config
from leafward.systems.vision import train as vision
from leafward.systems.vision.report import show_training
from leafward.systems.vision.train import UNITS

if TYPE_CHECKING:
    from leafward.systems.vision.train import VisionTask

PLAIN = "plain"


class WithHierarchy:
    """A task whose loss has that of the hierarchy added, wherever in the model the mapper sits."""

    def __init__(self, task: VisionTask) -> None:
        self.task = task

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        mapper, loss = mapper_of(model), self.task.loss(model, batch)
        assert mapper is not None
        assert mapper.losses is not None
        each, weights = mapper.losses
        # Each image weighs as much as in the task's loss.
        sums = {name: (values * loss.counts(len(values))).sum() for name, values in each.items()}
        total = sum((weights[name] * value for name, value in sums.items()), loss.total)
        return Loss(total, loss.count, {**loss.metrics, **sums})

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

    recipe, settings, leftovers = "himapper", settings, (UNITS,)

    def __init__(self, config: Config, cluster: Cluster) -> None:
        super().__init__(config, cluster)
        self.task = vision.make_task(config, expected_pixels(config))
        if config.data.check:
            cluster.on_main(self.task.check)

    def arms(self) -> dict[str, Config]:
        return arms(self.config)

    def train(self, member: Member[Config], run: RunDirectory, cluster: Cluster) -> dict[str, Any]:
        """Train one model, publish it and score it."""
        config, task = member.config, self.task
        with backbone_source(config) as (name, arguments, source):
            card = card_of(config, name, arguments, task.classes, task.decoder)
            model = build(card, source)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        learned: Any = task
        if not config.plain:
            mapper = mapper_of(model)
            assert mapper is not None
            mapper.mapper.learn(to_dict(config.losses))
            learned = WithHierarchy(task)
        elif config.freeze_backbone:
            learned = OnFrozenBackbone(task, freeze_plain(model, config.data.task))
        fitted = train_loop(model, learned, config.loop, config.optim, run, cluster)
        publish(model, member.model, card, cluster)

        record = {"arm": member.arm, "backbone": name, "parameters": parameters}
        record["step"] = fitted.best_step or fitted.step
        return vision.scored(member, task, model, cluster, self.out, record)

    def conclude(self, run: RunDirectory, members: list[Member[Config]], results: list[dict[str, Any]]) -> Result:
        monitor, units = self.task.monitor, [vision.read_units(member.path) for member in members]
        data = self.config.data
        made = report.result(
            f"Hi-Mapper on {results[0]['backbone']}: {data.task}", str(data.source), monitor, results, units
        )
        made.values["data"] = {"classes": self.task.classes}
        further = {name: f"Loss {name}" for name in self.config.losses.__struct_fields__}
        show_training(made, monitor, curves(members), **further | report.LOGGED)
        return made


run = Training.launch


def arms(config: Config) -> dict[str, Config]:
    """What is compared: the tree of `config` and, with `twin`, the plain backbone and the tree in the other geometry;
    with `ablation`, the deterministic tree."""
    chosen = [replace(config, ablation=False)]
    if config.arms.twin:
        other = "euclidean" if config.geometry == "lorentz" else "lorentz"
        chosen += [replace(chosen[0], arms={"twin": False}, plain=True), replace(chosen[0], geometry=other)]
    if config.ablation:
        chosen.append(replace(chosen[0], deterministic=True))
    return {_arm(each): each for each in chosen}


def _arm(config: Config) -> str:
    """plain, or the geometry of the tree, and whether the tree is deterministic."""
    return PLAIN if config.plain else config.geometry + ("-deterministic" if config.deterministic else "")
