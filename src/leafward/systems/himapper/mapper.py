"""From a feature map to a hierarchy of nodes, and from the nodes back to the global feature. Knows no backbone."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leafward.config import to_dict
from leafward.errors import UsageError, nearest
from leafward.geometry import Curvature, space_of
from leafward.geometry.scalars import wide
from leafward.nn.space import GEOMETRIES
from leafward.systems.himapper.config import Losses
from leafward.systems.himapper.losses import HierarchyLosses, Seen, losses_of
from leafward.systems.himapper.tree import GaussianTree, Samples, TreeShape

CURVATURE_BOUNDS = (0.1, 10.0)


class Attention(nn.Module):
    """Multi-head attention of x (B or 1, S, d) to memory (B, T, d): -> (B, S, d)."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key_value, self.out = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.mix(x, self.key_value(memory), mask)

    def mix(self, x: Tensor, pairs: Tensor, mask: Tensor | None = None) -> Tensor:
        """The same with keys and values (B, T, 2d) at hand."""
        query, key, value = self._split(x, pairs)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def weights(self, x: Tensor, memory: Tensor) -> Tensor:
        """The weights that `forward` mixes with, averaged over heads: (B, S, T)."""
        query, key, _ = self._split(x, self.key_value(memory))
        return wide(query @ key.mT * query.shape[-1] ** -0.5).softmax(dim=-1).mean(dim=1)

    def _split(self, x: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values by heads: (B, h, S, d/h) and twice (B, h, T, d/h)."""
        query = self.query(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        key, value = pairs.unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return query.expand(len(pairs), -1, -1, -1), key, value


def _mlp(dim: int, ratio: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, ratio * dim), nn.GELU(), nn.Linear(ratio * dim, dim))


class Decomposition(nn.Module):
    """D (Sec. 4.3; eq. 3, 4): samples look at the feature map, then at their own level; one layer for all levels."""

    def __init__(self, channels: int, dim: int, heads: int) -> None:
        super().__init__()
        self.memory = nn.Sequential(nn.LayerNorm(channels), nn.Linear(channels, dim))
        self.norm_cross, self.norm_self = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.cross, self.self_ = Attention(dim, heads), Attention(dim, heads)
        self.mlp = _mlp(dim)

    def forward(self, samples: Samples, tokens: Tensor) -> Tensor:
        """Tokens of the feature map (B, T, C) -> nodes (B, M, d), each the mean of its decoded samples."""
        x = samples.values + self.cross(self.norm_cross(samples.values), self.memory(tokens))
        own = self.norm_self(x)
        x = x + self.self_(own, own, samples.mask)
        x = x + self.mlp(x)
        return x if samples.pool is None else samples.pool.to(x.dtype) @ x

    def attention(self, samples: Samples, tokens: Tensor) -> Tensor:
        """Where each node looks, as shares of one: (B, T, C) -> (B, M, T)."""
        weights = self.cross.weights(self.norm_cross(samples.values), self.memory(tokens))
        return weights if samples.pool is None else wide(samples.pool) @ weights


class Encoding(nn.Module):
    """G (Sec. 4.5; eq. 5, 6): the global feature attends to each level in turn, leaves first, with a layer for each."""

    def __init__(self, shape: TreeShape, width: int, dim: int, heads: int) -> None:
        super().__init__()
        self.shape = shape
        self.enter = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, dim))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in shape.sizes)
        self.node_norm = nn.LayerNorm(dim)
        self.attend = nn.ModuleList(Attention(dim, heads) for _ in shape.sizes)
        self.mlps = nn.ModuleList(_mlp(dim) for _ in shape.sizes)
        self.leave = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, width))
        # A pretrained backbone begins as it is: v^L = 0.
        nn.init.zeros_(self.leave[1].weight)  # pyright: ignore[reportArgumentType]
        nn.init.zeros_(self.leave[1].bias)  # pyright: ignore[reportArgumentType]

    def forward(self, v: Tensor, nodes: Tensor) -> Tensor:
        """Global feature (B, V) and nodes (B, M, d) -> v^L (B, V)."""
        x, pairs = self.enter(v)[:, None], self._pairs(self.node_norm(nodes))
        for level, (norm, attend, mlp) in enumerate(zip(self.norms, self.attend, self.mlps, strict=True)):
            x = x + attend.mix(norm(x), pairs[level][:, self.shape.level(level)])  # pyright: ignore[reportCallIssue]
            x = x + mlp(x)
        return self.leave(x[:, 0])

    def _pairs(self, nodes: Tensor) -> tuple[Tensor, ...]:
        """Keys and values of all nodes for every level, L times (B, M, 2d): one product, because a GPU pays these small
        ones by the launch, and each level's own rows would be as many launches as levels."""
        maps: list[nn.Linear] = [attend.key_value for attend in self.attend]  # pyright: ignore[reportAssignmentType]
        weight, bias = (torch.cat([getattr(each, name) for each in maps]) for name in ("weight", "bias"))
        return F.linear(nodes, weight, bias).chunk(len(maps), dim=-1)


class HierarchyMapper(nn.Module):
    """Tree, decomposition, encoding, and the space in which the hierarchy is learned.

    `channels` C is the width of the feature map, `width` V that of the global feature. `geometry="lorentz"` learns its
    curvature within `CURVATURE_BOUNDS`; "euclidean" is the flat twin with the same weights. What else there is to
    choose is said at `leafward.systems.himapper.HiMapper`.
    """

    def __init__(
        self,
        channels: int,
        width: int,
        shape: TreeShape,
        dim: int = 128,
        heads: int = 4,
        geometry: str = "lorentz",
        mixture: str = "sample",
        probabilistic: bool = True,
        temperature: float = 0.2,
        sibling_weight: float = 1.0,
    ) -> None:
        super().__init__()
        if heads < 1 or dim < 1 or dim % heads:
            raise UsageError(f"dim must be a multiple of heads, both positive; got dim={dim}, heads={heads}")
        if geometry not in GEOMETRIES:
            raise UsageError(f"geometry: unknown value {geometry!r}; {nearest(geometry, GEOMETRIES)}")
        self.shape = shape
        self.tree = GaussianTree(shape, dim, mixture, probabilistic)
        self.decomposition = Decomposition(channels, dim, heads)
        self.encoding = Encoding(shape, width, dim, heads)
        self.to_tangent = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim))
        self.manifold = space_of(geometry, Curvature(1.0, *CURVATURE_BOUNDS))
        self.temperature, self.sibling_weight = temperature, sibling_weight
        self.learn(to_dict(Losses()))

    def learn(self, weights: Mapping[str, float]) -> None:
        """Take the losses of these names, with these weights, in place of the usual ones."""
        self.weights = dict(weights)
        self.teachers = losses_of(self, weights).to(self.tree.mean.device)

    def forward(self, tokens: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens (B, T, C) and global feature (B, V) -> v^L (B, V) and nodes (B, M, d)."""
        nodes = self.decomposition(self.tree(len(tokens)), tokens)
        return self.encoding(v, nodes).to(v.dtype), nodes

    def cast(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Float32 weights of all linear maps in `dtype`, by name: two kernels of compiled code. Autocast takes one for
        each weight and each bias, which is half of what the mapper launches."""
        maps = [(name, part) for name, part in self.named_modules() if isinstance(part, nn.Linear)]
        every = {f"{name}.{key}": p for name, part in maps for key, p in part.named_parameters(recurse=False)}
        found = [(name, p) for name, p in every.items() if p.dtype == torch.float32]
        if not found:
            return {}
        parts = torch.cat([p.flatten() for _, p in found]).to(dtype).split([p.numel() for _, p in found])
        return {name: part.view(p.shape) for (name, p), part in zip(found, parts, strict=True)}

    def points(self, nodes: Tensor) -> Tensor:
        """Nodes as points by the exponential map at the origin (eq. 7): (B, M, d) -> (B, M, d + 1), flat: d."""
        tangent = self.to_tangent(nodes)
        return self.manifold.expmap0(wide(tangent) * tangent.shape[-1] ** -0.5)

    def losses(self, nodes: Tensor) -> HierarchyLosses:
        """What teaches the hierarchy, from nodes (B, M, d)."""
        points = self.points(nodes)
        seen = Seen(nodes, points, self.manifold.cdist(points, points), self.tree)
        return HierarchyLosses({name: teacher(seen) for name, teacher in self.teachers.items()}, self.weights)

    @property
    def curvature(self) -> float:
        """The curvature constant c; zero where the space is flat."""
        return 0.0 if self.manifold.c is None else float(torch.as_tensor(self.manifold.c).detach())
