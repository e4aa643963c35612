"""Printed forms, switches, learned curvature, and what is computed where there are many classes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from leafward.adapters import adapters, attach
from leafward.errors import UsageError
from leafward.systems.lathadapter import LatentHierarchyConfig
from leafward.systems.lathadapter.attributes import hierarchy_loss, refine
from leafward.systems.lathadapter.prompts import Coop, FeaturePrompts, Host

CLASSES, WIDTH = 5, 12
TEXTS = Path(__file__).parents[4] / "shared" / "data" / "clip_vitb32_features" / "detic_text_lvis_v1.npy"


def data() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    classes = torch.randn(CLASSES, WIDTH, generator=generator)
    labels = torch.arange(20) % CLASSES
    return classes[labels] + 0.8 * torch.randn(20, WIDTH, generator=generator), labels, classes


def host(**options: Any) -> Host:
    torch.manual_seed(0)
    return attach(Coop(FeaturePrompts(WIDTH), data()[2]), LatentHierarchyConfig(attributes=4, queue=8, **options))


def test_the_degree_as_printed_sums_over_the_classes() -> None:
    _, _, classes = data()
    attributes = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))
    both = torch.cat([classes, attributes]).double().numpy()
    unit = both / np.linalg.norm(both, axis=1, keepdims=True)
    s = np.maximum(unit @ unit.T, 0)
    root = np.diag(s[:, :CLASSES].sum(axis=1) ** -0.5)
    expected = (both + 0.1 * root @ s @ root @ both)[:CLASSES]
    found = refine(classes, attributes, 0.1, degree="classes")
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5, atol=1e-5)
    assert (found - refine(classes, attributes, 0.1)).abs().max() > 1e-3


def test_the_choice_as_printed_has_no_temperature() -> None:
    """Over exp(−max d) with Gumbel noise: the share of each ancestor follows from the softmax of that."""
    gaps = torch.tensor([[0.2, 1.5], [0.3, 1.0], [2.0, 0.1]])
    triplets = torch.tensor([[0, 1, 2]]).expand(40_000, 3)
    valid = torch.ones(len(triplets), dtype=torch.bool)
    pair = torch.tensor([0.3, 1.5]).neg().exp().softmax(0)
    triple = torch.tensor([2.0, 1.5]).neg().exp().softmax(0)
    expected = 0.0
    for a, b in ((0, 1), (1, 0)):
        terms = [gaps[0, a] - gaps[0, b] + 0.1, gaps[1, a] - gaps[1, b] + 0.1, gaps[2, b] - gaps[2, a] + 0.1]
        expected += float(pair[a] * triple[b] * sum(max(float(x), 0.0) for x in terms))
    torch.manual_seed(0)
    assert float(hierarchy_loss(gaps, triplets, valid, None, 0.1)) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("left", ["cross_entropy", "distance_entropy", "image_attribute", "attribute_class"])
def test_each_loss_is_a_switch(left: str) -> None:
    images, labels, _ = data()
    assert set(host(terms=(left,))(images, labels).losses) == {left}
    with pytest.raises(UsageError, match="terms"):
        host(terms=())


def test_a_learned_curvature_moves_and_is_kept() -> None:
    images, labels, _ = data()
    model = host(learn_c=True, terms=("distance_entropy",))
    adapter: Any = adapters(model)["default"]
    assert adapter.curvature.item() == pytest.approx(0.1)
    torch.testing.assert_close(model(images).logits, host()(images).logits)
    optimizer = torch.optim.Adam([adapter.learned.theta], lr=0.1)
    first = model(images, labels).loss
    for _ in range(10):
        optimizer.zero_grad()
        model(images, labels).loss.backward()
        optimizer.step()
    assert model(images, labels).loss < first
    assert abs(adapter.curvature.item() - 0.1) > 1e-3
    again = host(learn_c=True)
    again.load_state_dict(model.state_dict())
    torch.testing.assert_close(again(images).logits, model(images).logits)
    assert not any("learned" in name for name in host(learn_c=True, geometry="euclidean").state_dict())


def test_groups_of_one_class_are_the_exact_refinement() -> None:
    """With classes in tight groups every affinity is that to the mean of the group."""
    generator = torch.Generator().manual_seed(2)
    centres = torch.randn(4, WIDTH, generator=generator).double()
    classes = centres[torch.arange(40) // 10]
    attributes = torch.randn(3, WIDTH, generator=generator).double()
    for degree in ("all", "classes"):
        exact = refine(classes, attributes, 0.3, degree=degree)
        torch.testing.assert_close(refine(classes, attributes, 0.3, degree=degree, groups=4), exact)


@pytest.mark.skipif(not TEXTS.is_file(), reason=f"{TEXTS} is not there")
def test_the_error_of_groups_on_real_texts() -> None:
    texts = torch.from_numpy(np.load(TEXTS).astype(np.float32))
    attributes = 0.5 * (texts[:20] + texts[20:40])
    exact = refine(texts, attributes, 0.1)
    change = (exact - texts).norm(dim=1).mean()
    error = (refine(texts, attributes, 0.1, groups=8) - exact).norm(dim=1).mean() / change
    assert error < 0.01  # docs/lathadapter.md has .5 %


@pytest.mark.parametrize("options", [{}, {"normalise": False}, {"geometry": "euclidean"}])
def test_logits_of_many_classes_are_those_of_few(options: dict[str, Any]) -> None:
    """From one product of the features; what is drawn and grouped is left out (β = 0, no hierarchy loss)."""
    images, labels, _ = data()
    left_out = {"refinement": 0.0, "hierarchy_weight": 0.0} | options
    few, many = host(**left_out)(images, labels), host(**left_out, exact=2, groups=1)(images, labels)
    torch.testing.assert_close(many.logits, few.logits, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(many.loss, few.loss, rtol=1e-5, atol=1e-5)


def test_ten_thousand_classes_without_a_table_of_their_pairs() -> None:
    """Steps grow with the classes, not with their pairs: ten thousand in well under the time of the exact ones."""
    generator = torch.Generator().manual_seed(3)
    classes = torch.randn(10_000, 64, generator=generator)
    images, labels = torch.randn(8, 64, generator=generator), torch.arange(8)

    def step(exact: int) -> float:
        torch.manual_seed(0)
        config = LatentHierarchyConfig(attributes=8, exact=exact, queue=16)
        model = attach(Coop(FeaturePrompts(64), classes), config)
        start = time.process_time()
        output = model(images, labels)
        output.loss.backward()
        assert bool(output.loss.isfinite())
        return time.process_time() - start

    step(2048)
    assert step(2048) < 0.2 * step(10_000)


@pytest.mark.full
def test_a_step_of_ten_thousand_classes_takes_at_most_three_of_its_host() -> None:
    generator = torch.Generator().manual_seed(3)
    classes = 3.0 * torch.randn(10_000, 512, generator=generator)
    images, labels = torch.randn(32, 512, generator=generator), torch.arange(32)
    alone = Coop(FeaturePrompts(512), classes)
    adapted = attach(Coop(FeaturePrompts(512), classes), LatentHierarchyConfig())
    spent: dict[Host, list[float]] = {alone: [], adapted: []}
    for _ in range(12):  # in turns, so that what else the machine does meets both
        for model, times in spent.items():
            model.zero_grad()
            start = time.process_time()
            model(images, labels).loss.backward()
            times.append(time.process_time() - start)
    ratio = min(spent[adapted]) / min(spent[alone])
    print(f"{1e3 * min(spent[alone]):.0f} ms alone, {1e3 * min(spent[adapted]):.0f} ms with LatHAdapter, {ratio:.2f}")
    assert ratio < 3.0
