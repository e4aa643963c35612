"""What the evidence on vision stands on: views that keep masks with their images, packed images, paired differences."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def _benchmarks_importable(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])


def scenes(count: int = 24, height: int = 48, width: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """Images whose left half is black and upper half red, with the quarter that a pixel is in as its label."""
    row, column = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    labels = 2 * (row < height // 2) + (column < width // 2)
    image = torch.stack([(row < height // 2) * 255, (column >= width // 2) * 255, torch.zeros_like(row)], dim=-1)
    return image.to(torch.uint8).expand(count, -1, -1, -1), labels.to(torch.uint8).expand(count, -1, -1)


def test_masks_follow_the_views_of_their_images():
    import _vision_members as members

    images, masks = scenes()
    generator = torch.Generator().manual_seed(3)
    x, grid = members.views(images, (96, 128), (0.25, 1.5), generator, distort=False)
    labels = members._seen_through(masks, grid)
    inside = labels >= 0
    red, green = (x[:, k] * members.STD[k] + members.MEAN[k] for k in (0, 1))
    upper, left = labels // 2 == 1, labels % 2 == 1
    # Between two pixels the image is a mixture, so a few places at the borders are left out.
    clear = inside & ((red - 0.5).abs() > 0.4) & ((green - 0.5).abs() > 0.4)
    assert clear.float().mean() > 0.5
    assert torch.equal((red > 0.5)[clear], upper[clear])
    assert torch.equal((green < 0.5)[clear], left[clear])
    assert (~inside).any()  # some views reach over the border, where nothing counts


def test_views_depend_on_the_seed_alone_and_cover_the_parts_asked_for():
    import _vision_members as members

    images = torch.randint(0, 256, (64, 16, 16, 3), dtype=torch.uint8)
    one, again, other = (
        members.views(images, (16, 16), (0.35, 1.0), torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)
    )
    assert torch.equal(one[0], again[0])
    assert not torch.equal(one[0], other[0])
    reach = one[1].abs().amax()
    assert reach <= 1.0  # no view of a classifier leaves the image
    area = (one[1].amax(dim=(1, 2)) - one[1].amin(dim=(1, 2))).prod(dim=-1) / 4.0 * (16 / 15) ** 2
    assert 0.3 < area.min() < area.max() < 1.01


def test_packed_images_come_back(tmp_path):
    import _vision_data as data

    generator = np.random.default_rng(0)

    def smooth(count: int, height: int, width: int) -> np.ndarray:
        coarse = generator.integers(0, 256, (count, height // 16, width // 16, 3), dtype=np.uint8)
        return coarse.repeat(16, axis=1).repeat(16, axis=2)

    whole = data.Data(
        objects_train=smooth(260, 64, 64),
        labels_train=np.arange(260) % 2,
        objects_test=smooth(4, 64, 64),
        labels_test=np.arange(4) % 2,
        classes=np.array(["a", "b"]),
        edges=np.array([["a", "root"], ["b", "root"]]),
        scenes_train=smooth(3, 48, 64),
        masks_train=generator.integers(0, 12, (3, 48, 64), dtype=np.uint8),
        scenes_test=smooth(2, 48, 64),
        masks_test=generator.integers(0, 12, (2, 48, 64), dtype=np.uint8),
        cells=smooth(4, 48, 64),
        boxes=np.array([[0, 1, 2, 3, 9, 9], [3, 2, 1, 1, 5, 8]], np.float32),
        cells_test=np.array([False, False, True, True]),
    )
    data.pack(whole, tmp_path / data.PACKED)
    back = data.load(tmp_path)
    assert np.bincount(back.labels_train).tolist() == [data.PER_CLASS] * 2
    first = [np.flatnonzero(whole.labels_train == k)[: data.PER_CLASS] for k in (0, 1)]
    kept = whole.objects_train[np.concatenate(first)].astype(int)
    assert np.abs(back.objects_train.astype(int) - kept).mean() < 6.0  # WebP's loss, far below that of another image
    for name in ("labels_test", "classes", "edges", "masks_train", "masks_test", "boxes", "cells_test"):
        np.testing.assert_array_equal(getattr(back, name), getattr(whole, name))
    part = back.first(2)
    assert part.boxes[:, 0].tolist() == [0, 1]  # photos 0 and 3 are now the first and the second


def test_differences_are_paired_by_seed_and_leave_failures_out():
    import vision_evidence as evidence

    rows = [
        {"part": "segment", "name": "hcformer", "seed": seed, "miou": 0.5 + seed / 10, "pixel_accuracy": 0.5}
        for seed in (1, 2, 3)
    ] + [
        {"part": "segment", "name": "convnext", "seed": seed, "miou": 0.4 + seed / 10, "pixel_accuracy": 0.4}
        for seed in (2, 3)
    ]
    rows.append({"part": "segment", "name": "convnext", "seed": 1, "error": "RuntimeError: no memory"})
    found = evidence.differences(rows, "segment", "hcformer", "convnext")
    assert found["miou"]["seeds"] == 2
    assert found["miou"]["mean"] == pytest.approx(0.1)
    assert found["miou"]["interval"] == pytest.approx((0.1, 0.1))
