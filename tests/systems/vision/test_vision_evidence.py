"""What the evidence on vision stands on: views that keep masks with their images, packed images, paired differences."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


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
    red, green = (x[:, k] * members.IMAGENET.std[k] + members.IMAGENET.mean[k] for k in (0, 1))
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


def linear_problem(device: str, count: int = 12):
    """A small network, and the batches of its steps in two shapes that take turns."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3)).to(device)
    sizes = [8 if step % 2 else 4 for step in range(count)]
    batches = [(torch.randn(size, 5, device=device), torch.randn(size, 3, device=device)) for size in sizes]
    return model, batches


def trained(device: str, record: bool) -> torch.Tensor:
    import _steps

    model, batches = linear_problem(device)
    groups = [{"params": [model[0].weight, model[2].weight], "lr": 1e-2}, {"params": [model[0].bias], "lr": 3e-2}]
    take = _steps.Steps(
        lambda x, y: 10.0 * (model(x) - y).square().mean(), groups, weight_decay=0.1, betas=(0.8, 0.9), record=record
    )
    for step, batch in enumerate(batches):
        take(1.0 / (1 + step), *batch)
    return torch.cat([parameter.detach().cpu().flatten() for parameter in model.parameters()])


def test_steps_are_those_of_adamw_with_clipped_gradients():
    model, batches = linear_problem("cpu")
    model = model.double()
    wanted = [model[0].weight, model[2].weight, model[0].bias]
    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in wanted]
    for step, (x, y) in enumerate(batches):
        gradients = torch.autograd.grad(10.0 * (model(x.double()) - y.double()).square().mean(), wanted)
        norm = torch.sqrt(sum(g.square().sum() for g in gradients))
        with torch.no_grad():
            for p, g, (first, second), peak in zip(wanted, gradients, moments, (1e-2, 1e-2, 3e-2), strict=True):
                rate = peak / (1 + step)
                g = g / max(float(norm), 1.0)
                first.mul_(0.8).add_(0.2 * g)
                second.mul_(0.9).add_(0.1 * g * g)
                p.mul_(1.0 - 0.1 * rate)
                p -= rate * (first / (1 - 0.8 ** (step + 1))) / ((second / (1 - 0.9 ** (step + 1))).sqrt() + 1e-8)
    expected = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    torch.testing.assert_close(trained("cpu", record=False).double(), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_recorded_steps_are_the_same_steps():
    torch.testing.assert_close(trained("cuda", record=True), trained("cpu", record=False), atol=1e-4, rtol=1e-3)


def test_a_mirrored_photo_has_its_boxes_mirrored():
    import _vision_members as members

    image = torch.zeros(3, 6, 10)
    image[:, 1:3, 2:5] = 1.0
    flipped, target = members._mirrored(image, {"boxes": torch.tensor([[2.0, 1.0, 5.0, 3.0]])})
    left, top, right, bottom = target["boxes"][0].int().tolist()
    assert flipped[:, top:bottom, left:right].min() == 1.0
    assert flipped.sum() == image.sum() == 3 * (bottom - top) * (right - left)


def evidence_of(folder: Path, monkeypatch, **more):
    """The evidence with members that only write down that they ran."""
    import argparse

    import vision_evidence as evidence
    from _vision_members import Settings

    def pretend(member, data, settings):
        if settings.record and member.part == "segment":
            raise RuntimeError("no graph")
        if member.part == "classify":
            member.backbone.mkdir()
        numbers = dict.fromkeys([metric for metrics in evidence.METRICS.values() for metric in metrics], 0.5)
        return {"part": member.part, "name": member.name, "seed": member.seed, "steps": member.steps} | numbers

    monkeypatch.setattr(evidence, "run", pretend)
    monkeypatch.setattr(evidence, "_settings", lambda args: Settings("cpu", batch=4, record=True))
    empty = np.zeros((8, 1))
    fields = ("objects_train", "objects_test", "labels_train", "scenes_train", "scenes_test", "cells")
    data = argparse.Namespace(**dict.fromkeys(fields, empty), cells_test=np.zeros(8, bool))
    given = {"device": "cpu", "seeds": 2, "jobs": 3, "seconds": 60.0, "rates": [1e-3], "epochs": 1, "steps": None}
    given |= {"segment_epochs": 1, "detect_epochs": 1, "map_epochs": 1, "parts": ["map", "segment"], "out": None}
    return evidence.Evidence(argparse.Namespace(**given | more), data, folder)


def test_the_evidence_goes_on_where_it_ended_and_tries_without_graphs(tmp_path, monkeypatch):
    cut = evidence_of(tmp_path, monkeypatch, parts=["map"]).measure()
    assert {row["part"] for row in cut["rows"]} == {"classify", "map"}
    assert cut["left_out"] == []
    begun = {file: file.stat().st_mtime_ns for file in (tmp_path / "results").glob("*.json")}
    whole = evidence_of(tmp_path, monkeypatch).measure()
    assert all(file.stat().st_mtime_ns == then for file, then in begun.items())  # nothing was trained again
    scored = [(row["part"], row["name"], row["seed"]) for row in whole["rows"] if "error" not in row]
    assert len(scored) == len(set(scored)) == 6 + 8 + 6
    # Each kind is tried with a graph once per process that was under way, and ends without.
    errors = [row for row in whole["rows"] if "error" in row]
    assert {row["part"] for row in errors} == {"segment"}
    assert {row["error"] for row in errors} == {"RuntimeError: no graph"}


def test_what_has_no_backbone_or_no_time_is_left_out(tmp_path, monkeypatch):
    found = evidence_of(tmp_path, monkeypatch, seconds=0.0).measure()
    assert found["rows"] == []
    assert len(found["left_out"]) == 6 + 8 + 6


def test_a_lost_backbone_is_trained_again_only_if_something_begins_from_it(tmp_path, monkeypatch):
    import shutil

    whole = evidence_of(tmp_path, monkeypatch).measure()
    for folder in tmp_path.glob("*-[12]"):
        shutil.rmtree(folder)
    (tmp_path / "results" / "segment-convnext-2-0.0005.json").unlink()
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "results").glob("*.json")}
    again = evidence_of(tmp_path, monkeypatch).measure()
    changed = {file.name for file, then in before.items() if file.stat().st_mtime_ns != then}
    assert changed == {"classify-convnext-2-0.001.json"}
    assert len([row for row in again["rows"] if "error" not in row]) == len(
        [row for row in whole["rows"] if "error" not in row]
    )
