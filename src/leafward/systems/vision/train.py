"""Training the members of a vision run: one model, or both geometries and several seeds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from leafward.config import replace
from leafward.data.images import IMAGENET, Pixels
from leafward.engine import Cluster, Experiment, Member, RunDirectory, publish, train_loop
from leafward.engine.experiment import by_geometry, curves
from leafward.errors import DataError, UsageError
from leafward.files import finite, replacing
from leafward.report import Result
from leafward.systems.vision import config as settings
from leafward.systems.vision import report
from leafward.systems.vision.build import Card, build, open_model, size_arguments, starting_point
from leafward.systems.vision.config import Config

if TYPE_CHECKING:
    from leafward.systems.vision.classification import Classification
    from leafward.systems.vision.detection import Detection
    from leafward.systems.vision.segmentation import Segmentation

    VisionTask = Classification | Segmentation | Detection

UNITS = "held_out.npy"


class Training(Experiment[Config]):
    """Both geometries and several seeds on the same data."""

    recipe, settings, leftovers = "vision", settings, (UNITS,)

    def __init__(self, config: Config, cluster: Cluster) -> None:
        super().__init__(config, cluster)
        self.task = make_task(config)
        for arm in self.arms().values():
            started(arm, card_of(arm, self.task))
        if config.data.check:
            cluster.on_main(self.task.check)

    def arms(self) -> dict[str, Config]:
        return arms_of(self.config)

    def train(self, member: Member[Config], run: RunDirectory, cluster: Cluster) -> dict[str, Any]:
        """Train one model, publish it and score it."""
        config = member.config
        card = card_of(config, self.task)
        model = started(config, card)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        fitted = train_loop(model, self.task, config.loop, config.optim, run, cluster)
        publish(model, member.model, card, cluster)

        record = {"geometry": config.geometry, "parameters": parameters, "step": fitted.best_step or fitted.step}
        return scored(member, self.task, model, cluster, self.out, record)

    def conclude(self, run: RunDirectory, members: list[Member[Config]], results: list[dict[str, Any]]) -> Result:
        config, monitor = self.config, self.task.monitor
        title, units = f"{config.model}: {config.data.task}", [read_units(member.path) for member in members]
        made = report.result(title, str(config.data.source), config.geometry, monitor, results, units)
        made.values["data"] = {"classes": self.task.classes}
        report.show_models(made, results, "parameters", "step")
        report.show_training(made, monitor, curves(members))
        return made


run = Training.launch


def arms_of(config: Config) -> dict[str, Config]:
    """What is trained: `config` and, with `twin`, the other geometry; a Euclidean twin is flat on both levels."""
    arms = by_geometry(config)
    if config.geometry == "lorentz" and config.arms.twin:
        arms["euclidean"] = replace(arms["euclidean"], patch_geometry="euclidean")
    return arms


def started(config: Config, card: Card) -> nn.Module:
    """The model of `card` as its training begins: drawn by the seed, its backbone from `init` where there is one."""
    torch.manual_seed(config.loop.seed)
    model = build(card)
    if config.init is not None:
        load_backbone(model, starting_point(config.init, card, config.loop.seed))
    return model


def make_task(config: Any, pixels: Pixels = IMAGENET) -> VisionTask:
    """The task of `config`, settings with `data`, `augment` and `loop`, for a backbone that expects `pixels`."""
    data, augment, seed = config.data, config.augment, config.loop.seed
    batch = config.loop.micro_batch or config.loop.batch_size
    if data.task == "segment":
        from leafward.data.scenes import load_scenes
        from leafward.systems.vision.segmentation import Segmentation

        scenes = load_scenes(data.source, data.ignore, data.held_out, seed)
        chosen = {"hflip": augment.hflip, "sliding": data.sliding, "pixels": pixels}
        chosen |= {"photometric": augment.photometric, "cat_max_ratio": data.cat_max_ratio}
        return Segmentation(scenes, data.size, data.decoder, **chosen)
    if data.task == "detect":
        from leafward.data.boxes import load_objects
        from leafward.systems.vision.detection import Detection

        return Detection(load_objects(data.source, data.held_out, seed), hflip=augment.hflip)
    from leafward.data.images import load_images
    from leafward.hierarchy import Taxonomy
    from leafward.systems.vision.classification import Classification

    taxonomy = None if data.taxonomy is None else Taxonomy.load(data.taxonomy)
    sets = load_images(data.source, data.held_out, seed)
    return Classification(sets, data.size, augment, batch=batch, taxonomy=taxonomy, **pixels._asdict())


def card_of(config: Config, task: VisionTask) -> Card:
    arguments = size_arguments(config.model, config.data.task, config.data.size)
    if config.model.startswith("hcformer"):
        arguments = {
            "geometry": config.geometry,
            "patch_geometry": config.patch_geometry,
            "learn_curvature": config.learn_curvature,
            **config.clusters.chosen(),
        }
    if config.drop_path:
        arguments["drop_path_rate"] = config.drop_path
    return Card(
        task=config.data.task,
        model=config.model,
        arguments=arguments,
        classes=task.classes,
        size=config.data.size,
        decoder=task.decoder,
        ignore=config.data.ignore,
    )


def scored(
    member: Member[Any], task: VisionTask, model: nn.Module, cluster: Cluster, out: Path, record: dict[str, Any]
) -> dict[str, Any]:
    """The result of a trained member: `record`, its scores, and in a file of their own those of each image.

    Every rank measures, because a sharded model answers on all of them together; the first writes.
    """
    model.eval()
    scores, units = task.measure(model)

    def write() -> None:
        if units is not None:
            with replacing(member.path / UNITS) as temporary, open(temporary, "wb") as file:
                np.save(file, units)

    cluster.on_main(write)
    place = str(member.model.relative_to(out))
    return finite({"name": member.name, "seed": member.seed, **record, "model": place, "scores": scores})


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
    from leafward.systems.vision.pyramids import Neck

    inner: Any = getattr(model, "backbone", model)
    inner = getattr(inner, "body", inner)  # torchvision's detectors wrap it once more
    if isinstance(inner, Neck):
        inner = inner.body
    if getattr(inner, "whole", None) is not None:  # a model of segmentation_models_pytorch
        inner = inner.whole.encoder.model
    return getattr(inner, "model", inner)  # as does timm's feature pyramid


def read_units(path: Path) -> np.ndarray | None:
    if not (path / UNITS).is_file():
        return None
    try:
        return np.load(path / UNITS, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read the scores {path / UNITS}: {error}") from error
