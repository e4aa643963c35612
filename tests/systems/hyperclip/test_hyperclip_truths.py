"""What the published transform computes, what the radius is, and what a cosine can see of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from leafward.adapters.block_scale import Scale
from leafward.encoders.scores import distances, hyperbolic_radius, radii, radius_sweep, similarity
from leafward.errors import UsageError
from leafward.geometry import poincare

CURVATURES = [0.01, 0.1, 1.0, 5.0]
EDGE = 0.999  # the authors' ball ends there


def exp0(v: np.ndarray, c: float) -> np.ndarray:
    length = np.linalg.norm(v, axis=-1, keepdims=True)
    return np.tanh(np.sqrt(c) * length) * v / (np.sqrt(c) * length)


def log0(p: np.ndarray, c: float) -> np.ndarray:
    length = np.linalg.norm(p, axis=-1, keepdims=True)
    return np.arctanh(np.sqrt(c) * length) * p / (np.sqrt(c) * length)


def mobius(matrix: np.ndarray, p: np.ndarray, c: float) -> np.ndarray:
    """The textbook Möbius matrix product, tanh(|Mp|/|p| artanh(√c|p|)) Mp / (√c|Mp|)."""
    image = p @ matrix.T
    before, after = (np.linalg.norm(x, axis=-1, keepdims=True) for x in (p, image))
    return np.tanh(after / before * np.arctanh(np.sqrt(c) * before)) * image / (np.sqrt(c) * after)


def published(rows: np.ndarray, scale: np.ndarray, c: float) -> np.ndarray:
    """exp₀, Möbius product, pulling back inside 0.999 of the ball's radius, log₀."""

    def project(p: np.ndarray) -> np.ndarray:
        length = np.linalg.norm(p, axis=-1, keepdims=True)
        return p * np.minimum(1.0, EDGE / np.sqrt(c) / length)

    return log0(project(mobius(scale, project(exp0(rows, c)), c)), c)


def dense(scale: Scale) -> np.ndarray:
    return torch.block_diag(*scale.matrix().double()).detach().numpy()


def random_scale(seed: int = 0) -> Scale:
    scale = Scale(3, 4, "free")
    torch.nn.init.normal_(scale.offset, std=0.2, generator=torch.Generator().manual_seed(seed))  # pyright: ignore
    return scale


@given(st.sampled_from(CURVATURES), st.floats(0.05, 3.0), st.integers(0, 10_000))
def test_the_mobius_transform_is_the_linear_map(c: float, length: float, seed: int) -> None:
    """log₀(S ⊗_c exp₀(w)) = S w for every c."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(5, 12))
    rows *= min(length, 3.0 / np.sqrt(c)) / np.linalg.norm(rows, axis=-1, keepdims=True)
    scale = random_scale(seed)
    ours = scale(torch.from_numpy(rows)).detach().numpy()
    np.testing.assert_allclose(ours, rows @ dense(scale).T, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(log0(mobius(dense(scale), exp0(rows, c), c), c), ours, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("c", "cap"), [(1.0, 3.80), (0.01, 38.0)])
def test_the_published_form_differs_only_by_its_clipping(c: float, cap: float) -> None:
    assert abs(np.arctanh(EDGE) / np.sqrt(c) - cap) < 0.005 * cap
    rng = np.random.default_rng(0)
    direction = rng.normal(size=(20, 12))
    direction /= np.linalg.norm(direction, axis=-1, keepdims=True)
    matrix = dense(random_scale())
    growth = np.linalg.norm(direction @ matrix.T, axis=-1, keepdims=True)
    below = 0.95 * cap * direction / np.maximum(growth, 1.0)
    np.testing.assert_allclose(published(below, matrix, c), below @ matrix.T, rtol=1e-6, atol=1e-6)
    above = 2.0 * cap * direction
    gap = np.linalg.norm(published(above, matrix, c) - above @ matrix.T, axis=-1)
    assert (gap / np.linalg.norm(above @ matrix.T, axis=-1)).min() > 0.2


def test_a_zero_row_has_finite_gradients() -> None:
    """The published product chooses 0 for a zero row, but the branch not taken is 0/0 and its gradient NaN."""
    scale = random_scale()
    scale(torch.zeros(2, 12)).sum().backward()
    assert torch.isfinite(scale.offset.grad).all()  # pyright: ignore

    matrix = torch.eye(4, requires_grad=True)
    image = torch.zeros(1, 4) @ matrix.T
    branch = torch.tanh(image.norm(dim=-1, keepdim=True)) * image / image.norm(dim=-1, keepdim=True)
    torch.where(image == 0, 0.0, branch).sum().backward()
    assert torch.isnan(matrix.grad).any()  # pyright: ignore


@pytest.mark.parametrize("constraint", ["orthogonal", "orthogonal_diagonal"])
def test_orthogonal_scales(constraint: str) -> None:
    scale = Scale(3, 6, constraint).double()  # pyright: ignore[reportArgumentType]
    generator = torch.Generator().manual_seed(0)
    for parameter in scale.parameters():
        torch.nn.init.normal_(parameter, std=0.5, generator=generator)
    matrix = scale.matrix().double()
    gram = matrix.mT @ matrix
    expected = torch.eye(6).double().expand(3, 6, 6)
    if constraint == "orthogonal_diagonal":
        expected = torch.diag_embed((1.0 + scale.gain.double()) ** 2)  # pyright: ignore  (QD)ᵀQD = D²
    torch.testing.assert_close(gram, expected, rtol=0, atol=1e-12)
    weight = torch.randn(5, 18, generator=generator).double()
    torch.testing.assert_close(scale(weight), weight @ torch.block_diag(*matrix).mT, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("constraint", ["free", "diagonal", "orthogonal", "orthogonal_diagonal"])
def test_gradients_of_scales(constraint: str) -> None:
    scale = Scale(2, 3, constraint).double()  # pyright: ignore[reportArgumentType]
    weight = torch.randn(4, 6, dtype=torch.float64, requires_grad=True, generator=torch.Generator().manual_seed(0))
    for parameter in scale.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(1))

    def apply(weight: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        names = [name for name, _ in scale.named_parameters()]
        return torch.func.functional_call(scale, dict(zip(names, parameters, strict=True)), (weight,))

    assert torch.autograd.gradcheck(apply, (weight, *scale.parameters()))


@pytest.mark.parametrize("c", CURVATURES)
def test_the_hyperbolic_radius_is_twice_the_norm(c: float) -> None:
    z = torch.randn(7, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    radius = poincare.dist0(poincare.expmap0(z, c), c)
    torch.testing.assert_close(radius, 2.0 * z.norm(dim=-1), rtol=1e-6, atol=0)
    torch.testing.assert_close(hyperbolic_radius(z).double(), radius, rtol=1e-6, atol=0)


@pytest.mark.parametrize("c", CURVATURES)
def test_distances_are_those_of_the_ball(c: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 6, generator=generator).double()
    y = torch.randn(5, 6, generator=generator).double()
    expected = poincare.dist(poincare.expmap0(x, c)[:, None], poincare.expmap0(y, c), c)
    torch.testing.assert_close(distances(x, y, c).double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(distances(x, y, None).double(), 2.0 * torch.cdist(x, y), rtol=1e-5, atol=1e-6)


def features() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(6, 8, generator=generator), torch.randn(4, 8, generator=generator)


def test_a_cosine_score_cannot_see_the_radius() -> None:
    image, text = features()
    stretched = text * torch.tensor([[0.1], [1.0], [5.0], [30.0]])
    torch.testing.assert_close(similarity(image, stretched), similarity(image, text), rtol=1e-5, atol=1e-6)
    moving = text.clone().requires_grad_()
    similarity(image, moving).square().sum().backward()
    along = (moving.grad * text).sum(dim=-1)  # pyright: ignore  derivative along the radius
    assert along.abs().max() < 1e-5


@pytest.mark.parametrize("score", ["lorentz", "cosine+radius"])
def test_the_other_scores_see_it(score: str) -> None:
    image, text = features()
    stretched = text * torch.tensor([[0.1], [1.0], [5.0], [30.0]])
    changed = similarity(image, stretched, score) - similarity(image, text, score)  # pyright: ignore
    assert changed[:, [0, 2, 3]].abs().min() > 1e-2
    assert changed[:, 1].abs().max() < 1e-5


def test_a_curvature_of_the_other_sign_is_refused() -> None:
    image, text = features()
    with pytest.raises(UsageError, match=r"c must be a positive number, got -0\.1"):
        similarity(image, text, "lorentz", c=-0.1)


def test_the_sweep_is_flat_for_the_cosine_alone() -> None:
    image, text = features()
    image = text[torch.arange(60) % 4] + 1.5 * torch.randn(60, 8, generator=torch.Generator().manual_seed(1))
    text = text * torch.tensor([[0.3], [1.0], [2.0], [4.0]])
    labels = torch.arange(60) % 4
    flat = [row["accuracy"] for row in radius_sweep(image, text, labels, [0.5, 2.0, 8.0])]
    assert len(set(flat)) == 1
    bent = [row["accuracy"] for row in radius_sweep(image, text, labels, [0.5, 2.0, 8.0, 30.0], "lorentz")]
    assert len(set(bent)) > 1


def test_summary_of_radii() -> None:
    z = torch.tensor([[3.0, 4.0], [0.0, 1.0], [0.0, 0.0]])
    summary = radii(z)
    assert (summary.count, summary.mean, summary.median) == (3, 4.0, 2.0)
    with pytest.raises(UsageError, match="features must be"):
        radii(torch.zeros(0, 4))
    with pytest.raises(UsageError, match="score must be one of cosine, lorentz"):
        similarity(z, z, "dot")  # pyright: ignore[reportArgumentType]
