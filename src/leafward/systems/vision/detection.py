"""Detection and instance segmentation: COCO JSON and VOC XML, torchvision's Mask R-CNN on any timm backbone, COCO AP.

objects = load_objects("coco")        # annotations/instances_train2017.json, train2017/ …; or VOC's Annotations/
model = detector("hcformer_tiny", len(objects.classes), size=800)
"""

from __future__ import annotations

import contextlib
import io
import xml.etree.ElementTree as ElementTree
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torchvision import tv_tensors
from torchvision.models.detection import FasterRCNN, MaskRCNN
from torchvision.ops import FeaturePyramidNetwork
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool
from torchvision.transforms import v2

from leafward.engine import Loss
from leafward.errors import DataError, UsageError, require
from leafward.files import read_json, read_text
from leafward.tasks.images import HELD_OUT, IMAGENET, TRAIN, Pixels, divided, read_image
from leafward.tasks.pyramids import LEVELS, coarsest, pyramid

FPN_WIDTH = 256
LONGEST = 1333 / 800  # longest side over the shorter one, as in the paper
KINDS = {"mask-rcnn": MaskRCNN, "faster-rcnn": FasterRCNN}


@dataclass(frozen=True)
class Thing:
    """One object: its box (left, top, right, bottom) in pixels, class number, and outline where there is one."""

    box: tuple[float, float, float, float]
    label: int
    outline: Any = None
    """COCO's `segmentation`: polygons, or a run-length code."""
    crowd: bool = False


@dataclass(frozen=True)
class Photo:
    file: Path
    things: list[Thing] = field(default_factory=list)
    size: tuple[int, int] | None = None
    """Width and height, where the annotations say them."""


@dataclass(frozen=True)
class ObjectSets:
    train: list[Photo]
    held_out: list[Photo]
    classes: list[str]

    @property
    def masks(self) -> bool:
        """Whether the objects have outlines; all of them must, or none."""
        photos = self.train + self.held_out
        outlined = [thing.outline is not None for photo in photos for thing in photo.things]
        if any(outlined) and not all(outlined):
            bare = next(photo for photo in photos if any(thing.outline is None for thing in photo.things))
            box = next(thing.box for thing in bare.things if thing.outline is None)
            raise DataError(
                f"{outlined.count(False)} of {len(outlined)} objects have no outline (segmentation), the first in "
                f"{bare.file} with the box {box}; give every object one for masks, or none for boxes alone"
            )
        return all(outlined)


def load_objects(data: str | Path, held_out: float = 0.1, seed: int = 0) -> ObjectSets:
    """Photos from a folder in COCO's layout (JSON in `annotations` or beside the images) or in VOC's (XML)."""
    path = Path(data)
    if (path / "Annotations").is_dir():
        return _voc(path, held_out, seed)
    files = sorted([*path.glob("annotations/*.json"), *path.glob("*.json")])
    if not files:
        raise DataError(f"{path} has neither COCO's annotations/*.json nor VOC's Annotations/*.xml")
    # Beside them COCO has captions_….json and person_keypoints_….json.
    files = [file for file in files if file.stem.startswith("instances")] or files
    train, test = (
        next((file for file in files if any(name in file.stem.lower() for name in names)), None)
        for names in (TRAIN, HELD_OUT)
    )
    if train is None and (test is not None or len(files) > 1):
        raise DataError(f"{path}: none of {', '.join(f.name for f in files)} has 'train' in its name")
    photos, classes = _coco(train or files[0], path)
    if test is None:
        return _divided(photos, classes, held_out, seed)
    others, again = _coco(test, path)
    if again != classes:
        raise DataError(f"{test} and {train} do not have the same categories")
    return ObjectSets(photos, others, classes)


def _divided(photos: list[Photo], classes: list[str], held_out: float, seed: int) -> ObjectSets:
    if len(photos) < 2:
        raise DataError(f"there are {len(photos)} photos; at least two are needed, one of them held out")
    return ObjectSets(*divided(photos, held_out, seed), classes)


def _coco(file: Path, path: Path) -> tuple[list[Photo], list[str]]:
    try:
        record = read_json(file)
        categories = sorted(record["categories"], key=lambda category: category["id"])
        number = {category["id"]: k for k, category in enumerate(categories)}
        things: dict[int, list[Thing]] = {image["id"]: [] for image in record["images"]}
        for each in record["annotations"]:
            if each["category_id"] not in number:
                raise DataError(
                    f"{file}: annotation {each['id']} has category {each['category_id']}, which is not listed"
                )
            if each["image_id"] not in things:
                raise DataError(f"{file}: annotation {each['id']} is of image {each['image_id']}, which is not listed")
            x, y, w, h = each["bbox"]
            outline = each.get("segmentation") or None
            thing = Thing((x, y, x + w, y + h), number[each["category_id"]], outline, bool(each.get("iscrowd", 0)))
            things[each["image_id"]].append(thing)
        photos = [
            Photo(_image_file(path, file, image["file_name"]), things[image["id"]], (image["width"], image["height"]))
            for image in record["images"]
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{file} is not a COCO annotation file: {type(error).__name__} {error}") from None
    return photos, [category["name"] for category in categories]


def _image_file(path: Path, annotations: Path, name: str) -> Path:
    """Where an image of an annotation file lies: in a folder named as the split, in images/, or beside the file."""
    split = annotations.stem.rpartition("_")[2]
    places = [path / split, path / "images" / split, path / "images", path, annotations.parent]
    return next((place / name for place in places if (place / name).is_file()), path / name)


def _voc(path: Path, held_out: float, seed: int) -> ObjectSets:
    lists = path / "ImageSets" / "Main"
    stems = {
        side: next((lists / f"{n}.txt" for n in names if (lists / f"{n}.txt").is_file()), None)
        for side, names in (("train", ("train", "trainval")), ("test", ("val", "test")))
    }
    files = sorted((path / "Annotations").glob("*.xml"))
    raw = {file.stem: _voc_photo(file, path / "JPEGImages") for file in files}
    classes = sorted({name for _, things, _ in raw.values() for name, _ in things})
    photos = {
        stem: Photo(image, [Thing(box, classes.index(name)) for name, box in things], size)
        for stem, (image, things, size) in raw.items()
    }
    if stems["train"] is None or stems["test"] is None:
        return _divided(list(photos.values()), classes, held_out, seed)

    def listed(file: Path) -> list[Photo]:
        names = read_text(file).split()
        missing = [name for name in names if name not in photos]
        if missing:
            raise DataError(f"{file} lists {missing[0]}, which has no annotation")
        return [photos[name] for name in names]

    return ObjectSets(listed(stems["train"]), listed(stems["test"]), classes)


def _voc_photo(file: Path, images: Path) -> tuple[Path, list[tuple[str, Any]], tuple[int, int] | None]:
    try:
        root = ElementTree.parse(file).getroot()
        things = []
        for each in root.iter("object"):
            ends = [float(each.findtext(f"bndbox/{side}", "")) for side in ("xmin", "ymin", "xmax", "ymax")]
            if not (name := each.findtext("name")):
                raise ValueError("an object has no name")
            things.append((name, (ends[0] - 1, ends[1] - 1, ends[2], ends[3])))  # counted from 1
        size = root.find("size")
        sides = None if size is None else (int(size.findtext("width", "")), int(size.findtext("height", "")))
        return images / (root.findtext("filename") or f"{file.stem}.jpg"), things, sides
    except (OSError, ValueError, ElementTree.ParseError) as error:
        raise DataError(f"{file} is not a VOC annotation: {error}") from None


def check(photos: Sequence[Photo], classes: Sequence[str], what: str, complete: bool) -> None:
    """Refuse images that cannot be read or differ in size, empty boxes, outlines that cannot be drawn and, if
    `complete`, classes without object."""
    seen = set()
    for photo in photos:
        width, height = read_image(photo.file).size
        if photo.size is not None and photo.size != (width, height):
            raise DataError(f"{what}: {photo.file} is {(width, height)}, but its annotation says {photo.size}")
        for thing in photo.things:
            left, top, right, bottom = thing.box
            if not (
                right - left > 0 and bottom - top > 0 and left < width and top < height and right > 0 and bottom > 0
            ):
                raise DataError(f"{what}: {photo.file} has the box {thing.box}, which is empty or outside the image")
            if thing.outline is not None:
                try:
                    _drawn(thing.outline, height, width)
                except DataError as error:
                    raise DataError(f"{what}: {photo.file}: {error}") from None
            seen.add(thing.label)
    missing = [name for k, name in enumerate(classes) if k not in seen]
    if complete and missing:
        raise DataError(f"{what}: the class {missing[0]!r} has no object")


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
            drawn = [_drawn(thing.outline, height, width) for thing in things]
            stack = torch.from_numpy(np.stack(drawn)) if drawn else torch.zeros(0, height, width, dtype=torch.uint8)
            target["masks"] = tv_tensors.Mask(stack)
        image, target = self.transform(tv_tensors.Image(pixels), target)
        plain = {name: value.as_subclass(Tensor) for name, value in target.items()}
        return image.as_subclass(Tensor).float() / 255, plain


def _drawn(outline: Any, height: int, width: int) -> np.ndarray:
    """COCO's polygons or run-length code as a mask (H, W) of zeros and ones."""
    masks = require("pycocotools.mask", "vision")
    try:
        codes = masks.frPyObjects(outline, height, width)
        return masks.decode(masks.merge(codes) if isinstance(codes, list) else codes).astype(np.uint8)
    except Exception as error:  # pycocotools has no errors of its own
        raise DataError(f"an outline cannot be drawn: {error}") from error


class Detection:
    """Learns to find objects. Give it to `engine.fit` with a model of `detector`."""

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
        total = torch.stack([part.float() for part in parts.values()]).sum()
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
                record["area"] = float(_drawn(thing.outline, height, width).sum())
            annotations.append(record)
    categories = [{"id": k, "name": name} for k, name in enumerate(classes)]
    return {"info": {}, "images": sizes, "annotations": annotations, "categories": categories}
