"""Detection and instance segmentation: torchvision's Mask R-CNN on any timm backbone, and COCO AP.

objects = load_objects("coco")        # of leafward.data.boxes
model = detector("hcformer_tiny", len(objects.classes), size=800)
"""

from __future__ import annotations

import contextlib
import io
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torchvision import tv_tensors
from torchvision.models.detection import FasterRCNN, MaskRCNN
from torchvision.ops import FeaturePyramidNetwork
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool
from torchvision.transforms import v2

from leafward.data.boxes import ObjectSets, Photo, check, outline_mask
from leafward.data.image_files import read_image
from leafward.data.images import IMAGENET, Pixels
from leafward.engine import Loss
from leafward.errors import UsageError, require
from leafward.geometry.scalars import wide
from leafward.systems.vision.pyramids import LEVELS, coarsest, pyramid

FPN_WIDTH = 256
LONGEST = 1333 / 800  # longest side over the shorter one, as in the paper
KINDS = {"mask-rcnn": MaskRCNN, "faster-rcnn": FasterRCNN}


class Pyramid(nn.Module):
    """A timm backbone with a norm per stage and a feature pyramid of five levels, for torchvision's detectors."""

    out_channels = FPN_WIDTH

    def __init__(self, model: str, arguments: Mapping[str, Any]) -> None:
        super().__init__()
        body = pyramid(model, arguments)
        self.body: nn.Module = body
        channels = body.feature_info.channels()[-LEVELS:]
        self.norms = nn.ModuleList(nn.GroupNorm(1, c) for c in channels)
        self.fpn = FeaturePyramidNetwork(channels, FPN_WIDTH, extra_blocks=LastLevelMaxPool())

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        maps = [norm(map_) for norm, map_ in zip(self.norms, coarsest(self.body, x), strict=True)]
        return self.fpn(OrderedDict((str(k), map_) for k, map_ in enumerate(maps)))


def detector(
    model: str,
    classes: int,
    size: int,
    arguments: Mapping[str, Any] | None = None,
    kind: str = "mask-rcnn",
    pixels: Pixels = IMAGENET,
) -> nn.Module:
    """Mask R-CNN (or Faster R-CNN, without masks) on a timm backbone; images get `size` pixels on the shorter side."""
    if kind not in KINDS:
        raise UsageError(f"the detector must be one of {', '.join(KINDS)}, got {kind!r}")
    sizes = {"min_size": size, "max_size": round(size * LONGEST)}
    statistics = {"image_mean": list(pixels.mean), "image_std": list(pixels.std)}
    return KINDS[kind](Pyramid(model, arguments or {}), classes + 1, **sizes, **statistics)


class Examples:
    """Photos as (image (3, H, W) in [0, 1], target): boxes (n, 4), labels (n) from 1 on, masks (n, H, W)."""

    def __init__(self, photos: Sequence[Photo], masks: bool, hflip: float) -> None:
        self.photos, self.masks = photos, masks
        self.transform = v2.RandomHorizontalFlip(hflip)

    def __len__(self) -> int:
        return len(self.photos)

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, Tensor]]:
        photo = self.photos[index]
        pixels = torch.from_numpy(np.asarray(read_image(photo.file)).copy()).permute(2, 0, 1)
        height, width = pixels.shape[1:]
        things = [thing for thing in photo.things if not thing.crowd]
        boxes = torch.tensor([thing.box for thing in things], dtype=torch.float32).reshape(-1, 4)
        boxes[:, 0::2].clamp_(0, width)
        boxes[:, 1::2].clamp_(0, height)
        # COCO itself has a box without height, which torchvision refuses in the middle of the training.
        solid = (boxes[:, 2:] > boxes[:, :2]).all(dim=1)
        boxes, things = boxes[solid], [thing for thing, keep in zip(things, solid.tolist(), strict=True) if keep]
        target: dict[str, Any] = {
            "boxes": tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=(height, width)),  # pyright: ignore
            "labels": torch.tensor([thing.label + 1 for thing in things], dtype=torch.int64),
        }
        if self.masks:
            outlines = [outline_mask(photo, thing, height, width) for thing in things]
            stack = np.stack(outlines) if outlines else np.zeros((0, height, width), dtype=np.uint8)
            target["masks"] = tv_tensors.Mask(torch.from_numpy(stack))
        image, target = self.transform(tv_tensors.Image(pixels), target)
        plain = {name: value.as_subclass(Tensor) for name, value in target.items()}
        return image.as_subclass(Tensor).float() / 255, plain


class Detection:
    """Learns to find objects. Give it to `engine.train_loop` with a model of `detector`."""

    monitor = "box_ap"
    mode: Literal["max"] = "max"

    def __init__(self, objects: ObjectSets, *, hflip: float = 0.5) -> None:
        self.objects, self.classes = objects, objects.classes
        self.decoder = "mask-rcnn" if objects.masks else "faster-rcnn"
        self.dataset = Examples(objects.train, objects.masks, hflip)

    def check(self) -> None:
        """Look at all the data before training starts; whatever is wrong is reported by the name of its file."""
        check(self.objects.train, self.classes, "training photos", complete=True)
        check(self.objects.held_out, self.classes, "held-out photos", complete=False)

    @staticmethod
    def collate(samples: list[tuple[Tensor, dict[str, Tensor]]]) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
        return [image for image, _ in samples], [target for _, target in samples]

    def loss(self, model: nn.Module, batch: tuple[list[Tensor], list[dict[str, Tensor]]]) -> Loss:
        images, targets = batch
        parts = model(images, targets)
        count = len(images)
        total = torch.stack([wide(part) for part in parts.values()]).sum()
        return Loss(total * count, count, {name: part.detach() * count for name, part in parts.items()})

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return self.measure(model)[0]

    @torch.no_grad()
    def measure(self, model: nn.Module) -> tuple[dict[str, float], None]:
        """COCO's average precision over all held-out photos, for boxes and, where there are outlines, masks."""
        device = next(model.parameters()).device
        examples = Examples(self.objects.held_out, masks=False, hflip=0.0)
        found = []
        for index in range(len(examples)):
            answer = model([examples[index][0].to(device)])[0]
            found += _records(index, {name: value.cpu() for name, value in answer.items()})
        return average_precision(self.objects.held_out, self.classes, found, self.objects.masks), None


def _records(index: int, answer: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """A detector's answer for one photo as COCO's result records."""
    corners = answer["boxes"].float()
    boxes = torch.cat([corners[:, :2], corners[:, 2:] - corners[:, :2]], dim=1).tolist()
    records = [
        {"image_id": index, "category_id": int(label) - 1, "bbox": box, "score": float(score)}
        for box, label, score in zip(boxes, answer["labels"], answer["scores"], strict=True)
    ]
    if "masks" in answer:
        masks = require("pycocotools.mask", "vision")
        for record, mask in zip(records, answer["masks"][:, 0] > 0.5, strict=True):
            record["segmentation"] = masks.encode(np.asfortranarray(mask.numpy().astype(np.uint8)))
    return records


def average_precision(
    photos: Sequence[Photo], classes: Sequence[str], found: list[dict[str, Any]], masks: bool
) -> dict[str, float]:
    """AP over IoU 0.5 … 0.95 and at 0.5, by pycocotools; `found` are its result records, by place in `photos`."""
    coco = require("pycocotools.coco", "vision").COCO
    evaluation = require("pycocotools.cocoeval", "vision").COCOeval
    scores: dict[str, float] = {}
    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints
        truth = coco()
        truth.dataset = _truth(photos, classes)
        truth.createIndex()
        for kind, name in (("bbox", "box"), ("segm", "mask"))[: 1 + masks]:
            if not found:
                scores |= {f"{name}_ap": 0.0, f"{name}_ap50": 0.0}
                continue
            run = evaluation(truth, truth.loadRes([dict(record) for record in found]), kind)
            run.evaluate()
            run.accumulate()
            run.summarize()
            # pycocotools says −1 where there was nothing to find.
            scores |= {f"{name}_ap": max(0.0, float(run.stats[0])), f"{name}_ap50": max(0.0, float(run.stats[1]))}
    return scores


def _truth(photos: Sequence[Photo], classes: Sequence[str]) -> dict[str, Any]:
    annotations = []
    sizes = []
    for index, photo in enumerate(photos):
        width, height = photo.size or read_image(photo.file).size
        sizes.append({"id": index, "width": width, "height": height})
        for thing in photo.things:
            left, top, right, bottom = thing.box
            record = {
                "id": len(annotations) + 1,  # 0 would mean no match
                "image_id": index,
                "category_id": thing.label,
                "bbox": [left, top, right - left, bottom - top],
                "area": (right - left) * (bottom - top),
                "iscrowd": int(thing.crowd),
            }
            if thing.outline is not None:
                record["segmentation"] = thing.outline
                record["area"] = float(outline_mask(photo, thing, height, width).sum())
            annotations.append(record)
    categories = [{"id": k, "name": name} for k, name in enumerate(classes)]
    return {"info": {}, "images": sizes, "annotations": annotations, "categories": categories}
