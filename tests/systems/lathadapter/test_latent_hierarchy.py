"""LatHAdapter: refinement without NaN, triplets with real negatives, the hierarchy loss against loops."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import normalize

from leafward.adapters import adapters, attach, from_pretrained, merge, save_pretrained
from leafward.config import checked
from leafward.encoders.scores import distances
from leafward.errors import UsageError
from leafward.systems.lathadapter import LatentHierarchyConfig
from leafward.systems.lathadapter.attributes import (
    Classifier,
    LatentHierarchy,
    hierarchy_loss,
    initial_attributes,
    reciprocal_neighbours,
    refine,
    sample_triplets,
)
from leafward.systems.lathadapter.prompts import Coop, FeaturePrompts, ZeroShot

CLASSES, WIDTH = 6, 16


def data(batch: int = 8, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Images, labels and classes: noisy copies of random class features."""
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randn(CLASSES, WIDTH, generator=generator)
    labels = torch.randint(CLASSES, (batch,), generator=generator)
    return classes[labels] + 0.5 * torch.randn(batch, WIDTH, generator=generator), labels, classes


def host(**options) -> Coop:
    torch.manual_seed(0)
    model = Coop(FeaturePrompts(WIDTH), data()[2])
    return attach(model, LatentHierarchyConfig(**{"attributes": 8, **options}))


def latent(model: nn.Module) -> LatentHierarchy:
    adapter = adapters(model)["default"]
    assert isinstance(adapter, LatentHierarchy)
    return adapter


def plain_refine(classes: Tensor, attributes: Tensor, strength: float) -> Tensor:
    """The paper's form, with signed affinities."""
    both = torch.cat([classes, attributes])
    affinity = normalize(both, dim=-1) @ normalize(both, dim=-1).mT
    root = torch.diag(affinity.sum(dim=1).pow(-0.5))
    return (both + strength * root @ affinity @ root @ both)[: len(classes)]


def loop_refine(classes: np.ndarray, attributes: np.ndarray, strength: float) -> np.ndarray:
    both = np.concatenate([classes, attributes])
    n = len(both)
    s = np.array(
        [[max(0.0, a @ b / np.linalg.norm(a) / np.linalg.norm(b)) for b in both] for a in both], dtype=np.float64
    )
    d = s.sum(axis=1)
    out = [both[i] + strength * sum(s[i, j] / np.sqrt(d[i] * d[j]) * both[j] for j in range(n)) for i in range(n)]
    return np.array(out[: len(classes)])


# ATR


def test_refinement_against_loops() -> None:
    _, _, classes = data()
    attributes = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))
    expected = loop_refine(classes.double().numpy(), attributes.double().numpy(), 0.1)
    np.testing.assert_allclose(refine(classes, attributes, 0.1).numpy(), expected, rtol=1e-5, atol=1e-6)


def test_a_class_that_is_added_moves_the_others() -> None:
    """Refinement looks at the whole list, so that classes must be refined together, as they are offered."""
    classes, attributes = torch.rand(6, 8), torch.rand(4, 8)
    fewer, more = refine(classes[:5], attributes, 0.1), refine(classes, attributes, 0.1)[:5]
    assert 1e-4 < float((fewer - more).abs().max()) < 0.1


def test_signed_affinities_give_nan_and_ours_do_not() -> None:
    """Random normal attributes: some degree is negative, and its root NaN."""
    _, _, classes = data()
    seen = 0
    for seed in range(20):
        attributes = torch.randn(20, WIDTH, generator=torch.Generator().manual_seed(seed))
        seen += int(plain_refine(classes, attributes, 0.1).isnan().any())
        assert refine(classes, attributes, 0.1).isfinite().all()
    assert seen >= 10


@pytest.mark.parametrize("count", [1, 5])
def test_opposed_attributes_do_not_touch_the_classes(count: int) -> None:
    """Classes around a common mean and attributes against it: signed degrees are negative, ours know no opposition."""
    generator = torch.Generator().manual_seed(0)
    classes = normalize(torch.ones(WIDTH) + 0.7 * torch.randn(CLASSES, WIDTH, generator=generator), dim=-1)
    attributes = -classes.mean(dim=0).expand(count, -1)
    assert plain_refine(classes, attributes, 0.1).isnan().any()
    torch.testing.assert_close(refine(classes, attributes, 0.1), refine(classes, attributes[:0], 0.1))
    before, after = (normalize(text, dim=-1) for text in (classes, refine(classes, attributes, 0.1)))
    assert (after @ after.mT - before @ before.mT).abs().max() < 0.1  # they do not collapse


@given(st.integers(0, 1000), st.floats(0, 1), st.booleans())
def test_refinement_is_finite_with_finite_gradients(seed: int, strength: float, opposed: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randn(3, 4, generator=generator).requires_grad_()
    attributes = -classes.detach().clone() if opposed else torch.zeros(2, 4)  # a zero vector has no affinity at all
    attributes.requires_grad_()
    refined = refine(classes, attributes, strength)
    refined.square().sum().backward()
    assert refined.isfinite().all()
    assert classes.grad.isfinite().all()  # pyright: ignore
    assert attributes.grad.isfinite().all()  # pyright: ignore


def test_attributes_begin_between_classes() -> None:
    _, _, classes = data()
    attributes = initial_attributes(classes, 40, seed=3)
    means = 0.5 * (classes[:, None] + classes)
    gaps = (attributes[:, None, None] - means).norm(dim=-1)
    i, j = np.unravel_index(gaps.flatten(1).argmin(dim=1).numpy(), (CLASSES, CLASSES))
    assert gaps.flatten(1).min(dim=1).values.max() < 1e-6
    assert (i != j).all()
    torch.testing.assert_close(initial_attributes(classes, 40, seed=3), attributes)
    assert initial_attributes(classes[:1], 4, seed=0).isfinite().all()


# Triplets


def loop_neighbours(points: np.ndarray, k: int) -> np.ndarray:
    n = len(points)
    gaps = [[np.linalg.norm(points[i] - points[j]) if i != j else np.inf for j in range(n)] for i in range(n)]
    near = [set(np.argsort(row)[:k]) for row in gaps]
    return np.array([[i != j and j in near[i] and i in near[j] for j in range(n)] for i in range(n)])


@given(st.integers(0, 1000), st.integers(5, 14), st.integers(1, 4))
def test_reciprocal_neighbours_against_loops(seed: int, count: int, k: int) -> None:
    points = torch.randn(count + 3, 5, generator=torch.Generator().manual_seed(seed))
    used = torch.arange(count + 3) < count
    found = reciprocal_neighbours(points, used, k)
    np.testing.assert_array_equal(found[:count, :count].numpy(), loop_neighbours(points[:count].double().numpy(), k))
    assert not found[count:].any()
    assert not found[:, count:].any()


def test_a_batch_of_four_has_no_real_negative() -> None:
    """Both defects of the plain form: with itself counted the anchor is its own negative, without it nobody is."""
    points = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    gaps = torch.cdist(points, points)
    counted = torch.zeros(4, 4, dtype=torch.bool).scatter(1, gaps.topk(3, largest=False).indices, True)
    positive = counted & counted.mT & ~torch.eye(4, dtype=torch.bool)
    negative = ~positive  # the published set, which holds the diagonal
    assert negative.diagonal().all()
    assert float(negative.diagonal().sum() / negative.sum()) >= 1 / 3

    _, valid = sample_triplets(points, torch.ones(4, dtype=torch.bool), k=3, count=10)
    assert not valid.any()


def test_the_queue_gives_a_batch_of_four_real_negatives() -> None:
    points = torch.randn(4 + 40, 8, generator=torch.Generator().manual_seed(0))
    used = torch.arange(44) < 4 + 30
    torch.manual_seed(0)
    triplets, valid = sample_triplets(points, used, k=3, count=50, anchors=4)
    assert valid.any()
    anchor, positive, negative = triplets[valid].T
    near = reciprocal_neighbours(points, used, 3)
    assert near[anchor, positive].all()
    assert not near[anchor, negative].any()
    assert (anchor != negative).all()
    assert used[negative].all()
    assert len(negative.unique()) > 10


# HHL


def loop_loss(gaps: np.ndarray, triplets: np.ndarray, margin: float) -> float:
    """Lowest common ancestor: the nearest to the farthest of the leaves."""
    total = 0.0
    for i, j, k in triplets:
        pair = np.argmin(np.maximum(gaps[i], gaps[j]))
        triple = np.argmin(np.maximum(np.maximum(gaps[i], gaps[j]), gaps[k]))
        if pair == triple:
            continue
        total += max(gaps[i, pair] - gaps[i, triple] + margin, 0)
        total += max(gaps[j, pair] - gaps[j, triple] + margin, 0)
        total += max(gaps[k, triple] - gaps[k, pair] + margin, 0)
    return total / len(triplets)


def test_hierarchy_loss_against_loops() -> None:
    """At a low temperature the Gumbel noise cannot change the choice."""
    generator = torch.Generator().manual_seed(0)
    gaps = torch.rand(12, 7, generator=generator)
    triplets = torch.stack([torch.randperm(12, generator=generator)[:3] for _ in range(60)])
    valid = torch.ones(60, dtype=torch.bool)
    torch.manual_seed(0)
    loss = hierarchy_loss(gaps, triplets, valid, temperature=1e-6, margin=0.1)
    assert float(loss) == pytest.approx(loop_loss(gaps.numpy(), triplets.numpy(), 0.1), rel=1e-5)
    half = torch.arange(60) < 30
    torch.manual_seed(0)
    loss = hierarchy_loss(gaps, triplets, half, temperature=1e-6, margin=0.1)
    assert float(loss) == pytest.approx(loop_loss(gaps.numpy(), triplets[:30].numpy(), 0.1), rel=1e-5)
    assert float(hierarchy_loss(gaps, triplets, ~valid, 0.1, 0.1)) == 0.0


def test_hierarchy_loss_reaches_leaves_and_ancestors() -> None:
    generator = torch.Generator().manual_seed(0)
    leaves = torch.randn(12, 5, generator=generator).requires_grad_()
    ancestors = torch.randn(6, 5, generator=generator).requires_grad_()
    triplets = torch.stack([torch.randperm(12, generator=generator)[:3] for _ in range(40)])
    torch.manual_seed(0)
    hierarchy_loss(distances(leaves, ancestors, 0.1), triplets, torch.ones(40).bool(), 0.1, 0.1).backward()
    assert leaves.grad.abs().max() > 0  # pyright: ignore
    assert (ancestors.grad.abs().sum(dim=1) > 0).all()  # pyright: ignore  straight-through: also those not chosen


# The module


def test_unit_features_make_the_distance_a_function_of_the_cosine() -> None:
    """cos 0.20 -> 0.30 is 10 in cos/τ and 0.16 in the distance; raw norms let the radius speak."""
    x = torch.tensor([[1.0, 0.0]])
    y = torch.tensor([[0.2, (1 - 0.04) ** 0.5], [0.3, (1 - 0.09) ** 0.5]])
    gap = distances(x, y, 0.1)[0]
    assert float(gap[0] - gap[1]) == pytest.approx(0.16, abs=0.01)
    raw = distances(10 * x, torch.cat([10 * y, 2 * y]), 0.1)[0]
    assert float(raw[0] - raw[1]) == pytest.approx(0.42, abs=0.02)
    assert abs(float(raw[0] - raw[2])) > 1.0  # the same cosine, another radius

    images, _, classes = data()
    unit = latent(host())
    norms = torch.tensor([1.0, 2.0, 3.0, 0.5, 1.0, 4.0])[:, None]
    torch.testing.assert_close(unit._distances(images, classes), unit._distances(images, norms * classes))
    raw_host = latent(host(normalise=False))
    assert (raw_host._distances(images, classes) - raw_host._distances(images, norms * classes)).abs().max() > 0.5


def test_logits_and_losses() -> None:
    images, labels, classes = data()
    model = host()
    torch.manual_seed(1)
    output = model(images, labels)
    adapter = latent(model)
    refined = refine(classes, adapter.attributes, 0.1)
    far = distances(normalize(images, dim=-1), normalize(refined, dim=-1), 0.1)
    similar = 100 * normalize(images, dim=-1) @ normalize(refined, dim=-1).mT
    torch.testing.assert_close(output.logits, similar - far, rtol=1e-4, atol=1e-4)
    assert set(output.losses) == {"cross_entropy", "distance_entropy", "image_attribute", "attribute_class"}
    expected = nn.functional.cross_entropy(similar, labels) + nn.functional.cross_entropy(-far, labels)
    hierarchy = output.losses["image_attribute"] + output.losses["attribute_class"]
    torch.testing.assert_close(output.loss, expected + hierarchy, rtol=1e-4, atol=1e-4)
    assert output.losses["attribute_class"].item() > 0
    assert not model(images).losses


@pytest.mark.parametrize("adapted", [False, True])
def test_a_classifier_with_fixed_classes_gives_the_same_logits(adapted: bool) -> None:
    images, _, classes = data()
    model = host() if adapted else Coop(FeaturePrompts(WIDTH), classes)
    model.eval()
    torch.testing.assert_close(Classifier(model)(images), model(images).logits)
    torch.testing.assert_close(Classifier(model, classes[:3])(images), model(images, classes=classes[:3]).logits)


def test_the_queue_fills_in_training_only() -> None:
    model = host(queue=20)
    adapter = latent(model)
    images, labels, _ = data()
    first = None
    for expected in (8, 16, 20):
        output = model(images + expected, labels)
        first = output.image if first is None else first
        assert int(adapter.filled) == expected
    torch.testing.assert_close(adapter.queue[:8], normalize(output.image, dim=-1).detach())
    torch.testing.assert_close(adapter.queue[16:], normalize(first, dim=-1).detach()[:4])  # pyright: ignore
    model.eval()
    before = adapter.queue.clone()
    model(images, labels)
    model.train()(images)
    torch.testing.assert_close(adapter.queue, before, rtol=0, atol=0)


def test_the_twin_has_the_same_parameters() -> None:
    hyperbolic, flat = host(), host(geometry="euclidean")
    shapes = [{name: p.shape for name, p in model.named_parameters()} for model in (hyperbolic, flat)]
    assert shapes[0] == shapes[1]
    images, _, _ = data()
    assert (hyperbolic(images).logits - flat(images).logits).abs().max() > 1e-3


@pytest.mark.parametrize("geometry", ["lorentz", "euclidean"])
@pytest.mark.parametrize("normalise", [True, False])
def test_training_lowers_the_loss_and_moves_attributes(geometry: str, normalise: bool) -> None:
    images, labels, _ = data(32)
    model = host(geometry=geometry, normalise=normalise)
    start = latent(model).attributes.detach().clone()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    torch.manual_seed(0)
    losses = []
    for _ in range(60):
        loss = model(images, labels).loss
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert np.mean(losses[-5:]) < 0.95 * np.mean(losses[:5])
    assert (latent(model).attributes - start).abs().max() > 0.01


def test_gradients_are_finite_where_an_image_is_an_attribute() -> None:
    model = host()
    adapter = latent(model)
    _, _, classes = data()
    with torch.no_grad():
        adapter.attributes[:CLASSES].copy_(classes)
    images = classes.clone().requires_grad_()
    model(images, torch.arange(CLASSES)).loss.backward()
    assert images.grad.isfinite().all()  # pyright: ignore
    assert adapter.attributes.grad.isfinite().all()  # pyright: ignore


def test_half_precision_features_are_measured_in_float32() -> None:
    images, labels, _ = data()
    model = host()
    wide = model(images).logits
    narrow = model(images.bfloat16().float()).logits
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = distances(images.bfloat16(), model.classes, 0.1)
    torch.testing.assert_close(cast, distances(images.bfloat16().float(), model.classes, 0.1), rtol=1e-5, atol=1e-5)
    assert (wide - narrow).abs().max() < 2.0
    assert labels.shape == (8,)


def test_round_trip_and_refusals(tmp_path: Path) -> None:
    model = host(attributes=7)
    with torch.no_grad():
        latent(model).attributes.add_(0.3)
    save_pretrained(model, tmp_path)
    torch.manual_seed(0)
    fresh = Coop(FeaturePrompts(WIDTH), data()[2])
    from_pretrained(fresh, tmp_path)
    images, _, _ = data()
    torch.testing.assert_close(fresh(images).logits, model(images).logits, rtol=0, atol=0)
    assert any(p.requires_grad for p in fresh.encoder.parameters())

    with pytest.raises(UsageError, match="cannot be merged"):
        merge(copy.deepcopy(model))
    with pytest.raises(UsageError, match="of class 'Coop', not 'ZeroShot'"):
        from_pretrained(ZeroShot(data()[2]), tmp_path)
    with pytest.raises(UsageError, match="host, not on a Linear"):
        attach(nn.Linear(2, 2), LatentHierarchyConfig())
    for options, message in [
        ({"attributes": 1}, "attributes must be an integer ≥ 2"),
        ({"attributes": 4.5}, "attributes must be an integer ≥ 2, got 4.5"),
        ({"neighbours": True}, "neighbours must be an integer ≥ 1, got True"),
        ({"c": "small"}, "c must be a finite number > 0, got 'small'"),
        ({"margin": float("nan")}, "margin must be a finite number ≥ 0, got nan"),
        ({"normalise": 2}, "normalise must be true or false, got 2"),
        ({"c": 0.0}, "c must be a finite number > 0"),
        ({"margin": -1.0}, "margin must be a finite number ≥ 0"),
        ({"geometry": "flat"}, "geometry must be"),
        ({"queue": -1}, "queue must be"),
    ]:
        with pytest.raises(UsageError, match=message):
            checked(LatentHierarchyConfig, options)
