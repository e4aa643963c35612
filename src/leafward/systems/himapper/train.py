"""Training the members of a Hi-Mapper run: the hierarchy, and what it is compared with at the same budget."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from leafward.engine import Cluster, Loss, RunDirectory, fit, publish, session
from leafward.files import finite
from leafward.recipes import _hcformer_train as vision
from leafward.recipes import _himapper_report as report
from leafward.recipes import hcformer
from leafward.recipes._hcformer_train import UNITS
from leafward.recipes._himapper_model import (
    backbone_source,
    build,
    card_of,
    expected_pixels,
    freeze_plain,
    mapper_of,
)
from leafward.recipes._members import Member, create_run, finish, plan, train_members
from leafward.recipes.himapper import MAY_CHANGE, Config

if TYPE_CHECKING:
    from leafward.recipes._hcformer_train import VisionTask

PLAIN = "plain"


class WithHierarchy:
    """A task whose loss has that of the hierarchy added, wherever in the model the mapper sits."""

    def __init__(self, task: VisionTask, contrast_weight: float, kl_weight: float) -> None:
        self.task, self.weights = task, (contrast_weight, kl_weight)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        mapper, loss = mapper_of(model), self.task.loss(model, batch)
        assert mapper is not None
        assert mapper.losses is not None
        found, count = mapper.losses, loss.count
        own = {"contrast": found.contrast * count, "kl": found.kl * count}
        return Loss(loss.total + count * found.total(*self.weights), count, {**loss.metrics, **own})

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


def train(config: Config, out: Path, *, resume: bool, overwrite: bool) -> dict[str, Any]:
    """The whole recipe, on every rank. The data are looked at before anything is written."""
    with session(config.loop.device) as cluster:
        task = vision.make_task(vision_config(config), expected_pixels(config))
        if config.check:
            cluster.on_main(task.check)
        members = plan(config, arms(config), out)
        run = _create(cluster, out, config, resume=resume, overwrite=overwrite)
        results = train_members(
            members,
            run,
            partial(_create, cluster),
            lambda member, own: _train_member(member, task, cluster, own, out),
        )
        return cluster.on_main(lambda: _conclude(config, run, task, members, results))


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


def vision_config(config: Config) -> hcformer.Config:
    """The part of the settings that says what is learned from what."""
    return hcformer.Config(
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


def _create(cluster: Cluster, path: Path, config: Config, *, resume: bool, overwrite: bool) -> RunDirectory:
    settings = {"recipe": "himapper", "may_change": MAY_CHANGE, "leftovers": (UNITS,)}
    return create_run(RunDirectory, cluster, path, config, resume=resume, overwrite=overwrite, **settings)


def _train_member(
    member: Member[Config], task: VisionTask, cluster: Cluster, run: RunDirectory, out: Path
) -> dict[str, Any]:
    """Train one model, publish it and score it."""
    config = member.config
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

    record = {"arm": member.arm, "backbone": name, "parameters": parameters, "step": fitted.best_step or fitted.step}
    return cluster.on_main(lambda: vision.scored(member, task, model, run, out, record))


def _conclude(
    config: Config, run: RunDirectory, task: VisionTask, members: list[Member[Config]], results: list[dict[str, Any]]
) -> dict[str, Any]:
    """Put the members together, write result.json and report.html."""
    units = [vision.read_units(member.path) for member in members]
    curves = {member.name: RunDirectory.open(member.path).metrics() for member in members}
    result = finite(report.result(task.monitor, results, units))
    result["data"] = {"classes": task.classes}
    return finish(run, result, lambda: report.write(config, task.monitor, result, curves, run.path))
