"""Training of one model for the evidence on vision: classification, segmentation, detection, Hi-Mapper.

All images lie on the device, and views of them (crops, scales, mirror images) are made there, so that a small model is
never waiting for its data. Order and views depend on the seed alone: they are the same for all models of a seed.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from _steps import Steps
from _vision_data import CELLS, VOID, Data
from leafward.data.boxes import ObjectSets, Photo, Thing
from leafward.data.images import IMAGENET
from leafward.data.scenes import IGNORED, confusion, score
from leafward.engine import OptimConfig, parameter_groups, publish, schedule
from leafward.hierarchy import Taxonomy
from leafward.systems.himapper import HiMapper
from leafward.systems.vision import classification, segmentation
from leafward.systems.vision.build import Card, build, open_model
from leafward.systems.vision.detection import Detection, Examples
from leafward.systems.vision.train import load_backbone

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "hcformer": ("hcformer_nano", {"geometry": "lorentz"}),
    "hcformer-flat": ("hcformer_nano", {"geometry": "euclidean"}),
    "convnext": ("convnext_femto", {}),
}
"""Name in timm and arguments. ConvNeXt-Femto has four stages and about as many weights as HCFormer-Nano."""
BASE = "convnext"
"""The backbone that Hi-Mapper is put on."""
ARMS: dict[str, dict[str, Any] | None] = {
    "mapped": {},
    "mapped-flat": {"geometry": "euclidean"},
    "mapped-points": {"probabilistic": False},
    "plain": None,
}
"""Arguments of Hi-Mapper; None: the backbone alone."""
TUNING_PART = 10
"""Every so many training images one is held out of the runs that try learning rates."""
CELL_SIDE = 240
SCENE_CLASSES = VOID


@dataclass(frozen=True)
class Settings:
    """What all members share."""

    device: str
    size: int = 128
    batch: int = 256
    mapped_size: int = 192
    scene_size: int = 192
    """Height of the crops of scenes; they are a third wider, as the scenes are."""
    scene_batch: int = 16
    cell_batch: int = 8
    record: bool = False
    """On a GPU: record the steps as CUDA graphs."""

    @property
    def half(self) -> bool:
        return self.device == "cuda"


@dataclass(frozen=True)
class Member:
    """One model to train: `part` is tune, classify, segment, detect or map; `name` one of MODELS, or of ARMS."""

    part: str
    name: str
    seed: int
    steps: int
    rate: float
    folder: Path
    """Where results go, and models of the classification by name and seed."""

    @property
    def backbone(self) -> Path:
        """Where the classifier lies that this member trains or begins from."""
        return self.folder / f"{BASE if self.part == 'map' else self.name}-{self.seed}"

    @property
    def result(self) -> Path:
        return self.folder / "results" / f"{self.part}-{self.name}-{self.seed}-{self.rate:g}.json"

    @property
    def failure(self) -> Path:
        return self.result.with_suffix(".error")


def run(member: Member, data: Data, settings: Settings) -> dict[str, Any]:
    """Train and score."""
    began = time.perf_counter()
    if settings.device == "cuda":
        torch.backends.cudnn.benchmark = member.part != "detect"  # whose images and numbers of boxes vary
        torch.set_float32_matmul_precision("high")
    torch.manual_seed(member.seed)
    scores, step = PARTS[member.part](member, data, settings)
    if settings.device == "cuda":
        torch.cuda.empty_cache()  # others share the device
    kept = {key: value for key, value in dataclasses.asdict(member).items() if key != "folder"}
    return kept | scores | {"step_ms": 1e3 * step, "seconds": time.perf_counter() - began}


def classify(member: Member, data: Data, settings: Settings) -> tuple[dict[str, Any], float]:
    name, arguments = MODELS[member.name]
    card = Card("classify", name, arguments, data.classes.tolist(), settings.size)
    model = _on(build(card), settings)
    step = _learn_classes(model, member, data, settings, settings.size, weight_decay=0.05, mixup=0.2)
    scores = _named(model, data.objects_test, data.labels_test, data, settings, settings.size)
    publish(model, member.backbone, card)
    return {"parameters": _count(model), **scores}, step


def tune(member: Member, data: Data, settings: Settings) -> tuple[dict[str, Any], float]:
    """A short run on nine tenths of the training images, scored on the rest of them."""
    held_out = np.arange(len(data.labels_train)) % TUNING_PART == 0
    part = dataclasses.replace(
        data, objects_train=data.objects_train[~held_out], labels_train=data.labels_train[~held_out]
    )
    name, arguments = MODELS[member.name]
    card = Card("classify", name, arguments, data.classes.tolist(), settings.size)
    model = _on(build(card), settings)
    step = _learn_classes(model, member, part, settings, settings.size, weight_decay=0.05, mixup=0.2)
    scores = _named(model, data.objects_train[held_out], data.labels_train[held_out], data, settings, settings.size)
    return {"loss": scores["loss"], "top1": scores["top1"]}, step


def map_(member: Member, data: Data, settings: Settings) -> tuple[dict[str, Any], float]:
    """Fine-tune the classifier of the same seed, with or without a hierarchy."""
    model, _ = open_model(member.backbone)
    arguments = ARMS[member.name]
    if arguments is not None:
        model = HiMapper(model, **arguments)
    model = _on(model, settings)
    before = _named(model, data.objects_test, data.labels_test, data, settings, settings.mapped_size)
    torch.manual_seed(member.seed)  # the arms have drawn different numbers of weights
    step = _learn_classes(model, member, data, settings, settings.mapped_size, weight_decay=1e-4, mixup=0.0)
    scores = _named(model, data.objects_test, data.labels_test, data, settings, settings.mapped_size)
    return {"parameters": _count(model), "top1_before": before["top1"], **scores}, step


def _learn_classes(
    model: nn.Module, member: Member, data: Data, settings: Settings, size: int, weight_decay: float, mixup: float
) -> float:
    images = torch.from_numpy(data.objects_train).to(settings.device)
    labels = torch.from_numpy(data.labels_train).to(settings.device)
    places = _order(member, len(labels), settings.batch).to(settings.device)
    generator = torch.Generator(settings.device).manual_seed(member.seed)
    drawn = np.random.default_rng(member.seed).beta(mixup, mixup, member.steps) if mixup else np.ones(member.steps)
    shares = torch.from_numpy(drawn).float().to(settings.device)

    def batch(step: int) -> tuple[Tensor, ...]:
        chosen = places[step]
        x = views(images[chosen], (size, size), (0.35, 1.0), generator)[0]
        # The second image of each pair is its mirror place in the batch.
        return torch.lerp(x.flip(0), x, shares[step]), labels[chosen], shares[step]

    def loss(x: Tensor, y: Tensor, share: Tensor) -> Tensor:
        with _precision(settings):
            logits, further = model(x, losses=True) if isinstance(model, HiMapper) else (model(x), None)
        first, second = (F.cross_entropy(logits.float(), each, label_smoothing=0.1) for each in (y, y.flip(0)))
        total = share * first + (1.0 - share) * second
        return total if further is None else total + further.total()

    return _fit(model, batch, loss, member, weight_decay, settings.record)


@torch.no_grad()
def _named(
    model: nn.Module, images: np.ndarray, labels: np.ndarray, data: Data, settings: Settings, size: int
) -> dict[str, float]:
    """Scores of the task of classification, with WordNet's hierarchy."""
    model.eval()
    found = []
    for part in torch.from_numpy(images).split(settings.batch):
        x = _whole(part.to(settings.device), (size, size))
        with _precision(settings):
            found.append(model(x).float().cpu())
    taxonomy = Taxonomy.from_edges([(child, parent) for child, parent in data.edges.tolist()])
    predictions = classification.Predictions(torch.cat(found), torch.from_numpy(labels))
    scores = classification.score(predictions, data.classes.tolist(), taxonomy)
    return {name: value for name, value in scores.items() if not name.startswith("level_")}


def segment(member: Member, data: Data, settings: Settings) -> tuple[dict[str, Any], float]:
    """The Semantic FPN head on the backbone of the same seed."""
    name, arguments = MODELS[member.name]
    model = segmentation.SegmentationModel(name, SCENE_CLASSES, arguments=arguments)
    load_backbone(model, member.backbone)
    model = _on(model, settings)
    images = torch.from_numpy(data.scenes_train).to(settings.device)
    masks = torch.from_numpy(data.masks_train).to(settings.device)
    places = _order(member, len(images), settings.scene_batch).to(settings.device)
    generator = torch.Generator(settings.device).manual_seed(member.seed)
    shape = (settings.scene_size, settings.scene_size * 4 // 3)

    def batch(step: int) -> tuple[Tensor, ...]:
        x, grid = views(images[places[step]], shape, (0.25, 1.5), generator, distort=False)
        return x, _seen_through(masks[places[step]], grid)

    def loss(x: Tensor, truth: Tensor) -> Tensor:
        with _precision(settings):
            scores = model(x)
        return F.cross_entropy(scores.float(), truth, ignore_index=IGNORED)

    torch.manual_seed(member.seed)
    step = _fit(model, batch, loss, member, 1e-4, settings.record)
    return {"parameters": _count(model), **_labelled(model, data, settings, shape)}, step


@torch.no_grad()
def _labelled(model: nn.Module, data: Data, settings: Settings, shape: tuple[int, int]) -> dict[str, float]:
    model.eval()
    table = torch.zeros(SCENE_CLASSES, SCENE_CLASSES, dtype=torch.int64)
    for start in range(0, len(data.scenes_test), settings.scene_batch):
        part = slice(start, start + settings.scene_batch)
        truth = torch.from_numpy(data.masks_test[part]).long()
        with _precision(settings):
            scores = model(_whole(torch.from_numpy(data.scenes_test[part]).to(settings.device), shape))
        scores = F.interpolate(scores.float(), size=truth.shape[1:], mode="bilinear", align_corners=False)
        truth[truth == VOID] = IGNORED
        table += confusion(scores.argmax(dim=1).cpu(), truth, SCENE_CLASSES)
    return score(table)


def detect(member: Member, data: Data, settings: Settings) -> tuple[dict[str, Any], float]:
    """Faster R-CNN on the backbone of the same seed, in float32: torchvision decodes boxes in the type of the maps."""
    name, arguments = MODELS[member.name]
    task = Detection(_photos(data, member.folder))
    model = build(Card("detect", name, arguments, list(CELLS), CELL_SIDE, task.decoder))
    load_backbone(model, member.backbone)
    model = model.to(settings.device).train()
    photos = [(x.to(settings.device), _moved(target, settings)) for x, target in _unmirrored(task.objects.train)]
    places = _order(member, len(photos), settings.cell_batch)
    mirror = torch.rand(places.shape, generator=torch.Generator().manual_seed(member.seed)) < 0.5

    def batch(step: int) -> list[tuple[Tensor, dict[str, Tensor]]]:
        chosen = zip(places[step].tolist(), mirror[step].tolist(), strict=True)
        return [_mirrored(*photos[i]) if flip else photos[i] for i, flip in chosen]

    def loss(*examples: tuple[Tensor, dict[str, Tensor]]) -> Tensor:
        images, targets = (list(each) for each in zip(*examples, strict=True))
        return torch.stack(list(model(images, targets).values())).sum()

    if settings.record:  # the backbone alone: boxes come in any number
        inner: Any = model
        first = inner.transform([image for image, _ in batch(0)])[0].tensors
        inner.backbone = torch.cuda.make_graphed_callables(inner.backbone, (first,), allow_unused_input=True)
    torch.manual_seed(member.seed)
    step = _fit(model, batch, loss, member, weight_decay=1e-4, record=False)
    return {"parameters": _count(model), **task.evaluate(model.eval())}, step


def _unmirrored(photos: list[Photo]) -> list[tuple[Tensor, dict[str, Tensor]]]:
    examples = Examples(photos, masks=False, hflip=0.0)
    return [examples[index] for index in range(len(examples))]


def _moved(target: dict[str, Tensor], settings: Settings) -> dict[str, Tensor]:
    return {key: value.to(settings.device) for key, value in target.items()}


def _mirrored(image: Tensor, target: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Left for right: (3, H, W), boxes (n, 4)."""
    left, top, right, bottom = target["boxes"].unbind(dim=1)
    boxes = torch.stack([image.shape[-1] - right, top, image.shape[-1] - left, bottom], dim=1)
    return image.flip(-1), target | {"boxes": boxes}


def _photos(data: Data, folder: Path) -> ObjectSets:
    """The photos of cells as files with their boxes."""
    width, height = data.cells.shape[2], data.cells.shape[1]
    things: list[list[Thing]] = [[] for _ in data.cells]
    for index, label, *corners in data.boxes.tolist():
        things[int(index)].append(Thing(tuple(corners), int(label)))  # pyright: ignore[reportArgumentType]
    photos = [Photo(folder / "cells" / f"{i}.png", own, (width, height)) for i, own in enumerate(things)]
    train, test = (
        [photo for photo, out in zip(photos, data.cells_test, strict=True) if out == side] for side in (0, 1)
    )
    return ObjectSets(train, test, list(CELLS))


def write_cells(data: Data, folder: Path) -> None:
    """The files that the detectors read."""
    from PIL import Image

    (folder / "cells").mkdir(parents=True, exist_ok=True)
    for index, image in enumerate(data.cells):
        Image.fromarray(image).save(folder / "cells" / f"{index}.png", compress_level=1)


PARTS: dict[str, Callable[[Member, Data, Settings], tuple[dict[str, Any], float]]] = {
    "tune": tune,
    "classify": classify,
    "map": map_,
    "segment": segment,
    "detect": detect,
}


def views(
    images: Tensor,
    shape: tuple[int, int],
    area: tuple[float, float],
    generator: torch.Generator,
    distort: bool = True,
) -> tuple[Tensor, Tensor]:
    """Random parts of images (B, H, W, 3), mirrored or not, as normalised (B, 3, *shape), and the grid they lie on.

    A view covers a part of the image in `area`; above 1 it reaches over the border. `distort` stretches by up to 4/3.
    """
    count, device = len(images), images.device

    def uniform(low: float, high: float) -> Tensor:
        return torch.empty(count, device=device).uniform_(low, high, generator=generator)

    side = uniform(*area).sqrt()
    stretch = (uniform(-1.0, 1.0) * (0.5 * np.log(4 / 3))).exp() if distort else torch.ones_like(side)
    most = max(1.0, area[1]) ** 0.5
    width, height = (side * stretch).clamp(max=most), (side / stretch).clamp(max=most)
    x, y = (1.0 - width).abs() * uniform(-1.0, 1.0), (1.0 - height).abs() * uniform(-1.0, 1.0)
    mirror = torch.where(uniform(0.0, 1.0) < 0.5, -1.0, 1.0)
    zero = torch.zeros_like(x)
    rows = torch.stack([width * mirror, zero, x]), torch.stack([zero, height, y])
    theta = torch.stack(rows).permute(2, 0, 1)
    grid = F.affine_grid(theta, [count, 3, *shape], align_corners=False)
    pixels = normalised(images)
    return F.grid_sample(pixels, grid, mode="bilinear", padding_mode="zeros", align_corners=False), grid


def _seen_through(masks: Tensor, grid: Tensor) -> Tensor:
    """Labels (B, H, W) uint8 at the places of a grid; `IGNORED` outside and where pixels do not count."""
    shifted = torch.where(masks == VOID, 0, masks + 1).unsqueeze(1).float()
    return F.grid_sample(shifted, grid, mode="nearest", padding_mode="zeros", align_corners=False)[:, 0].long() - 1


def normalised(images: Tensor) -> Tensor:
    """(B, H, W, 3) uint8 -> (B, 3, H, W) float, channels last in memory."""
    mean, std = _moments(images.device)
    return ((images - mean) / std).permute(0, 3, 1, 2)


@functools.cache  # to bring them to a GPU at every step would wait for it
def _moments(device: torch.device) -> tuple[Tensor, ...]:
    return tuple(torch.tensor(values, device=device) * 255 for values in IMAGENET)


def _whole(images: Tensor, shape: tuple[int, int]) -> Tensor:
    return F.interpolate(normalised(images), size=shape, mode="bilinear", align_corners=False)


def _order(member: Member, count: int, batch: int) -> Tensor:
    """Places of the images of every step, epoch after epoch in an order of its own: (steps, batch)."""
    generator = torch.Generator().manual_seed(member.seed)
    batch = min(batch, count)
    epochs = -(-member.steps // (count // batch))
    places = [torch.randperm(count, generator=generator)[: count // batch * batch] for _ in range(epochs)]
    return torch.cat(places).unflatten(0, (-1, batch))[: member.steps]


def _fit(
    model: nn.Module,
    batch: Callable[[int], Sequence[Any]],
    loss: Callable[..., Tensor],
    member: Member,
    weight_decay: float,
    record: bool,
) -> float:
    """AdamW with warm-up and cosine; the seconds of a step, without the first tenth of them."""
    model.train()
    config = OptimConfig(lr=member.rate, warmup_steps=max(1, member.steps // 20), final_ratio=0.01)
    device = next(model.parameters()).device
    groups = [group | {"lr": member.rate} for group in parameter_groups(model, weight_decay)]
    steps = Steps(loss, groups, record=record)
    factor = schedule(config, member.steps)
    begin, started = member.steps // 10, time.perf_counter()
    for step in range(member.steps):
        if step == begin:
            _wait(device)
            started = time.perf_counter()
        steps(factor(step), *batch(step))
    _wait(device)
    return (time.perf_counter() - started) / (member.steps - begin)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _precision(settings: Settings) -> torch.autocast:
    return torch.autocast(settings.device, torch.bfloat16, enabled=settings.half)


def _on(model: nn.Module, settings: Settings) -> nn.Module:
    return model.to(settings.device, memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
