"""Training the members of a vision run: one model, or both geometries and several seeds."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from leafward.engine import Cluster, RunDirectory, fit, publish, session
from leafward.errors import DataError, UsageError
from leafward.files import finite, replacing
from leafward.recipes import _hcformer_report as report
from leafward.recipes._hcformer_model import Card, build, open_model, size_arguments, starting_point
from leafward.recipes._members import Member, by_geometry, create_run, finish, plan, train_members
from leafward.recipes.hcformer import MAY_CHANGE, Config
from leafward.tasks.images import IMAGENET, Pixels

if TYPE_CHECKING:
    from leafward.tasks.classification import Classification
    from leafward.tasks.detection import Detection
    from leafward.tasks.segmentation import Segmentation

    VisionTask = Classification | Segmentation | Detection

UNITS = "held_out.npy"


def train(config: Config, out: Path, *, resume: bool, overwrite: bool) -> dict[str, Any]:
    """The whole recipe, on every rank. Settings and data are looked at before anything is written or removed."""
    with session(config.loop.device) as cluster:
        task = make_task(config)
        arms = arms_of(config)
        for arm in arms.values():
            started(arm, card_of(arm, task))
        if config.check:
            cluster.on_main(task.check)
        members = plan(config, arms, out)
        run = _create(cluster, out, config, resume=resume, overwrite=overwrite)
        results = train_members(
            members,
            run,
            partial(_create, cluster),
            lambda member, own: _train_member(member, task, cluster, own, out),
        )
        return cluster.on_main(lambda: _conclude(config, run, task, members, results))


def arms_of(config: Config) -> dict[str, Config]:
    """What is trained: `config` and, with `twin`, the other geometry; a Euclidean twin is flat on both levels."""
    arms = by_geometry(config)
    if config.geometry == "lorentz" and config.twin:
        arms["euclidean"] = replace(arms["euclidean"], patch_geometry="euclidean")
    return arms


def started(config: Config, card: Card) -> nn.Module:
    """The model of `card` as its training begins: drawn by the seed, its backbone from `init` where there is one."""
    torch.manual_seed(config.loop.seed)
    model = build(card)
    if config.init is not None:
        load_backbone(model, starting_point(config.init, card, config.loop.seed))
    return model


def make_task(config: Config, pixels: Pixels = IMAGENET) -> VisionTask:
    """The task of `config` on its data, for a backbone that expects `pixels`."""
    source = config.data
    assert source is not None
    batch = config.loop.micro_batch or config.loop.batch_size
    if config.task == "segment":
        from leafward.tasks.segmentation import Segmentation, load_scenes

        scenes = load_scenes(source, config.ignore, config.held_out, config.loop.seed)
        chosen = {"hflip": config.augment.hflip, "sliding": config.sliding, "pixels": pixels}
        return Segmentation(scenes, config.size, config.decoder, **chosen)
    if config.task == "detect":
        from leafward.tasks.detection import Detection, load_objects

        return Detection(load_objects(source, config.held_out, config.loop.seed), hflip=config.augment.hflip)
    from leafward.hierarchy import Taxonomy
    from leafward.tasks.classification import Classification
    from leafward.tasks.images import load_images

    taxonomy = None if config.taxonomy is None else Taxonomy.load(config.taxonomy)
    sets = load_images(source, config.held_out, config.loop.seed)
    return Classification(sets, config.size, config.augment, batch=batch, taxonomy=taxonomy, **pixels._asdict())


def card_of(config: Config, task: VisionTask) -> Card:
    arguments = size_arguments(config.model, config.task, config.size)
    if config.model.startswith("hcformer"):
        arguments = {
            "geometry": config.geometry,
            "patch_geometry": config.patch_geometry,
            "learn_curvature": config.learn_curvature,
        }
    if config.drop_path:
        arguments["drop_path_rate"] = config.drop_path
    return Card(
        task=config.task,
        model=config.model,
        arguments=arguments,
        classes=task.classes,
        size=config.size,
        decoder=task.decoder,
        ignore=config.ignore,
    )


def _create(cluster: Cluster, path: Path, config: Config, *, resume: bool, overwrite: bool) -> RunDirectory:
    settings = {"recipe": "hcformer", "may_change": MAY_CHANGE, "leftovers": (UNITS,)}
    return create_run(RunDirectory, cluster, path, config, resume=resume, overwrite=overwrite, **settings)


def _train_member(
    member: Member[Config], task: VisionTask, cluster: Cluster, run: RunDirectory, out: Path
) -> dict[str, Any]:
    """Train one model, publish it and score it."""
    config = member.config
    card = card_of(config, task)
    model = started(config, card)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    fitted = fit(model, task, config.loop, config.optim, run, cluster)
    publish(model, member.model, card, cluster)

    record = {"geometry": config.geometry, "parameters": parameters, "step": fitted.best_step or fitted.step}
    return cluster.on_main(lambda: scored(member, task, model, run, out, record))


def scored(
    member: Member[Any], task: VisionTask, model: nn.Module, run: RunDirectory, out: Path, record: dict[str, Any]
) -> dict[str, Any]:
    """The result of a trained member: `record`, its scores, and in a file of their own those of each image."""
    model.eval()
    scores, units = task.measure(model)
    if units is not None:
        with replacing(member.path / UNITS) as temporary, open(temporary, "wb") as file:
            np.save(file, units)
    place = str(member.model.relative_to(out))
    result = finite({"name": member.name, "seed": member.config.loop.seed, **record, "model": place, "scores": scores})
    if not member.alone:
        run.finish(result)
    return result


def load_backbone(model: nn.Module, source: Path) -> None:
    """Fill the backbone inside `model` from that of a published model or run; the heads stay as they are."""
    # timm's pyramids call layers_0 what the whole model calls layers.0.
    given = {_flat(name): value for name, value in backbone_of(open_model(source)[0]).state_dict().items()}
    target = backbone_of(model)
    own = target.state_dict()
    fitting = {
        name: given[_flat(name)]
        for name, value in own.items()
        if _flat(name) in given and given[_flat(name)].shape == value.shape
    }
    missing = [name for name in own if name not in fitting and not name.startswith(("head.", "norm.", "fc."))]
    if missing:
        raise UsageError(f"init {source} has another backbone: it does not fit {missing[0]}")
    target.load_state_dict(fitting, strict=False)


def _flat(name: str) -> str:
    return name.replace(".", "_")


def backbone_of(model: nn.Module) -> nn.Module:
    """The timm model inside a task's model."""
    inner: Any = getattr(model, "backbone", model)
    inner = getattr(inner, "body", inner)  # torchvision's detectors wrap it once more
    if getattr(inner, "whole", None) is not None:  # a model of segmentation_models_pytorch
        inner = inner.whole.encoder.model
    return getattr(inner, "model", inner)  # as does timm's feature pyramid


def _conclude(
    config: Config, run: RunDirectory, task: VisionTask, members: list[Member[Config]], results: list[dict[str, Any]]
) -> dict[str, Any]:
    """Put the members together, write result.json and report.html."""
    units = [read_units(member.path) for member in members]
    curves = {member.name: RunDirectory.open(member.path).metrics() for member in members}
    result = finite(report.result(config.geometry, task.monitor, results, units))
    result["data"] = {"classes": task.classes}
    return finish(run, result, lambda: report.write(config, task.monitor, result, curves, run.path))


def read_units(path: Path) -> np.ndarray | None:
    if not (path / UNITS).is_file():
        return None
    try:
        return np.load(path / UNITS, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read the scores {path / UNITS}: {error}") from error
