"""The tree of Hi-Mapper and what teaches it: distributions against closed forms, losses against brute force."""

import math
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence

from leafward.config import checked, to_dict
from leafward.errors import UsageError
from leafward.geometry import Curvature, Euclidean, Lorentz, Manifold
from leafward.systems.himapper.config import Config, Losses
from leafward.systems.himapper.losses import HierarchyLosses
from leafward.systems.himapper.losses.contrast import HierarchyContrast
from leafward.systems.himapper.mapper import CURVATURE_BOUNDS, HierarchyMapper
from leafward.systems.himapper.tree import GaussianTree, TreeShape


def random_tree(mixture: str = "sample", leaves: int = 8, levels: int = 3, dim: int = 5) -> GaussianTree:
    tree = GaussianTree(TreeShape(leaves, levels), dim, mixture)
    with torch.no_grad():
        tree.mean.normal_()
        tree.log_variance.normal_()
    return tree


@pytest.mark.parametrize(("leaves", "levels"), [(12, 4), (4, 4), (0, 2), (7, 2)])
def test_leaves_that_do_not_divide_are_refused(leaves: int, levels: int) -> None:
    with pytest.raises(UsageError, match=rf"multiple of 2\^\(levels − 1\) = {2 ** (levels - 1)}.*got {leaves} leaves"):
        TreeShape(leaves, levels)


def test_a_single_level_is_no_tree() -> None:
    with pytest.raises(UsageError, match="levels must be at least 2, got 1"):
        TreeShape(8, 1)


@pytest.mark.parametrize(("name", "value"), [("leaves", 8.0), ("leaves", "8"), ("levels", 2.5)])
def test_sizes_that_are_no_integers_are_refused(name: str, value: object) -> None:
    with pytest.raises(UsageError, match=rf"{name} must be an integer, got {value!r}"):
        TreeShape(**{"leaves": 8, "levels": 2} | {name: value})  # pyright: ignore[reportArgumentType]


def test_the_paper_s_shape() -> None:
    assert TreeShape(32, 4).sizes == (32, 16, 8, 4)
    assert TreeShape(32, 4).nodes == 60


def test_parents_and_levels() -> None:
    shape = TreeShape(12, 3)  # the width is free: three nodes at the top
    assert shape.sizes == (12, 6, 3)
    assert shape.parents().tolist() == [12, 12, 13, 13, 14, 14, 15, 15, 16, 16, 17, 17, 18, 18, 19, 19, 20, 20]
    assert shape.level_of().tolist() == [0] * 12 + [1] * 6 + [2] * 3


def test_moments_are_those_of_the_mixture_of_all_leaves_below() -> None:
    tree = random_tree().double()
    for level, (mean, variance) in enumerate(tree.gaussians()):
        leaf_mean = tree.mean.detach().unflatten(0, (-1, 2**level))
        square = tree.log_variance.detach().exp().unflatten(0, (-1, 2**level)) + leaf_mean**2
        torch.testing.assert_close(mean, leaf_mean.mean(dim=1))
        torch.testing.assert_close(variance, square.mean(dim=1) - leaf_mean.mean(dim=1) ** 2)


def test_half_precision_keeps_the_variance_where_the_textbook_form_loses_it() -> None:
    tree = random_tree("moments").half()
    with torch.no_grad():
        tree.mean.fill_(30.0)
        tree.log_variance.fill_(-8.0)
        mean, variance = tree.mean[0:2], tree.log_variance[0:2].exp()
    textbook = (variance + mean.square()).mean(dim=0) - mean.mean(dim=0).square()
    assert (textbook <= 0).all()  # whose logarithm is not finite
    for _, kept in tree.gaussians():
        torch.testing.assert_close(kept, torch.full_like(kept, math.exp(-8.0)))
    tree.kl().backward()
    assert tree.kl().isfinite()
    assert tree.mean.grad is not None
    assert tree.log_variance.grad is not None
    assert tree.mean.grad.isfinite().all()
    assert tree.log_variance.grad.isfinite().all()
    assert tree.train()(2).values.dtype == torch.float16


@pytest.mark.parametrize("mixture", ["sample", "moments"])
def test_samples_have_the_moments_of_their_node(mixture: str) -> None:
    tree = random_tree(mixture, dim=2).train()
    samples = tree(20_000).values.detach().unflatten(1, (3, 8))
    for level, (mean, variance) in enumerate(tree.gaussians()):
        drawn = samples[:, level].unflatten(1, (-1, 2**level)).transpose(1, 2).flatten(0, 1)  # (images·samples, n, d)
        spread = variance.detach().sqrt()
        assert ((drawn.mean(dim=0) - mean.detach()) / spread).abs().max() < 0.05
        assert (drawn.std(dim=0) / spread - 1.0).abs().max() < 0.05


def test_only_the_sampled_mixture_has_two_humps() -> None:
    for mixture, share in (("sample", 0.0), ("moments", 0.68)):
        tree = random_tree(mixture, leaves=2, levels=2, dim=1).train()
        with torch.no_grad():
            tree.mean.copy_(torch.tensor([[-5.0], [5.0]]))
            tree.log_variance.fill_(-4.0)
        upper = tree(4000).values[:, 2:]
        assert (upper.abs() < 4.0).float().mean().item() == pytest.approx(share, abs=0.12)


@pytest.mark.parametrize("mixture", ["sample", "moments"])
def test_noise_in_training_for_each_image_and_none_in_evaluation(mixture: str) -> None:
    tree = random_tree(mixture).train()
    first, second = tree(2).values, tree(2).values
    assert not torch.equal(first, second)
    assert not torch.equal(first[0], first[1])
    tree.eval()
    assert torch.equal(tree(2).values, tree(2).values)


@pytest.mark.parametrize("mixture", ["sample", "moments"])
def test_evaluation_is_training_without_the_noise(mixture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluation decodes each distinct sample once; masks and averages must give what all samples would."""
    mapper = HierarchyMapper(6, 6, TreeShape(8, 3), dim=16, heads=2, mixture=mixture)
    torch.nn.init.normal_(mapper.encoding.leave[1].weight)  # pyright: ignore[reportArgumentType]
    tokens, v = torch.randn(2, 9, 6), torch.randn(2, 6)
    expected = mapper.eval()(tokens, v)
    expected_maps = mapper.decomposition.attention(mapper.tree(2), tokens)
    monkeypatch.setattr(torch, "randn", lambda *size, **options: torch.zeros(*size, **options))
    mapper.train()
    assert len(mapper.tree(2).values[0]) == 24
    assert len(expected[1][0]) == 14
    for ours, theirs in zip(mapper(tokens, v), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(mapper.decomposition.attention(mapper.tree(2), tokens), expected_maps)


def test_the_deterministic_tree_has_points_and_no_divergence() -> None:
    tree = GaussianTree(TreeShape(8, 3), 5, probabilistic=False).train()
    assert [name for name, _ in tree.named_parameters()] == ["mean"]
    values = tree(4).values[0]
    assert torch.equal(values, tree.eval()(4).values[0])
    torch.testing.assert_close(values[12], tree.mean[0:4].mean(dim=0))
    assert tree.kl().item() == 0.0


def test_divergence_of_the_top_level() -> None:
    tree = random_tree().double()
    mean, variance = tree.gaussians()[-1]
    expected = kl_divergence(Normal(mean, variance.sqrt()), Normal(torch.zeros_like(mean), torch.ones_like(mean)))
    torch.testing.assert_close(tree.kl(), expected.mean())


def test_unknown_mixture_is_refused() -> None:
    with pytest.raises(UsageError, match="did you mean 'moments'"):
        GaussianTree(TreeShape(4, 2), 3, "moment")


# The contrast.


@pytest.mark.parametrize("sibling_weight", [1.0, 0.3, 0.0])
def test_contrast_by_brute_force(sibling_weight: float) -> None:
    shape, tau = TreeShape(8, 3), 0.7
    distances = torch.rand(2, shape.nodes, shape.nodes, dtype=torch.float64) * 4.0
    terms = []
    for image in distances:
        for child, parent in enumerate(shape.parents().tolist()):
            level = range(8) if child < 8 else range(8, 12)
            positive = math.exp(-image[child, parent] / tau)
            negative = sum(
                (sibling_weight if other // 2 == child // 2 else 1.0) * math.exp(-image[child, other] / tau)
                for other in level
                if other != child
            )
            terms.append(-math.log(positive / (positive + negative)))
    found = HierarchyContrast(shape, tau, sibling_weight)(distances)
    assert found.item() == pytest.approx(sum(terms) / len(terms), rel=1e-5)


@pytest.mark.parametrize(("name", "value"), [("temperature", 0.0), ("sibling_weight", 1.5), ("sibling_weight", -0.1)])
def test_contrast_refuses_senseless_settings(name: str, value: float) -> None:
    with pytest.raises(UsageError, match=name):
        HierarchyContrast(TreeShape(4, 2), **{name: value})


def printed_form(distances: Tensor, shape: TreeShape) -> Tensor:
    """The loss as the paper prints it: the distances themselves are the logits."""
    parents, level = shape.parents(), shape.level_of()
    total = distances.new_zeros(())
    for child, parent in enumerate(parents.tolist()):
        others = [node for node in range(shape.nodes) if level[node] == level[child] and node != child]
        logits = distances[:, child, [parent, *others]]
        total = total + F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))
    return total / len(parents)


def relatives(distances: Tensor, shape: TreeShape) -> tuple[float, float, float]:
    """Mean distance to the parent, to the sibling and to the other nodes of the level."""
    parents, level = shape.parents(), shape.level_of()
    child = torch.arange(len(parents))
    cousins = (level[: len(parents), None] == level) & (torch.arange(shape.nodes) // 2 != child[:, None] // 2)
    mean = distances.detach().mean(dim=0)
    return (
        mean[child, parents].mean().item(),
        mean[child, child ^ 1].mean().item(),
        mean[: len(child)][cousins].mean().item(),
    )


def trained(manifold: Manifold, printed: bool, sibling_weight: float = 1.0) -> tuple[list[float], list[float]]:
    """Distances to parent, sibling and cousins before and after 150 steps of Adam on free points."""
    shape = TreeShape(8, 3)
    torch.manual_seed(1)
    tangent = torch.nn.Parameter(torch.randn(2, shape.nodes, 8) * 0.35)
    contrast = HierarchyContrast(shape, 1.0, sibling_weight)
    optimizer = torch.optim.Adam([tangent], lr=0.05)
    states = []
    for _ in range(151):
        points = manifold.expmap0(tangent)
        distances = manifold.cdist(points, points)
        states.append(relatives(distances, shape))
        loss = printed_form(distances, shape) if printed else contrast(distances)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return list(states[0]), list(states[-1])


@pytest.mark.parametrize("manifold", [Lorentz(1.0), Euclidean()], ids=["lorentz", "euclidean"])
def test_the_printed_sign_drives_parents_away_and_collapses_the_levels(manifold: Manifold) -> None:
    before, after = trained(manifold, printed=True)
    assert after[0] > 3.0 * before[0]
    assert after[1] < 0.5 * before[1]
    assert after[2] < 0.5 * before[2]


@pytest.mark.parametrize("sibling_weight", [1.0, 0.2])
@pytest.mark.parametrize("manifold", [Lorentz(1.0), Euclidean()], ids=["lorentz", "euclidean"])
def test_the_corrected_sign_orders_parent_sibling_cousin(manifold: Manifold, sibling_weight: float) -> None:
    before, (parent, sibling, cousin) = trained(manifold, printed=False, sibling_weight=sibling_weight)
    assert max(before) < 1.15 * min(before)  # nothing is ordered at first
    assert parent < 0.8 * sibling
    assert sibling < 0.95 * cousin


# The hyperbolic side.


def test_points_lie_on_the_hyperboloid_of_the_learned_curvature() -> None:
    mapper = HierarchyMapper(6, 6, TreeShape(8, 3), dim=16, heads=2)
    with torch.no_grad():
        mapper.manifold._c.theta.fill_(1.3)  # pyright: ignore
    with torch.no_grad():
        points = mapper.points(torch.randn(2, 14, 16)).double()
    product = points[..., 1:].square().sum(-1) - points[..., 0].square()
    product = product * float(mapper.curvature)
    torch.testing.assert_close(product, torch.full_like(product, -1.0), atol=1e-4, rtol=0)


def test_gradients_are_finite_where_all_nodes_coincide_and_far_out() -> None:
    """An acosh clamped at 1 + 1e-8 has an infinite gradient in float32, and a distance inside exp is unbounded."""
    for nodes in (torch.zeros(1, 14, 16), torch.ones(1, 14, 16), 1e4 * torch.randn(1, 14, 16)):
        mapper = HierarchyMapper(6, 6, TreeShape(8, 3), dim=16, heads=2)
        with torch.no_grad():
            mapper.to_tangent[1].weight.mul_(100.0)  # pyright: ignore
        loss = mapper.losses(nodes.requires_grad_()).total()
        loss.backward()
        assert loss.isfinite()
        grads = [p.grad for p in mapper.parameters() if p.grad is not None]
        assert len(grads) == 7  # mean, log-variance, tangent's norm and map, curvature
        assert all(grad.isfinite().all() for grad in [*grads, nodes.grad])


def test_curvature_is_learned_within_its_bounds() -> None:
    mapper = HierarchyMapper(6, 6, TreeShape(8, 3), dim=16, heads=2)
    curvature = mapper.manifold._c  # pyright: ignore[reportAttributeAccessIssue]
    assert isinstance(curvature, Curvature)
    optimizer = torch.optim.SGD([curvature.theta], lr=1e4)
    for _ in range(5):
        mapper.losses(torch.randn(1, 14, 16)).each["contrast"].sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    low, high = CURVATURE_BOUNDS
    assert low <= float(mapper.curvature) <= high
    assert float(mapper.curvature) != 1.0


def test_the_weights_of_the_losses() -> None:
    values = {"contrast": torch.tensor([1.0, 3.0]), "kl": torch.tensor([3.0, 3.0])}
    losses = HierarchyLosses(values, {"contrast": 0.1, "kl": 0.01})
    assert losses.total().item() == pytest.approx(0.1 * 2.0 + 0.01 * 3.0)
    assert losses.total(contrast=1.0, kl=0.0).item() == 2.0


def test_the_flat_twin_has_the_same_weights_but_for_the_curvature() -> None:
    curved, flat = (
        {name for name, _ in HierarchyMapper(6, 6, TreeShape(8, 3), geometry=g).named_parameters()}
        for g in ("lorentz", "euclidean")
    )
    assert curved - flat == {"manifold._c.theta"}
    assert not flat - curved


class _Spread(nn.Module):
    """A loss of one's own: nodes apart from each other."""

    def __init__(self, mapper: HierarchyMapper) -> None:
        super().__init__()

    def forward(self, seen: Any) -> Tensor:
        return (-seen.distances).exp().mean(dim=(1, 2))


class _Losses(Losses, frozen=True):
    spread: float = 0.5


class _WithSpread(Config, frozen=True):
    losses: _Losses = _Losses()


def test_a_loss_is_one_file_and_one_line_of_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    file: Any = ModuleType("leafward.systems.himapper.losses.spread")
    file.Loss = _Spread
    monkeypatch.setitem(sys.modules, file.__name__, file)
    config = checked(_WithSpread, {"spread": 0.25, "kl_weight": 0.0})
    mapper = HierarchyMapper(6, 6, TreeShape(8, 3), dim=16, heads=2)
    mapper.learn(to_dict(config.losses))
    found = mapper.losses(torch.randn(2, 14, 16))
    assert set(found.each) == {"contrast", "spread"}
    expected = 0.1 * found.each["contrast"].mean() + 0.25 * found.each["spread"].mean()
    assert found.total().item() == pytest.approx(expected.item())
    with pytest.raises(UsageError, match=r"losses\.spread must be"):
        checked(_WithSpread, {"losses": {"spread": "much"}})
