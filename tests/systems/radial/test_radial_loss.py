"""Radial Embedding's losses against their definitions in float64, and their gradients where definitions break down."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from leafward.config import checked
from leafward.errors import UsageError
from leafward.systems.radial import RadialConfig
from leafward.systems.radial.loss import Triples, angle_contrast, cone_loss, exterior_angle, pull, radial_loss, radius


def units(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.functional.normalize(torch.randn(*shape, generator=generator, dtype=torch.float64), dim=-1)


def plain_angle(general: np.ndarray, other: np.ndarray, root: np.ndarray) -> float:
    """Ξ_r by the arc cosine, one pair at a time."""
    a, b = general - root, other - general
    return math.acos(np.dot(a, b) / (np.linalg.norm(a) * np.linalg.norm(b)))


def triples_of(chains: torch.Tensor, wrong: torch.Tensor, root: torch.Tensor) -> Triples:
    """Chains and negatives (B, 4, d): the pairs (i, i+1) with the negatives i = 0 … 2 of the authors."""
    flat = [part[:, :3].transpose(0, 1).reshape(-1, chains.shape[-1]) for part in (chains, chains[:, 1:], wrong)]
    return Triples(flat[0], flat[1], flat[2], root.expand_as(flat[0]))


def test_loss_is_the_authors():
    chains, wrong, frozen, root = units(8, 4, 16), units(8, 4, 16, seed=1), units(8, 8, 16, seed=2), units(16, seed=3)
    texts = torch.cat([chains, wrong], dim=1)
    positive, negative = np.zeros((3, 8)), np.zeros((3, 8))
    for b in range(8):
        for i in range(3):
            positive[i, b] = plain_angle(chains[b, i].numpy(), chains[b, i + 1].numpy(), root.numpy())
            negative[i, b] = plain_angle(chains[b, i].numpy(), wrong[b, i].numpy(), root.numpy())
    gap = (positive - negative).ravel()
    worst = gap[positive.argmax()] + gap[negative.argmin()]
    held = np.mean([(1 - float(e @ f)) / 2 for e, f in zip(texts.view(-1, 16), frozen.view(-1, 16), strict=True)])
    expected = 10 * held + positive.mean() - negative.mean() + worst
    terms = radial_loss(triples_of(chains, wrong, root), texts.view(-1, 16), frozen.view(-1, 16), RadialConfig())
    assert float(terms.total) == pytest.approx(expected, abs=1e-12)
    assert float(terms.contrast) == pytest.approx(positive.mean() - negative.mean(), abs=1e-12)
    assert float(terms.hardest) == pytest.approx(worst, abs=1e-12)


def test_last_negative_is_in_the_pull_alone():
    chains, wrong, root = units(2, 4, 8), units(2, 4, 8, seed=1).requires_grad_(), units(8, seed=3)
    triples = triples_of(chains, wrong, root)
    texts = torch.cat([chains, wrong], dim=1).view(-1, 8)
    terms = radial_loss(triples, texts, texts.detach().roll(1, 0), RadialConfig())
    (by_angles,) = torch.autograd.grad(terms.contrast + terms.hardest, wrong, retain_graph=True)
    (by_pull,) = torch.autograd.grad(terms.pull, wrong)
    assert (by_angles[:, 3] == 0).all()
    assert (by_pull[:, 3] != 0).any()


def test_hyperbolic_angle_by_the_law_of_cosines():
    general, other, root = units(20, 6), units(20, 6, seed=1), units(20, 6, seed=2)
    found = exterior_angle(general, other, root, "lorentz", c=1.0)
    for e, o, r, angle in zip(general, other, root, found, strict=True):
        x, y = e - r, o - r  # tangent vectors at the origin
        a, side = float(x.norm()), float(y.norm())
        between = math.acos(float(x @ y) / (a * side))
        cosh_b = math.cosh(a) * math.cosh(side) - math.sinh(a) * math.sinh(side) * math.cos(between)
        inner = (math.cosh(a) * cosh_b - math.cosh(side)) / (math.sinh(a) * math.sqrt(cosh_b**2 - 1))
        assert float(angle) == pytest.approx(math.pi - math.acos(inner), abs=1e-9)


def test_hyperbolic_angles_are_flat_for_small_curvature():
    general, other, root = units(20, 6), units(20, 6, seed=1), units(20, 6, seed=2)
    flat = exterior_angle(general, other, root)
    torch.testing.assert_close(exterior_angle(general, other, root, "lorentz", c=1e-8), flat, atol=1e-6, rtol=0)
    torch.testing.assert_close(radius(general, root), (general - root).norm(dim=-1))


@pytest.mark.parametrize("geometry", ["euclidean", "lorentz"])
def test_cone_loss_by_hand(geometry):
    config = RadialConfig(loss="cone", geometry=geometry, aperture=0.3, margin=0.2)
    chains, wrong, root = units(5, 4, 6), units(5, 4, 6, seed=1), units(6, seed=2)
    triples = triples_of(chains, wrong, root)
    outside, inside = [], []
    for e, s, n, r in zip(*triples, strict=True):
        length = float((e - r).norm())
        half = math.asin(min(1.0, 0.3 / length if geometry == "euclidean" else 0.6 / math.sinh(length)))
        up = float(exterior_angle(e, s, r, geometry)) - half
        down = float(exterior_angle(e, n, r, geometry)) - half
        outside.append(max(0.0, up))
        inside.append(max(0.0, 0.2 - max(0.0, down)))
    assert float(cone_loss(triples, config)) == pytest.approx(np.mean(outside) + np.mean(inside), abs=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("geometry", ["euclidean", "lorentz"])
@pytest.mark.parametrize("loss", ["radial", "cone"])
def test_gradients_are_finite_where_definitions_break(loss, geometry, dtype):
    """A text equal to the root, equal texts, and texts on one line with the root, either way round."""
    root = units(8)[None].to(dtype)
    away = units(8, seed=1)[None].to(dtype)
    cases = torch.cat([root, away, away, root + 0.5 * away, root - 0.5 * away, root + 1e-20 * away])
    pairs = torch.cartesian_prod(torch.arange(6), torch.arange(6), torch.arange(6))
    leaf = cases.clone().requires_grad_()
    centre = root.clone().requires_grad_()
    triples = Triples(*(leaf[pairs[:, k]] for k in range(3)), root=centre.expand(len(pairs), -1))
    config = RadialConfig(loss=loss, geometry=geometry)
    total = radial_loss(triples, leaf, leaf.detach(), config).total
    grads = torch.autograd.grad(total, (leaf, centre))
    assert torch.isfinite(total)
    assert all(torch.isfinite(grad).all() for grad in grads)


def test_plain_arc_cosine_does_break_there():
    """What the test above guards against."""
    root = units(8)
    text = root.clone().requires_grad_()
    a, b = text - root, units(8, seed=1) - text
    cosine = (a * b).sum() / (a.norm() * b.norm())
    (grad,) = torch.autograd.grad(cosine.clip(-1, 1).acos(), text)
    assert not torch.isfinite(grad).all()


def test_pull_of_equal_vectors_is_zero_and_of_opposite_ones_one():
    vectors = units(4, 8)
    assert float(pull(vectors, vectors)) == pytest.approx(0.0, abs=1e-15)
    assert float(pull(vectors, -vectors)) == pytest.approx(1.0)


def test_hardest_pairs_are_the_widest_positive_and_the_narrowest_negative():
    mean, hardest = angle_contrast(torch.tensor([1.0, 3.0, 2.0]), torch.tensor([0.5, 1.0, 0.1]))
    assert float(mean) == pytest.approx(2.0 - 1.6 / 3)
    assert float(hardest) == pytest.approx((3.0 - 1.0) + (2.0 - 0.1))


@pytest.mark.parametrize(
    "wrong", [{"loss": "rad"}, {"geometry": "flat"}, {"pull": -1.0}, {"c": 0.0}, {"margin": math.nan}, {"root": "x"}]
)
def test_bad_settings_are_refused_by_name(wrong):
    with pytest.raises(UsageError, match=next(iter(wrong))):
        checked(RadialConfig, wrong)
