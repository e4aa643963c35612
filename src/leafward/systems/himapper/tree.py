"""The probabilistic tree (Sec. 4.2; eq. 1, 2): Gaussian leaves, every upper node the even mixture of its children."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from leafward.errors import UsageError, nearest, need
from leafward.geometry.scalars import sqrt, tiny, wide

MIXTURES = ("sample", "moments")
FIRST_LOG_VARIANCE = -2.0
"""Leaves begin with a standard deviation of 0.37 around means of unit variance: apart, but overlapping."""


@dataclass(frozen=True)
class TreeShape:
    """A binary tree over `leaves` cut off at `levels`: level 0 holds the leaves, level l has N/2^l nodes.

    Nodes are numbered level by level from the leaves; node k of a level has the children 2k and 2k + 1 one below.
    """

    leaves: int
    levels: int

    def __post_init__(self) -> None:
        for name in ("leaves", "levels"):
            need(isinstance(getattr(self, name), int), name, "an integer", getattr(self, name))
        if self.levels < 2:
            raise UsageError(f"levels must be at least 2, got {self.levels}")
        most = 2 ** (self.levels - 1)
        if self.leaves < most or self.leaves % most:
            raise UsageError(
                f"leaves must be a multiple of 2^(levels − 1) = {most}, so that every upper node has two children; "
                f"got {self.leaves} leaves with {self.levels} levels"
            )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Nodes of each level, the leaves first."""
        return tuple(self.leaves >> level for level in range(self.levels))

    @property
    def nodes(self) -> int:
        return sum(self.sizes)

    def level(self, level: int) -> slice:
        """Where the nodes of a level stand among all."""
        start = sum(self.sizes[:level])
        return slice(start, start + self.sizes[level])

    def level_of(self) -> Tensor:
        """The level of every node: (M)."""
        return torch.cat([torch.full((size,), level) for level, size in enumerate(self.sizes)])

    def parents(self) -> Tensor:
        """The parent of every node below the top level: (M − N/2^(L−1))."""
        above = range(1, self.levels)
        return torch.cat([torch.arange(self.sizes[up]).repeat_interleave(2) + self.level(up).start for up in above])

    def averaging(self) -> list[Tensor]:
        """For each level the matrix that averages the leaves below each of its nodes: (N/2^l, N)."""
        return [torch.eye(n).repeat_interleave(self.leaves // n, dim=1) * (n / self.leaves) for n in self.sizes]


class Samples(NamedTuple):
    """Points of the tree that are decoded together: `values` (B or 1, S, d).

    `pool` (M, S) averages what was decoded into nodes (None: they are the nodes); `mask` (S, S) says which samples
    belong to one level (None: all).
    """

    values: Tensor
    pool: Tensor | None
    mask: Tensor | None


class GaussianTree(nn.Module):
    """The nodes as distributions, and samples from them.

    In training every node gets as many samples as it has leaves, fresh for each image. `mixture="sample"` draws them
    from the mixture itself, one from each leaf below (stratified: same expectation, less variance);
    `mixture="moments"` from the Gaussian with the mixture's mean and variance. In evaluation there is no noise.
    With `probabilistic=False` the tree has points instead, an upper node being the mean of its children.
    """

    leaf_pool: Tensor
    sample_pool: Tensor
    sample_mask: Tensor
    node_mask: Tensor

    def __init__(self, shape: TreeShape, dim: int, mixture: str = "sample", probabilistic: bool = True) -> None:
        super().__init__()
        if mixture not in MIXTURES:
            raise UsageError(f"mixture: unknown value {mixture!r}; {nearest(mixture, MIXTURES)}")
        self.shape, self.mixture, self.probabilistic = shape, mixture, probabilistic
        # Each level has an equal share in the variance of a leaf, so that near relatives begin near each other.
        ancestors = [torch.randn(n, dim).repeat_interleave(shape.leaves // n, dim=0) for n in shape.sizes]
        self.mean = nn.Parameter(torch.stack(ancestors).sum(dim=0) / shape.levels**0.5)
        if probabilistic:
            self.log_variance = nn.Parameter(torch.full((shape.leaves, dim), FIRST_LOG_VARIANCE))
        averaging = shape.averaging()
        self.register_buffer("leaf_pool", torch.cat(averaging), persistent=False)
        self.register_buffer("sample_pool", torch.block_diag(*averaging), persistent=False)
        level = torch.arange(shape.levels).repeat_interleave(shape.leaves)
        self.register_buffer("sample_mask", level[:, None] == level, persistent=False)
        level = shape.level_of()
        self.register_buffer("node_mask", level[:, None] == level, persistent=False)

    def no_weight_decay(self) -> set[str]:
        """Means and variances are places, not weights."""
        return {"mean", "log_variance"}

    def gaussians(self) -> list[tuple[Tensor, Tensor]]:
        """Mean and variance of every level's nodes by matching the moments of the mixture, in float32: (n, d) each.

        μ = ½(μ₁ + μ₂) and σ² = ½(σ₁² + σ₂²) + ¼(μ₁ − μ₂)². The textbook form E[σ² + μ²] − μ² cancels, in float16 to
        zero or below, whose logarithm is not finite.
        """
        mean = wide(self.mean)
        variance = wide(self.log_variance).exp() if self.probabilistic else torch.zeros_like(mean)
        found = [(mean, variance)]
        for _ in range(self.shape.levels - 1):
            (a, b), (p, q) = (mean[0::2], mean[1::2]), (variance[0::2], variance[1::2])
            mean, variance = 0.5 * (a + b), 0.5 * (p + q) + 0.25 * (a - b).square()
            found.append((mean, variance))
        return found

    def forward(self, images: int) -> Samples:
        """What to decode for `images` images."""
        if self.training and self.probabilistic:
            mean, deviation = self._components()
            noise = torch.randn(images, *mean.shape, device=mean.device, dtype=mean.dtype)
            values = torch.addcmul(mean, deviation, noise)
            return Samples(values.to(self.mean.dtype), self.sample_pool, self.sample_mask)
        if self.mixture == "sample" and self.probabilistic:
            # Without noise the samples of all levels are the leaves' means: they are decoded once.
            return Samples(self.mean[None], self.leaf_pool, None)
        means = torch.cat([mean for mean, _ in self.gaussians()])
        return Samples(means.to(self.mean.dtype)[None], None, self.node_mask)

    def _components(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation that each sample is drawn with, level by level: (L·N, d) each."""
        if self.mixture == "sample":
            mean, deviation = wide(self.mean), (0.5 * wide(self.log_variance)).exp()
            return mean.repeat(self.shape.levels, 1), deviation.repeat(self.shape.levels, 1)
        both = [torch.stack([mean, sqrt(variance)]) for mean, variance in self.gaussians()]
        mean, deviation = torch.cat([b.repeat_interleave(self.shape.leaves // b.shape[1], dim=1) for b in both], dim=1)
        return mean, deviation

    def kl(self) -> Tensor:
        """KL divergence of the top level's nodes from the unit Gaussian, in nats per coordinate (eq. 9): a scalar.

        A mixture's has no closed form; this is that of the Gaussian with its moments, a lower bound of it. Per
        coordinate, as in the authors' code, so that its weight does not depend on the width.
        """
        if not self.probabilistic:
            return wide(self.mean).new_zeros(())
        mean, variance = self.gaussians()[-1]
        return 0.5 * (mean.square() + variance - 1.0 - variance.clamp_min(tiny(variance.dtype)).log()).mean()
