"""Mapped models on disk: what a run publishes, how it begins, and how a command opens it."""

from __future__ import annotations

import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leafward.data.images import IMAGENET, Pixels
from leafward.engine import load_published
from leafward.engine.run import MODEL
from leafward.errors import DataError, LeafwardError, UsageError, require
from leafward.files import read_record
from leafward.systems.himapper import HierarchyLosses, HiMapper
from leafward.systems.vision import build as vision
from leafward.systems.vision.build import Card

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

    from leafward.systems.himapper.config import Config


class LearningMapper(HiMapper):
    """Keeps the losses of the last training pass, so that any head around it can be trained with them."""

    losses: HierarchyLosses | None = None

    def forward(self, x: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not self.training:
            return super().forward(x)
        out, self.losses = super().forward(x, losses=True)
        return out


@dataclass(frozen=True)
class MappedCard:
    """What must be known to build a published model again: that of the model around it, and the hierarchy's settings
    (None: there is none)."""

    vision: Card
    hierarchy: dict[str, Any] | None


def card_of(config: Config, model: str, arguments: dict[str, Any], classes: list[str], head: str = "") -> MappedCard:
    """The card of a model on the timm backbone `model` with the task's `head`."""
    card = Card(config.data.task, model, arguments, classes, config.data.size, head, *expected_pixels(config))
    hierarchy = {
        "leaves": config.leaves,
        "levels": config.levels,
        "dim": config.dim,
        "geometry": config.geometry,
        "mixture": config.mixture,
        "probabilistic": not config.deterministic,
        "temperature": config.temperature,
        "sibling_weight": config.sibling_weight,
        "freeze_backbone": config.freeze_backbone,
    }
    return MappedCard(card, None if config.plain else hierarchy)


def build(card: MappedCard, source: dict[str, Any] | None = None) -> nn.Module:
    """The model of a card. `source` holds timm's arguments that fill the backbone; without it nothing is loaded."""
    base = replace(card.vision, arguments=card.vision.arguments | (source or {}))
    if source and base.decoder.startswith("smp:"):
        raise UsageError(f"the decoder {base.decoder} makes its own backbone, without weights: add --no-pretrained")
    try:
        model = vision.build(base)
    except LeafwardError:
        raise
    except Exception as error:  # timm, the hub and the network each have their own
        given = (source or {}).get("pretrained_cfg_overlay")
        reason = " ".join(str(error).split("\n\t")[:2])  # of a list of all weights that do not fit, the first
        if given:
            raise DataError(f"the backbone {base.model} does not take these weights: {reason}") from error
        raise LeafwardError(
            f"the backbone {base.model} could not be made: {reason}; --weights FILE takes local weights, "
            "--no-pretrained none"
        ) from error
    if card.hierarchy is None:
        return model
    if card.vision.task == "classify":
        return LearningMapper(model, **card.hierarchy)
    _put_on_pyramid(model, card.hierarchy)
    return model


def mapper_of(model: nn.Module) -> LearningMapper | None:
    """The mapper inside a task's model, if there is one."""
    return next((module for module in model.modules() if isinstance(module, LearningMapper)), None)


def _put_on_pyramid(model: nn.Module, hierarchy: dict[str, Any]) -> None:
    """Wrap the feature pyramid of timm inside a dense model, under every name that it has there."""
    pyramid = _pyramid(model)
    places = [
        (parent, name)
        for parent in list(model.modules())
        for name, child in parent._modules.items()
        if child is pyramid
    ]
    mapper = LearningMapper(pyramid, **hierarchy)
    for parent, name in places:
        setattr(parent, name, mapper)


def _pyramid(model: nn.Module) -> nn.Module:
    """The feature pyramid of timm inside a dense model, without a neck that makes its strides."""
    from leafward.systems.vision.pyramids import Neck

    for module in model.modules():
        if (
            module is not model
            and not isinstance(module, Neck)
            and callable(getattr(getattr(module, "feature_info", None), "channels", None))
        ):
            return module
    raise UsageError(f"{type(model).__name__} has no feature pyramid of timm to put a hierarchy on")


def freeze_plain(model: nn.Module, task: str) -> nn.Module:
    """Freeze the backbone of a model without a hierarchy, as `HiMapper` does with one; -> what must not be trained."""
    backbone = (model if task == "classify" else _pyramid(model)).requires_grad_(False)
    if task == "classify":
        model.get_classifier().requires_grad_(True)  # pyright: ignore[reportCallIssue]
    return backbone


def open_model(target: str | Path) -> tuple[nn.Module, MappedCard]:
    """The model of a run directory or of a published model's folder, with its weights, and its card."""
    folder = _published(target)
    config, state = load_published(folder)
    card = _card_from_json(config, folder)
    model = build(card)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise DataError(f"{folder} does not fit the model that it names: {reason}") from None
    return model.eval(), card


def read_card(target: str | Path) -> MappedCard:
    """The card of a run directory or of a published model's folder; the weights are not read."""
    folder = _published(target)
    return _card_from_json(read_record(folder / "config.json"), folder)


def _card_from_json(record: dict[str, Any], source: Path) -> MappedCard:
    if set(record) != {"vision", "hierarchy"}:
        raise DataError(f"{source} does not hold a model of Hi-Mapper")
    return MappedCard(Card.from_json(record["vision"], source), record["hierarchy"])


def _published(target: str | Path) -> Path:
    folder = Path(target)
    return folder / MODEL if (folder / MODEL / "config.json").is_file() else folder


@contextmanager
def backbone_source(config: Config) -> Iterator[tuple[str, dict[str, Any], dict[str, Any] | None]]:
    """Name and arguments of the timm model that is the backbone, and the further arguments that fill it."""
    given = str(config.backbone)
    if given.startswith("timm:"):
        name = given.removeprefix("timm:")
        arguments = vision.size_arguments(name, config.data.task, config.data.size)
        if config.weights is not None:
            _check_weights(config.weights, name)
            yield name, arguments, _loading({"file": str(config.weights)})
        else:
            yield name, arguments, _loading() if config.pretrained else None
        return
    if config.weights is not None:
        raise UsageError(f"weights go with timm:NAME; {given} has its own")
    from safetensors.torch import save_file

    _check_folder(given)
    record, state = load_published(_published(given))
    card = Card.from_json(record.get("vision", record), Path(given))
    if card.task != "classify":
        raise UsageError(f"backbone {given} must be a run of classification, not one that can {card.task}")
    if record.get("hierarchy") is not None:
        inside = "backbone."
        state = {name.removeprefix(inside): value for name, value in state.items() if name.startswith(inside)}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "backbone.safetensors"
        save_file({name: value.contiguous() for name, value in state.items()}, file)
        # It may have had images of another size: timm then fits the embeddings of the places.
        arguments = card.arguments | vision.size_arguments(card.model, config.data.task, config.data.size)
        yield card.model, arguments, _loading({"file": str(file), "num_classes": len(card.classes)})


def expected_pixels(config: Config) -> Pixels:
    """What the weights of the backbone were trained with; ImageNet's for a backbone without any."""
    given = str(config.backbone)
    if not given.startswith("timm:"):
        _check_folder(given)
        return pixels_of(given)
    known = require("timm", "vision").get_pretrained_cfg(given.removeprefix("timm:"))
    if known is None or not (config.pretrained or config.weights is not None):
        return IMAGENET
    return Pixels(tuple(known.mean), tuple(known.std))


def pixels_of(target: str | Path) -> Pixels:
    """What the model expects that a run has published; its weights are not read."""
    record = read_record(_published(target) / "config.json")
    return Card.from_json(record.get("vision", record), Path(target)).pixels


def _check_folder(given: str) -> None:
    if not Path(given).is_dir():
        raise UsageError(f"backbone must be timm:NAME or the folder of a run; there is no folder {given}")


def _loading(overlay: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"pretrained": True} | ({"pretrained_cfg_overlay": overlay} if overlay else {})


def _check_weights(path: Path, name: str) -> None:
    """Refuse a file that lacks a weight of the timm model: timm itself passes over what does not fit."""
    import torch

    from leafward.data.arrays import array_names

    timm = require("timm", "vision")
    try:
        held = set(array_names(path))
    except DataError as error:
        raise DataError(f"weights: {error}") from error
    with torch.device("meta"):
        model = timm.create_model(name)
    classifier = f"{model.pretrained_cfg['classifier']}."
    missing = [key for key in model.state_dict() if key not in held and not key.startswith(classifier)]
    if missing:
        raise DataError(f"weights: {path} is not of {name}: it has no {missing[0]}")
