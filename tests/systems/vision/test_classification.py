"""Classification: scores against counting by hand, mixed targets, and the checks before training."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from leafward.data.images import ImageSets, from_arrays, read_image
from leafward.data.samples import photos
from leafward.errors import DataError, UsageError
from leafward.hierarchy import Taxonomy
from leafward.systems.hcformer import config as hcformer
from leafward.systems.himapper import config as himapper
from leafward.systems.vision.augment import Augment
from leafward.systems.vision.classification import Classification, Predictions, operations, score

CLASSES = ["shoe", "boot", "hat", "cap"]
TREE = Taxonomy.from_edges(
    [("foot", "all"), ("head", "all"), ("shoe", "foot"), ("boot", "foot"), ("hat", "head"), ("cap", "head")]
)


def sets(count: int = 8) -> ImageSets:
    images = np.random.default_rng(0).integers(0, 255, (count, 40, 40, 3), dtype=np.uint8)
    made = from_arrays(images, np.arange(count) % 4, CLASSES, "set")
    return ImageSets(made, made)


class Mean(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 4)

    def forward(self, x):
        return self.fc(x.mean(dim=(2, 3)))


def test_scores():
    logits = torch.tensor([[9.0, 1, 0, 0], [5, 9, 0, 1], [9, 0, 5, 1], [0, 1, 2, 9]])
    values = score(Predictions(logits, torch.tensor([0, 0, 2, 3])), CLASSES, TREE)
    assert values["top1"] == 0.5
    assert values["top5"] == 1.0
    # Wrong: boot for shoe (common parent foot, height 1), shoe for hat (the root, height 2).
    assert values["mistake_severity"] == 1.5
    assert values["level_1_accuracy"] == 0.75
    assert values["loss"] == pytest.approx(nn.functional.cross_entropy(logits, torch.tensor([0, 0, 2, 3])).item())


def test_loss_of_plain_and_mixed_batches():
    torch.manual_seed(0)
    model = Mean()
    images, labels = torch.randn(6, 3, 8, 8), torch.tensor([0, 1, 2, 3, 0, 1])
    plain = Classification(sets(), 32, Augment(smoothing=0.1)).loss(model, (images, labels))
    logits = model(images)
    spread = 0.9 * nn.functional.one_hot(labels, 4) + 0.1 / 4
    torch.testing.assert_close(plain.total, -(spread * logits.log_softmax(1)).sum())
    assert int(plain.count) == 6
    assert int(plain.metrics["top1"]) == int((logits.argmax(1) == labels).sum())
    task = Classification(sets(), 32, Augment(mixup=1.0, smoothing=0.1))
    np.random.seed(3)  # noqa: NPY002  (timm draws from it: first whether to mix, then how much)
    lam = (np.random.rand(), np.random.beta(1.0, 1.0))[1]  # noqa: NPY002
    np.random.seed(3)  # noqa: NPY002
    mixed = task.loss(model, (images.clone(), labels))
    blend = images * lam + images.flip(0) * (1 - lam)
    one, other = (0.9 * nn.functional.one_hot(t, 4) + 0.1 / 4 for t in (labels, labels.flip(0)))
    expected = -((lam * one + (1 - lam) * other) * model(blend).log_softmax(1)).sum()
    torch.testing.assert_close(mixed.total, expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(UsageError, match=r"mix images in pairs: loop\.micro_batch .* must be even, not 5"):
        task.loss(model, (images[:5], labels[:5]))


def test_predictions_follow_the_held_out_order():
    task = Classification(sets(), 32, batch=3)
    predictions = task.predict(Mean().eval())
    assert predictions.labels.tolist() == [0, 1, 2, 3] * 2
    values, units = task.measure(Mean().eval())
    assert set(values) == {"loss", "top1", "top5"}
    assert units.shape == (8,)
    assert task.dataset[0][0].shape == (3, 32, 32)


def test_what_is_wrong_is_named():
    with pytest.raises(DataError, match="no node for the class 'hat'"):
        Classification(sets(), 32, taxonomy=Taxonomy.from_edges([("shoe", "all"), ("boot", "all")]))
    with pytest.raises(UsageError, match=r"augment\.auto is 'nonsense', which timm does not take"):
        Classification(sets(), 32, Augment(auto="nonsense"))
    alone = from_arrays(np.zeros((4, 40, 40, 3), dtype=np.uint8), np.zeros(4, dtype=int), ["shoe"], "set")
    with pytest.raises(DataError, match=r"at least two classes to tell apart, not \['shoe'\]"):
        Classification(ImageSets(alone, alone), 32).check()
    few = ImageSets(sets(3).train, sets().held_out)
    with pytest.raises(DataError, match="the class 'cap' has no image"):
        Classification(few, 32).check()
    Classification(sets(), 32).check()
    unlabelled = from_arrays(np.zeros((4, 40, 40, 3), dtype=np.uint8), np.array([0, 1, 2, -1]), CLASSES, "set")
    with pytest.raises(DataError, match=r"the label of set\[3\] is -1"):
        Classification(ImageSets(unlabelled, sets().held_out), 32).check()


def photo(side: int = 64):
    return read_image(photos()[0].jpeg).resize((side, side))


def policies() -> list[str]:
    """Those of all presets and of timm's other kinds; mmax20 goes beyond the range of timm's levels."""
    presets = [make() for module in (hcformer, himapper) for make in module.PRESETS.values()]
    chosen = {preset.augment.auto for preset in presets if preset.augment.auto}
    assert chosen
    return sorted(
        chosen | {"rand-m9", "rand-m20-mmax20-inc1", "augmix-m10", "v0", "v0r", "original", "originalr", "3a"}
    )


@pytest.mark.parametrize("policy", policies())
def test_every_operation_works_at_every_magnitude(policy):
    """timm's posterize asks for 0 bits at its strongest level, and for fewer beyond; Pillow 13 refuses that."""
    image = photo()
    pixels = np.asarray(image)
    posterized = set()
    for operation in operations(Classification(sets(), 64, Augment(auto=policy)).dataset.transform):
        operation.prob, operation.magnitude_std = 1.0, 0.0
        for magnitude in np.linspace(0.0, operation.magnitude_max or 10.0, 41).tolist():
            operation.magnitude = magnitude
            changed = operation(image)
            assert (changed.size, changed.mode) == (image.size, image.mode)
            kept = int(magnitude / 10 * 4)
            bits = {"Posterize": kept, "PosterizeIncreasing": 4 - kept, "PosterizeOriginal": 4 + kept}
            if operation.name in bits:
                steps = 2 ** (8 - max(1, bits[operation.name]))
                np.testing.assert_array_equal(np.asarray(changed), pixels // steps * steps)
                posterized.add(bits[operation.name])
    assert (min(posterized, default=0) <= 0) or policy == "original"
    assert posterized or policy == "3a"


@pytest.mark.parametrize("module", [hcformer, himapper])
def test_the_presets_augmentation_takes_thousands_of_pictures(module):
    """About one in 700 draws a posterize without a bit."""
    augment = next(made.augment for made in (make() for make in module.PRESETS.values()) if made.augment.auto)
    transform = Classification(sets(), 32, augment).dataset.transform
    image = photo(48)
    for seed in range(2000):
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002  (timm draws from it)
        torch.manual_seed(seed)
        changed = transform(image)
        assert changed.shape == (3, 32, 32)
        assert changed.isfinite().all()
