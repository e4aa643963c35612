"""What Hi-Mapper's published code and formulas do otherwise, written out, beside the hierarchy mapper."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from leafward.systems.himapper.losses.contrast import HierarchyContrast
from leafward.systems.himapper.mapper import HierarchyMapper
from leafward.systems.himapper.tree import TreeShape

DIM = 16


def mapper(curvature: float) -> HierarchyMapper:
    """One whose nodes, over √d, are the tangent vectors themselves."""
    module = HierarchyMapper(6, 6, TreeShape(8, 3), dim=DIM, heads=2)
    module.to_tangent = nn.Sequential(nn.Identity())
    with torch.no_grad():  # c = 0.1 · 100^sigmoid(θ)
        share = torch.tensor(curvature / 0.1).log() / torch.tensor(100.0).log()
        module.manifold._c.theta.copy_(share.logit())  # pyright: ignore
    return module


def directions(count: int) -> Tensor:
    v = torch.randn(1, count, DIM, generator=torch.Generator().manual_seed(0))
    return v / v.norm(dim=-1, keepdim=True)


def published_points(v: Tensor) -> Tensor:
    """exp₀ with the first channel as time, the Minkowski norm capped at 1.5, and no curvature: space parts."""
    norm = (v[..., 1:].square().sum(-1, keepdim=True) - v[..., :1].square()).clamp_min(1e-8).sqrt()
    return torch.sinh(norm.clamp(max=1.5)) / norm * v[..., 1:]


def test_the_published_map_knows_neither_the_first_channel_nor_far_points() -> None:
    v = directions(14)
    flip = torch.ones(DIM)
    flip[0] = -1.0
    assert torch.equal(published_points(3.0 * v), published_points(3.0 * v * flip))
    radius = torch.asinh(published_points(torch.cat([3.0 * v, 6.0 * v])).norm(dim=-1))
    assert radius.max() < 2.5  # little more than the cap, wherever the vectors were


def test_ours_keeps_radius_channel_and_curvature() -> None:
    v = directions(14)
    flip = torch.ones(DIM)
    flip[0] = -1.0
    for c in (0.3, 1.0, 3.0):
        module = mapper(c)
        points = module.points(3.0 * DIM**0.5 * v)
        torch.testing.assert_close(module.manifold.dist0(points), torch.full((1, 14), 3.0), rtol=1e-4, atol=0)
        time = torch.cosh(torch.tensor(3.0 * c**0.5)) / c**0.5
        torch.testing.assert_close(points[..., 0], time.expand(1, 14), rtol=1e-4, atol=0)
        flipped = module.points(3.0 * DIM**0.5 * v * flip)
        other = module.manifold.dist(points, flipped)
        assert other.min() > 1e-3


def test_minus_log_of_a_mean_overlooks_a_node_in_the_wrong_place() -> None:
    """As printed the ratios are averaged before the logarithm: one bad node among good ones costs next to nothing."""
    shape = TreeShape(8, 3)
    parents, level = shape.parents(), shape.level_of()
    distances = torch.full((1, shape.nodes, shape.nodes), 9.0)
    distances[0, torch.arange(len(parents)), parents] = 0.5
    worse = distances.clone()
    worse[0, 0, parents[1]] = 60.0

    def ratios(d: Tensor) -> Tensor:
        found = []
        for child, parent in enumerate(parents.tolist()):
            others = [n for n in range(shape.nodes) if level[n] == level[child] and n != child]
            found.append((-d[0, child, [parent, *others]]).softmax(dim=0)[0])
        return torch.stack(found)

    contrast = HierarchyContrast(shape, temperature=1.0)
    for d in (distances, worse):
        torch.testing.assert_close(contrast(d), -ratios(d).log().mean(), rtol=1e-5, atol=1e-6)
    printed = [-ratios(d).mean().log() for d in (distances, worse)]
    assert printed[1] - printed[0] < 0.1
    assert contrast(worse) - contrast(distances) > 3.0
