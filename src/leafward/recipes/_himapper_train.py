"""Training the members of a Hi-Mapper run: the hierarchy, and what it is compared with at the same budget.

A single model trains in the run directory itself; several train in `members/ARM-SEED`, each a run directory of its own.
The model of the first is published in the run directory's `model` either way.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from leafward.engine import Cluster, Loss, RunDirectory, fit, publish, session, to_dict
from leafward.files import finite, replacing
from leafward.recipes import _hcformer_train as vision
from leafward.recipes import _himapper_report as report
from leafward.recipes import hcformer
from leafward.recipes._hcformer_model import MODEL
from leafward.recipes._hcformer_train import MEMBERS, UNITS
from leafward.recipes._himapper_model import backbone_source, build, card_of, mapper_of
from leafward.recipes.himapper import MAY_CHANGE, Config

if TYPE_CHECKING:
    from leafward.recipes._hcformer_train import VisionTask

PLAIN = "plain"


@dataclass(frozen=True)
class Member:
    """One model of a run."""

    config: Config
    path: Path
    model: Path

    @property
    def arm(self) -> str:
        """plain, or the geometry of the tree, and whether the tree is deterministic."""
        if self.config.plain:
            return PLAIN
        return self.config.geometry + ("-deterministic" if self.config.deterministic else "")

    @property
    def name(self) -> str:
        return f"{self.arm}-{self.config.loop.seed}"


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


def train(config: Config, out: Path, *, resume: bool, overwrite: bool) -> dict[str, Any]:
    """The whole recipe, on every rank. The data are looked at before anything is written."""
    with session(config.loop.device) as cluster:
        task = vision.make_task(vision_config(config))
        if config.check:
            cluster.on_main(task.check)
        members = plan(config, out)
        run = _create(cluster, out, config, resume=resume, overwrite=overwrite)
        results = [_train_member(member, task, cluster, run, out) for member in members]
        return cluster.on_main(lambda: _conclude(config, run, task, members, results))


def plan(config: Config, out: Path) -> list[Member]:
    """The members of a run, the one that gives it its model first."""
    own = replace(config, twin=False, ablation=False, seeds=1)
    arms = [own]
    if config.twin:
        other = "euclidean" if config.geometry == "lorentz" else "lorentz"
        arms += [replace(own, plain=True), replace(own, geometry=other)]
    if config.ablation:
        arms.append(replace(own, deterministic=True))
    members: list[Member] = []
    for arm in arms:
        for seed in range(config.loop.seed, config.loop.seed + config.seeds):
            member = Member(replace(arm, loop=replace(config.loop, seed=seed)), out, out / MODEL)
            if len(arms) * config.seeds > 1:
                path = out / MEMBERS / member.name
                member = replace(member, path=path, model=path / MODEL if members else out / MODEL)
            members.append(member)
    return members


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
    """The run directory on every rank; only the first writes."""

    def create() -> None:
        RunDirectory.create(path, config, resume=resume, overwrite=overwrite, may_change=MAY_CHANGE, recipe="himapper")
        if overwrite:
            shutil.rmtree(path / MEMBERS, ignore_errors=True)
            (path / UNITS).unlink(missing_ok=True)

    cluster.on_main(create)
    return RunDirectory(path, to_dict(config), MAY_CHANGE, writes=cluster.main)


def _train_member(member: Member, task: VisionTask, cluster: Cluster, run: RunDirectory, out: Path) -> dict[str, Any]:
    """Train one model, publish it and score it; what is already done is only read."""
    config, alone = member.config, member.path == out
    if not alone:
        if (member.path / "result.json").is_file():
            return RunDirectory.open(member.path).result()
        resume = (member.path / "config.yaml").is_file()
        run = _create(cluster, member.path, config, resume=resume, overwrite=False)
    if config.loop.compile:
        torch._dynamo.reset()  # every member compiles the same code anew, and only a few versions are allowed
    torch.manual_seed(config.loop.seed)
    with backbone_source(config) as (name, arguments, source):
        card = card_of(config, name, arguments, task.classes, task.decoder)
        model = build(card, source)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    learned: Any = task if config.plain else WithHierarchy(task, config.contrast_weight, config.kl_weight)
    fitted = fit(model, learned, config.loop, config.optim, run, cluster)
    publish(model, member.model, card, cluster)

    def conclude() -> dict[str, Any]:
        model.eval()
        scores, units = task.measure(model)
        if units is not None:
            with replacing(member.path / UNITS) as temporary, open(temporary, "wb") as file:
                np.save(file, units)
        result = finite(
            {
                "name": member.name,
                "arm": member.arm,
                "seed": config.loop.seed,
                "backbone": name,
                "parameters": parameters,
                "step": fitted.best_step or fitted.step,
                "model": str(member.model.relative_to(out)),
                "scores": scores,
            }
        )
        if not alone:
            run.finish(result)
        return result

    return cluster.on_main(conclude)


def _conclude(
    config: Config, run: RunDirectory, task: VisionTask, members: list[Member], results: list[dict[str, Any]]
) -> dict[str, Any]:
    """Put the members together, write result.json and report.html."""
    files = [member.path / UNITS for member in members]
    units = [np.load(file, allow_pickle=False) if file.is_file() else None for file in files]
    curves = {member.name: RunDirectory.open(member.path).metrics() for member in members}
    result = finite(report.result(task.monitor, results, units))
    result["data"] = {"classes": task.classes}
    run.finish(result)  # before the page, so that nothing it needs can lose it
    try:
        report.write(config, task.monitor, result, curves, run.path)
    except ImportError as error:
        result["notes"].append(f"There is no report.html: the package {error.name!r} is missing.")
        run.finish(result)
    return result
