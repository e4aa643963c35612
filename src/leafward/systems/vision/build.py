"""Vision models on disk: what a run publishes, and how a command opens it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leafward import register
from leafward.data.images import IMAGENET, Pixels
from leafward.engine.run import CHECKPOINTS, CONFIG, MODEL, RESULT, RunDirectory
from leafward.errors import DataError, UsageError, nearest, require

if TYPE_CHECKING:
    from torch import Tensor, nn

TASKS = ("classify", "segment", "detect")


@dataclass(frozen=True)
class Card:
    """What must be known to build a published model again: config.json beside its weights."""

    task: str
    """classify, segment or detect."""
    model: str
    """Name of the timm model that is the backbone."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Arguments of the backbone, such as its geometry."""
    classes: list[str] = field(default_factory=list)
    """Names of the classes, in the order of the scores."""
    size: int = 224
    """Pixels of the side that the images were trained at."""
    decoder: str = ""
    """Head of a segmentation model (semantic-fpn or smp:NAME) or kind of detector (mask-rcnn or faster-rcnn)."""
    mean: tuple[float, ...] = IMAGENET.mean
    std: tuple[float, ...] = IMAGENET.std
    ignore: int | None = 255
    """Mask value of pixels that do not count, for a segmentation model."""

    @property
    def pixels(self) -> Pixels:
        return Pixels(self.mean, self.std)

    @classmethod
    def from_json(cls, record: dict[str, Any], source: Path) -> Card:
        unknown = set(record) - {field.name for field in dataclasses.fields(cls)}
        if unknown or record.get("task") not in TASKS or "model" not in record:
            raise DataError(f"{source} does not hold a vision model of this package")
        triples: dict[str, Any] = {key: tuple(record[key]) for key in ("mean", "std") if key in record}
        return cls(**record | triples)


def size_arguments(model: str, task: str, size: int) -> dict[str, Any]:
    """What a timm model must be told: one that classifies images of a fixed size learns which."""
    known = _timm(model).get_pretrained_cfg(model)
    return {"img_size": size} if task == "classify" and known and known.fixed_input_size else {}


def _timm(model: str) -> Any:
    """The package timm, if it has `model`."""
    timm = require("timm", "vision")
    register("timm")
    if not timm.is_model(model):
        raise UsageError(f"timm has no model {model!r}; {nearest(model, timm.list_models())}")
    return timm


def build(card: Card) -> nn.Module:
    """The model of a card, untrained: logits for classification, else what its task's module says."""
    timm = _timm(card.model)
    if card.task == "segment":
        from leafward.systems.vision.segmentation import SegmentationModel

        return SegmentationModel(card.model, len(card.classes), card.decoder, card.arguments)
    if card.task == "detect":
        from leafward.systems.vision.detection import detector

        return detector(card.model, len(card.classes), card.size, card.arguments, card.decoder, card.pixels)
    return timm.create_model(card.model, num_classes=len(card.classes), **card.arguments)


def open_card(target: str | Path) -> tuple[Card, dict[str, Tensor]]:
    """The card and the weights of a run directory or of a published model's folder."""
    from leafward.engine import load_published

    folder = Path(target)
    if (folder / MODEL / "config.json").is_file():
        folder = folder / MODEL
    config, state = load_published(folder)
    return Card.from_json(config, folder), state


def open_model(target: str | Path) -> tuple[nn.Module, Card]:
    """The model of a run directory or of a published model's folder, with its weights, and its card."""
    card, state = open_card(target)
    model = build(card)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise DataError(
            f"{target} does not fit the model that it names: {str(error).splitlines()[-1].strip()}"
        ) from None
    return model.eval(), card


def starting_point(init: Path, card: Card, seed: int) -> Path:
    """The folder of the model that one of `card` starts from: in a run of several models that of its geometry and, if
    there is one, of its seed. Another geometry is refused: its weights mean something else."""
    folder = init
    if (init / RESULT).is_file():
        members = RunDirectory.open(init).result().get("members", [])
        alike = [each for each in members if each.get("geometry") == card.arguments.get("geometry")] or members[:1]
        alike = [each for each in alike if each.get("seed") == seed] or alike
        folder = init / alike[0]["model"] if alike else init
    given = open_card(folder)[0].arguments
    for name in ("geometry", "patch_geometry"):
        if name in given and name in card.arguments and given[name] != card.arguments[name]:
            raise UsageError(
                f"init {folder} has the {name} {given[name]}, the model {card.arguments[name]}; give a run of that, or "
                "one with --twin, which has both"
            )
    return folder


def open_trained(folder: Path) -> tuple[nn.Module, Card]:
    """The model of a run, of a published model's folder, or of a checkpoint of a training, and its card."""
    checkpoint = _checkpoint(folder)
    return open_model(folder) if checkpoint is None else _open_checkpoint(checkpoint)


def _checkpoint(folder: Path) -> Path | None:
    """`folder` if it is a training's checkpoint, the newest one if it is a run that has published nothing yet."""
    from leafward.engine.checkpoint import MANIFEST

    if (folder / MANIFEST).is_file():
        return folder
    if (folder / MODEL).is_dir():
        return None
    manifests = sorted(folder.glob(f"{CHECKPOINTS}/step-*/{MANIFEST}"))
    return manifests[-1].parent if manifests else None


def _open_checkpoint(folder: Path) -> tuple[nn.Module, Card]:
    """The model of a checkpoint, built by the configuration of the run that it lies in; its data name the classes."""
    from leafward.config import load_yaml
    from leafward.engine import load_weights
    from leafward.systems.vision.config import Config
    from leafward.systems.vision.train import card_of, make_task

    config = load_yaml(Config, folder.parent.parent / CONFIG)
    card = card_of(config, make_task(config))
    model = build(card)
    load_weights(folder, model)
    return model.eval(), card
