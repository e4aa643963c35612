"""A t-SNE-like embedding in the hyperbolic plane (or the flat one): near points stay near, and the radius is kept.

Shapes: N points. Affinities p_ij come from the nearest neighbours in the original space; those of the picture are
q_ij ∝ w_ij = 1/(1 + d_ij²) with the distance d of the picture's own space (van der Maaten & Hinton 2008; hyperbolic:
Guo, Guo & Yu 2022, "CO-SNE"). The loss is KL(p‖q) plus a term that holds every point at its radius, which carries the
level of a hierarchy and of which neighbours alone know nothing. Its Riemannian gradient at y_i,
−4 Σ_j (p_ij − q_ij) w_ij log_{y_i}(y_j), is followed along geodesics, so that a step means the same at every radius.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from leafward.explorer.neighbours import Neighbours
from leafward.geometry import Euclidean, Lorentz

#: Points that are laid out in this way, at most: a minute or so on one core.
MOST_POINTS = 5_000
PERPLEXITY = 20.0
STEPS = 200
#: Partners that every point is repelled by in a step: a fresh random sample, weighted up, stands for all.
PARTNERS = 256
#: Gradient descent with momentum; no step is longer than LONGEST_STEP.
RATE, MOMENTUM, LONGEST_STEP = 0.1, 0.8, 0.5
RADIUS_WEIGHT = 0.5


def affinities(near: Neighbours, perplexity: float = PERPLEXITY) -> tuple[Tensor, Tensor, Tensor]:
    """Symmetric affinities p (E), summing to one, of pairs i, j (E), each in both orders.

    p_j|i ∝ exp(−β_i d_ij²) over the 3 · perplexity nearest neighbours, β_i such that the row has that perplexity.
    """
    count = len(near.points)
    k = min(count - 1, round(3 * perplexity))
    blocks = [near.of(rows, k) for rows in torch.arange(count).split(1024)]
    other, gaps = (torch.cat(part) for part in zip(*blocks, strict=True))
    share = _with_perplexity(gaps.double().square(), min(perplexity, 0.5 * (k + 1)))
    here, there = torch.arange(count).repeat_interleave(k), other.reshape(-1)
    pair, place = torch.cat([here * count + there, there * count + here]).unique(return_inverse=True)
    total = share.new_zeros(len(pair)).index_add_(0, place, share.reshape(-1).repeat(2))
    return pair // count, pair % count, total / (2 * count)


def _with_perplexity(squared: Tensor, perplexity: float) -> Tensor:
    """Rows of exp(−β d²), normalised, of entropy log(perplexity), by bisection of log β: d² (N, k) -> (N, k)."""
    squared = squared / squared.mean(dim=1, keepdim=True).clamp_min(torch.finfo(squared.dtype).tiny)
    low, high = (squared.new_full((len(squared), 1), end) for end in (-20.0, 20.0))
    for _ in range(50):
        middle = 0.5 * (low + high)
        share = torch.softmax(-squared * middle.exp(), dim=1)
        wide = torch.special.entr(share).sum(dim=1, keepdim=True) > math.log(perplexity)
        low, high = torch.where(wide, middle, low), torch.where(wide, high, middle)
    return torch.softmax(-squared * low.exp(), dim=1)


@torch.no_grad()
def tsne(
    near: Neighbours,
    start: Tensor,
    space: Lorentz | Euclidean,
    radius: Tensor | None,
    *,
    steps: int = STEPS,
    seed: int = 0,
    progress: Callable[[float], None] = lambda share: None,
) -> Tensor:
    """Points of the two-dimensional `space`, from those in `start`: (N, m) -> (N, m), float64.

    near: the original points. radius (N): where to hold each point; None: nowhere. `progress` is told the share done.
    """
    points = start.double()
    first, second, p = affinities(near)
    generator = torch.Generator().manual_seed(seed)
    step = torch.zeros_like(points)
    for done in range(steps):
        pull, push = _pull(space, points, first, second, p), _push(space, points, generator)
        step = MOMENTUM * step + RATE * 4.0 * len(points) * (pull - push)  # the loss is taken N times
        if radius is not None:
            step = step - RATE * RADIUS_WEIGHT * _radial(space, points, radius.double())
        step = step * (LONGEST_STEP / space.norm(points, step).clamp_min(LONGEST_STEP))[:, None]
        after = space.expmap(points, step)
        step, points = space.transport(points, after, step), after
        progress((done + 1) / steps)
    return points


def _toward(space: Lorentz | Euclidean, distance: Tensor) -> tuple[Tensor, Tensor]:
    """Factors f, g of log_x(y) = f·(y − g·x) at a distance: d/sinh d and cosh d in the Lorentz model of c = 1."""
    if isinstance(space, Euclidean):
        return torch.ones_like(distance), torch.ones_like(distance)
    apart = distance.clamp_min(1e-12)
    return apart / torch.sinh(apart), torch.cosh(apart)


def _pull(space: Lorentz | Euclidean, points: Tensor, first: Tensor, second: Tensor, p: Tensor) -> Tensor:
    """Σ_j p_ij w_ij log_{y_i}(y_j), over pairs (E): -> (N, m)."""
    distance = space.dist(points[first], points[second])
    f, g = _toward(space, distance)
    weight = (p * f / (1.0 + distance.square()))[:, None]
    way = weight * (points[second] - g[:, None] * points[first])
    return torch.zeros_like(points).index_add_(0, first, way)


def _push(space: Lorentz | Euclidean, points: Tensor, generator: torch.Generator) -> Tensor:
    """Σ_j q_ij w_ij log_{y_i}(y_j), estimated from a random sample of partners: -> (N, m)."""
    chosen = torch.randperm(len(points), generator=generator)[:PARTNERS]
    distance = space.cdist(points, points[chosen])
    kernel = 1.0 / (1.0 + distance.square())
    f, g = _toward(space, distance)
    weight = kernel.square() * f / (kernel.sum() - len(chosen))  # a point is no partner of its own
    return weight @ points[chosen] - (weight * g).sum(dim=1, keepdim=True) * points


def _radial(space: Lorentz | Euclidean, points: Tensor, radius: Tensor) -> Tensor:
    """Gradient of Σ_i (|y_i| − r_i)²: outward where a point is too far out, (N, m)."""
    now = space.dist0(points)
    origin = space.expmap0(points.new_zeros(1, 2)).expand_as(points)
    outward = -space.logmap(points, origin) / now.clamp_min(1e-12)[:, None]
    return 2.0 * (now - radius)[:, None] * outward
