"""Image classification as a task of the training loop: timm's augmentation and mixup; top-1, top-5, taxonomy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from timm.data import Mixup, create_transform
from torch import Tensor, nn

from leafward.config import checked
from leafward.data.images import IMAGENET, ImageSet, ImageSets, check, check_classes
from leafward.engine import Loss
from leafward.errors import DataError, UsageError
from leafward.geometry.scalars import wide
from leafward.hierarchy import Taxonomy, metrics
from leafward.systems.vision.augment import Augment


class Pictures:
    """A map-style data set of (image (3, size, size), label)."""

    def __init__(self, images: ImageSet, transform: Callable[[Any], Tensor]) -> None:
        self.images, self.transform = images, transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(self.images.read(index)), int(self.images.labels[index])


@dataclass(frozen=True)
class Predictions:
    """Logits (n, classes) and labels (n) of a held-out set, both on the CPU."""

    logits: Tensor
    labels: Tensor

    @property
    def right(self) -> np.ndarray:
        """(n): whether the first answer is right."""
        return (self.logits.argmax(dim=1) == self.labels).numpy()


class Classification:
    """Learns to name images. Give it to `engine.train_loop` with a model that maps (B, 3, H, W) to logits."""

    monitor = "top1"
    mode: Literal["max"] = "max"
    decoder = ""  # the model's own head

    def __init__(
        self,
        sets: ImageSets,
        size: int,
        augment: Augment | None = None,
        *,
        mean: Sequence[float] = IMAGENET.mean,
        std: Sequence[float] = IMAGENET.std,
        crop: float = 0.9,
        batch: int = 64,
        taxonomy: Taxonomy | None = None,
    ) -> None:
        augment = checked(Augment, augment or Augment())
        self.sets, self.taxonomy, self.batch = sets, taxonomy, batch
        self.classes = sets.train.classes
        if taxonomy is not None:
            _check_taxonomy(taxonomy, self.classes)
        common: dict[str, Any] = {
            "input_size": (3, size, size),
            "mean": tuple(mean),
            "std": tuple(std),
            "interpolation": "bicubic",
        }
        training = _augmentation(augment, common)
        plain: Any = create_transform(**common, is_training=False, crop_pct=crop)
        self.dataset, self.held_out = Pictures(sets.train, training), Pictures(sets.held_out, plain)
        self.smoothing = augment.smoothing
        self.mix = None
        if augment.mixup > 0 or augment.cutmix > 0:
            self.mix = Mixup(
                mixup_alpha=augment.mixup,
                cutmix_alpha=augment.cutmix,
                label_smoothing=augment.smoothing,
                num_classes=len(self.classes),
            )

    def check(self) -> None:
        """Look at all the data before training starts; whatever is wrong is reported by the name of its file."""
        if len(self.classes) < 2:
            raise DataError(f"there must be at least two classes to tell apart, not {self.classes}")
        check(self.sets.train, "training images")
        check_classes(self.sets.train, "training images")
        check(self.sets.held_out, "held-out images")

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        images, labels = batch
        targets: Tensor = labels
        if self.mix is not None:
            if len(images) % 2:
                raise UsageError(
                    "augment.mixup and augment.cutmix mix images in pairs: loop.micro_batch (without it, "
                    f"loop.batch_size / ranks) must be even, not {len(images)}"
                )
            images, targets = self.mix(images, labels)
        logits = wide(model(images))
        smoothing = self.smoothing if targets is labels else 0.0  # mixed targets are smoothed already
        total = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing)
        right = (logits.argmax(dim=1) == labels).sum()
        return Loss(total, len(images), {"top1": right})

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return self.measure(model)[0]

    def measure(self, model: nn.Module) -> tuple[dict[str, float], np.ndarray]:
        """The scores, and for every held-out image whether its first answer is right."""
        predictions = self.predict(model)
        return score(predictions, self.classes, self.taxonomy), predictions.right.astype(float)

    @torch.no_grad()
    def predict(self, model: nn.Module) -> Predictions:
        """Answers for the held-out images, by the model's own device."""
        device = next(model.parameters()).device
        loader = torch.utils.data.DataLoader(self.held_out, batch_size=self.batch)  # type: ignore[arg-type]
        logits, labels = [], []
        for images, label in loader:
            logits.append(wide(model(images.to(device))).cpu())
            labels.append(label)
        return Predictions(torch.cat(logits), torch.cat(labels))


def _augmentation(augment: Augment, common: dict[str, Any]) -> Any:
    try:
        transform: Any = create_transform(
            **common,
            is_training=True,
            scale=augment.scale,
            hflip=augment.hflip,
            color_jitter=augment.jitter or None,  # pyright: ignore[reportArgumentType]  (its own default is None-able)
            auto_augment=augment.auto,
            re_prob=augment.erase,
            re_mode="pixel",
        )
    except (AssertionError, KeyError, ValueError) as error:  # as timm refuses a policy
        raise UsageError(f"augment.auto is {augment.auto!r}, which timm does not take: {error}") from None
    for operation in operations(transform):
        if operation.name.startswith("Posterize"):
            operation.aug_fn = partial(_posterize_visibly, operation.aug_fn)
    return transform


def operations(transform: Any) -> Iterator[Any]:
    """timm's operations (`AugmentOp`) that an automatic augmentation inside `transform` chooses from."""
    for step in transform.transforms:
        yield from getattr(step, "ops", ())  # RandAugment, AugMix
        for pair in getattr(step, "policy", ()):  # AutoAugment
            yield from pair


def _posterize_visibly(posterize: Callable[..., Any], image: Any, bits: int, **options: Any) -> Any:
    """Keep at least one bit of each colour. At the strongest level timm asks for none, which Pillow 13 refuses and
    which made a black image before; RandAugment's own code in TensorFlow keeps one there, as it shifts by 7 at most."""
    return posterize(image, max(1, bits), **options)


def _check_taxonomy(taxonomy: Taxonomy, classes: Sequence[str]) -> None:
    missing = [name for name in classes if name not in taxonomy]
    if missing:
        raise DataError(f"the taxonomy has no node for the class {missing[0]!r}")


def score(predictions: Predictions, classes: Sequence[str], taxonomy: Taxonomy | None = None) -> dict[str, float]:
    """Loss, top-1 and top-5 (as parts of 1); with a taxonomy also its hierarchical scores."""
    logits, labels = predictions.logits, predictions.labels
    ranked = logits.topk(min(5, logits.shape[1]), dim=1).indices
    hits = ranked == labels.unsqueeze(1)
    values = {
        "loss": F.cross_entropy(logits, labels).item(),
        "top1": hits[:, 0].float().mean().item(),
        "top5": hits.any(dim=1).float().mean().item(),
    }
    if taxonomy is not None:
        names = np.array(classes)
        report = metrics.evaluate(taxonomy, names[ranked[:, 0].numpy()], names[labels.numpy()])
        values |= {
            "hierarchical_f1": report.f1,
            "lca_height": report.lca_height,
            "mistake_severity": report.mistake_severity,
        }
        values |= {f"level_{level}_accuracy": value for level, value in report.level_accuracy.items()}
    return values
