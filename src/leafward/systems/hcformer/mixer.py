"""Clustering as token mixing (HCFormer): patches gather around centres of their window, windows around global centres.

Legend: B images of H×W tokens with C channels; a window holds N tokens and M centres; there are G windows and K global
centres; h heads of d channels. Equation numbers are those of docs/hcformer.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leafward.errors import UsageError, nearest
from leafward.geometry import Curvature
from leafward.geometry.pairs import tangent_distances
from leafward.geometry.scalars import wide
from leafward.nn import kernels as nn_kernels
from leafward.nn.space import GEOMETRIES, positive, working_dtype
from leafward.systems.hcformer import kernels
from leafward.systems.hcformer.bias import OffsetBias, TableBias
from leafward.systems.hcformer.layout import Layout, Windows, kept_layout, passing

BIASES = ("function", "table", "none")
ASSIGNMENTS = ("soft", "hard")
WEIGHT_STD = 0.02  # of every linear map at the start, as in the published code
_FIRST_RADIUS = 2.0  # where hyperbolic distances differ clearly from flat ones: cosh 2 = 3.8
_FIRST_SHARPNESS = {"euclidean": 10.0, "lorentz": 2.0}
_SQUARE_FLOOR = 1e-12  # a zero vector has cosine 0 to everything, and a finite gradient


class CosineSimilarity(nn.Module):
    """α cos(token, centre), α > 0 learned per head (eq. 2): (..., h, N, d), (..., h, M, d) -> (..., h, N, M)."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.log_alpha = nn.Parameter(torch.full((heads,), math.log(_FIRST_SHARPNESS["euclidean"])))

    def scales(self) -> tuple[Tensor, None]:
        """What `kernels.cluster_windows` takes: α, and nothing for the radius."""
        return wide(self.log_alpha).exp(), None

    def forward(self, tokens: Tensor, centres: Tensor) -> Tensor:
        # Lengths scale the products instead of the vectors: (N, M) is smaller than (N, d).
        lengths = _inverse_length(tokens) * wide(self.log_alpha).exp().view(-1, 1, 1)
        directions = (wide(centres) * _inverse_length(centres)).to(tokens.dtype)
        return (tokens @ directions.mT) * lengths


def _inverse_length(x: Tensor) -> Tensor:
    return torch.rsqrt(wide(x).square().sum(dim=-1, keepdim=True) + _SQUARE_FLOOR)


class LorentzSimilarity(nn.Module):
    """−α d_L(exp₀(s·token), exp₀(s·centre)) (eq. 3): (..., h, N, d), (..., h, M, d) -> (..., h, N, M).

    α > 0 and the scale s > 0 are learned per head. All d channels are space coordinates of a tangent vector at the
    origin; the paper's √(1/κ) acosh(−⟨x,c⟩) is this distance at κ = c = 1. It is
    taken from the tangent vectors by the law of cosines (eq. 4), since the number of operations is what a small map
    costs on a GPU and what a compiler has to chew.
    """

    def __init__(self, dim: int, heads: int, head_dim: int, curvature: float, learn_curvature: bool) -> None:
        super().__init__()
        # A token of unit variance becomes a vector of this length under weights of WEIGHT_STD.
        length = WEIGHT_STD * math.sqrt(dim * head_dim)
        self.log_scale = nn.Parameter(torch.full((heads,), math.log(_FIRST_RADIUS / length)))
        self.log_alpha = nn.Parameter(torch.full((heads,), math.log(_FIRST_SHARPNESS["lorentz"])))
        self.fixed_curvature = curvature
        self.curvature = Curvature(curvature, low=curvature / 10, high=curvature * 10) if learn_curvature else None

    @property
    def c(self) -> float | Tensor:
        return self.fixed_curvature if self.curvature is None else self.curvature()

    def scales(self) -> tuple[Tensor, Tensor]:
        """What `kernels.cluster_windows` takes: 2α/√c and √c s."""
        root = self.c**0.5
        return 2.0 / root * wide(self.log_alpha).exp(), root * wide(self.log_scale).exp()

    def forward(self, tokens: Tensor, centres: Tensor) -> Tensor:
        scale, alpha = (wide(p).exp().view(-1, 1, 1) for p in (self.log_scale, self.log_alpha))
        return -alpha * tangent_distances(wide(tokens) * scale, wide(centres) * scale, self.c, precise=False)


class Clustering(nn.Module):
    """One level: soft assignment of tokens to centres, then aggregate and dispatch (eq. 1, 5, 7, 8).

    A = softmax over centres of (similarity + bias); v'_m = (v_m + Σ_n A_nm v_n)/(1 + Σ_n A_nm); out_n = Σ_m A_nm v'_m.
    Both sums are batched matrix products.
    """

    similarity: CosineSimilarity | LorentzSimilarity
    bias: OffsetBias | TableBias | None

    def __init__(
        self,
        embed: nn.Linear | None,
        head_dim: int,
        similarity: CosineSimilarity | LorentzSimilarity,
        bias: OffsetBias | TableBias | None,
        hard: bool = False,
        level: str = "patch",
    ) -> None:
        super().__init__()
        self.head_dim, self.hard, self.level = head_dim, hard, level
        if embed is not None:  # else the level takes what the other one has embedded
            self.embed = embed
        self.similarity = similarity
        self.bias = bias

    def forward(
        self, both: Tensor, count: int, bias: Tensor | None, valid: Tensor | None, present: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """`count` tokens N and then M centres, embedded: (B, G, N + M, 2hd) -> (B, G, N, h, d), and the assignments
        (B, G, h, N, M). `bias` has the last of these axes.

        Pooling and embedding commute, so centres are pooled tokens, embedded with the others.
        """
        parts = both.unflatten(-1, (2, -1, self.head_dim))
        features, values = parts.permute(3, 0, 1, 4, 2, 5).unbind(0)  # (B, G, h, N + M, d)
        assigned = self._assign(features[..., :count, :], features[..., count:, :], bias, valid, present)
        mixed = exchange(assigned, values[..., :count, :], values[..., count:, :])
        return mixed.transpose(2, 3), assigned

    def placed(self, layout: Layout) -> Tensor | None:
        """The position bias of this level on a map."""
        if self.bias is None or isinstance(self.bias, TableBias):
            return None if self.bias is None else self.bias(layout)
        return self.bias(layout.offsets if self.level == "patch" else layout.global_offsets)

    def _assign(
        self, tokens: Tensor, centres: Tensor, bias: Tensor | None, valid: Tensor | None, present: Tensor | None
    ) -> Tensor:
        logits = self.similarity(tokens, centres)
        if bias is not None:
            logits = logits + bias
        if valid is None or present is None:
            return self._shares(logits).to(tokens.dtype)
        logits = logits.masked_fill(~present[:, None, None, :], -math.inf)
        return (self._shares(logits) * valid[:, None, :, None]).to(tokens.dtype)

    def _shares(self, logits: Tensor) -> Tensor:
        """Softmax over the centres; hard: all to the largest, with the gradient of the softmax (straight through)."""
        shares = logits.softmax(dim=-1)
        if not self.hard:
            return shares
        chosen = torch.zeros_like(shares).scatter(-1, shares.argmax(dim=-1, keepdim=True), 1.0)
        return chosen + (shares - shares.detach())


def exchange(assigned: Tensor, values: Tensor, centres: Tensor) -> Tensor:
    """Aggregate and dispatch: (..., N, M), (..., N, d), (..., M, d) -> (..., N, d)."""
    total = 1.0 + assigned.sum(dim=-2).unsqueeze(-1)
    return assigned @ ((centres + assigned.mT @ values) / total).to(values.dtype)


def _check_choice(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise UsageError(f"{name} is {value!r}; {nearest(value, allowed)}")


class ClusterMixer(nn.Module):
    """FC(Norm([g_W, g_P])) (eq. 9): the window level g_W beside the patch level g_P; (B, H, W, C) -> (B, H, W, C).

    `windows` says how the map is cut, `centres` and `global_centres` are the centres along each axis of a window and of
    the map; `global_centres=0` leaves the window level out. `geometry` is that of the window level,
    `patch_geometry` that of the patch level: "lorentz" compares by distance, "euclidean" by cosine. `curvature` is
    c > 0 (sectional curvature −c), learned within a factor of ten if `learn_curvature`; `patch_curvature` is that of
    the patch level where it differs. `bias` is "function" (eq. 6), "table" (of the places of a map of `table_side`²
    tokens) or "none", `assignment` "soft" (eq. 5) or "hard". `shared` gives both levels the same features and values.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        head_dim: int,
        windows: Windows,
        centres: int,
        global_centres: int = 4,
        geometry: str = "lorentz",
        patch_geometry: str = "euclidean",
        curvature: float = 1.0,
        learn_curvature: bool = False,
        *,
        patch_curvature: float | None = None,
        bias: str = "function",
        assignment: str = "soft",
        shared: bool = False,
        table_side: int = 56,
    ) -> None:
        super().__init__()
        positive(dim=dim, heads=heads, head_dim=head_dim, centres=centres, table_side=table_side)
        windows.check()
        if global_centres == 1 or global_centres < 0:
            why = "one centre tells nothing apart"
            raise UsageError(f"global_centres must be 0 (no window level) or at least 2 ({why}), got {global_centres}")
        for name, value in (("curvature", curvature), ("patch_curvature", patch_curvature)):
            if value is not None and not 0.0 < value < math.inf:
                raise UsageError(f"{name} must be a positive finite number, got {value!r}")
        _check_choice("bias", bias, BIASES)
        _check_choice("assignment", assignment, ASSIGNMENTS)
        _check_choice("patch_geometry", patch_geometry, GEOMETRIES)
        _check_choice("geometry", geometry, GEOMETRIES)

        def level(name: str, kind: str, c: float, count: int, side: int) -> Clustering:
            # Features and values in one product; the norm before it brings the bias.
            own = None if shared and name == "window" else nn.Linear(dim, 2 * heads * head_dim, bias=False)
            flat = kind == "euclidean"
            similarity = (
                CosineSimilarity(heads) if flat else LorentzSimilarity(dim, heads, head_dim, c, learn_curvature)
            )
            # Drawn in this order: embedding, similarity, bias.
            made = {
                "function": lambda: OffsetBias(heads),
                "table": lambda: TableBias(heads, count, side, name),
                "none": lambda: None,
            }[bias]()
            return Clustering(own, head_dim, similarity, made, assignment == "hard", name)

        self.windows, self.centres, self.global_centres = windows, centres, global_centres
        grid_side = windows.cut(table_side)[0]
        self.patch_level = level("patch", patch_geometry, patch_curvature or curvature, centres, table_side)
        self.window_level = level("window", geometry, curvature, global_centres, grid_side) if global_centres else None
        width = heads * head_dim * (2 if global_centres else 1)
        self.norm = nn.LayerNorm(width)
        self.proj = nn.Linear(width, dim)

    def layout(self, height: int, width: int, device: torch.device) -> Layout:
        """The layout of H×W maps for `forward`; mixers with equal windows and centres can share one."""
        arguments = height, width, self.windows, self.centres, max(self.global_centres, 1), device
        return Layout.of(*arguments) if passing(device) else kept_layout(*arguments)

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        return self._mix_by_kernels(x, layout) if self._kernels_serve(x, layout) else self.mix(x, layout)[0]

    def mix(self, x: Tensor, layout: Layout) -> tuple[Tensor, dict[str, Tensor]]:
        """The output, and the assignments that it was made with: "patch" (B, G, h, N, M), "window" (B, h, G, K)."""
        tokens = layout.partition(x)
        centres = layout.pool.to(x.dtype) @ tokens
        both = self.patch_level.embed(torch.cat([tokens, centres], dim=2))
        bias = self.patch_level.placed(layout)
        mixed, patch = self.patch_level(both, tokens.shape[2], bias, layout.valid, layout.present)
        assigned = {"patch": patch}
        if self.window_level is not None:
            windows = (layout.mean.to(x.dtype) @ tokens).transpose(1, 2)  # (B, 1, G, C)
            both = self._embed_windows(torch.cat([windows, layout.global_pool(x).unsqueeze(1)], dim=2))
            bias = self.window_level.placed(layout)
            coarse, window = self.window_level(both, windows.shape[2], bias, None, None)
            mixed = torch.cat([coarse.transpose(1, 2).expand_as(mixed), mixed], dim=3)
            assigned["window"] = window.squeeze(1)
        return layout.merge(self.proj(self.norm(mixed.flatten(3)))), assigned

    def _embed_windows(self, x: Tensor) -> Tensor:
        """Features and values at the window level, of its own or shared with the patch level."""
        level: Clustering = self.window_level if hasattr(self.window_level, "embed") else self.patch_level  # pyright: ignore[reportAssignmentType]
        return level.embed(x)

    def _kernels_serve(self, x: Tensor, layout: Layout) -> bool:
        """Whether `_mix_by_kernels` can stand for `mix`."""
        curved = isinstance(self.patch_level.similarity, LorentzSimilarity)
        if self.patch_level.hard or not isinstance(self.patch_level.bias, OffsetBias):  # of both levels
            return False
        if curved or layout.places is not None or not nn_kernels.serve(x):
            return False
        return self._fits(math.prod(layout.side), self.centres, x, torch.is_grad_enabled())

    def _fits(self, tokens: int, centres: int, x: Tensor, back: bool = True) -> bool:
        width = self.patch_level.head_dim
        return kernels.cluster_fits(tokens, centres**2, width, working_dtype(x), x.device, back)

    def _mix_by_kernels(self, x: Tensor, layout: Layout) -> Tensor:
        """The output of `mix`, from the map as it lies, without padding."""
        x = x.to(working_dtype(x))
        patch, window = self.patch_level, self.window_level
        alpha, _ = patch.similarity.scales()
        assert isinstance(patch.bias, OffsetBias)  # others are not served by kernels
        table = patch.bias.table(layout.offsets)
        fine, sums = kernels.cluster_patches(patch.embed(x), alpha, table, layout.side, self.centres)
        if window is None:
            return self._project(fine, sums, None, layout)
        count, few = math.prod(layout.grid), kernels.pool_fits(math.prod(layout.side), self.global_centres**2)
        pooled = kernels.cluster_pool(x, layout.side, self.global_centres) if few else layout.pooled(x)
        if self._fits(count, self.global_centres, x):
            assert isinstance(window.bias, OffsetBias)
            table = window.bias.table(layout.global_offsets)
            coarse = kernels.cluster_windows(self._embed_windows(pooled), *window.similarity.scales(), table)
        else:  # of a large map, where the windows are many and still few beside its tokens
            both = self._embed_windows(pooled.unsqueeze(1))
            coarse = window(both, count, window.placed(layout), None, None)[0].squeeze(1).flatten(2)
        return self._project(fine, sums, coarse, layout)

    def _project(self, fine: Tensor, sums: Tensor, coarse: Tensor | None, layout: Layout) -> Tensor:
        """proj(norm([g_W, g_P])) without the concatenation: (B, H, W, h·d), sums of g_P and g_P² (2, B, H, W),
        (B, G, h·d) -> (B, H, W, C).

        With W' = W diag(γ), mean μ and rate r = 1/√(σ² + ε): W (γ (g − μ) r + β) + b = r (W' g − μ W'1) + W β + b, and
        W' g is a product with g_P on the map and one with g_W on the windows.
        """
        norm, width = self.norm, fine.shape[-1]
        with torch.autocast(fine.device.type, enabled=False):
            weight = self.proj.weight * norm.weight
            constant = F.linear(norm.bias, self.proj.weight, self.proj.bias)
        total, squares = (layout.spread(part) for part in sums)
        product = F.linear(fine, weight[:, -width:].to(fine.dtype))
        inner = layout.spread(product)
        if coarse is not None:
            windows = wide(coarse)
            corner = (*layout.grid[:1], 1, *layout.grid[1:], 1)
            total = total + windows.sum(dim=-1).unflatten(1, corner)
            squares = squares + windows.square().sum(dim=-1).unflatten(1, corner)
            inner = inner + F.linear(coarse, weight[:, :width].to(coarse.dtype)).unflatten(1, corner)
        mean = total / weight.shape[1]
        rate = torch.rsqrt((squares / weight.shape[1] - mean.square()).clamp_min(0.0) + norm.eps)
        out = rate.unsqueeze(-1) * (inner - mean.unsqueeze(-1) * weight.sum(dim=1)) + constant
        return out.to(product.dtype).view(product.shape)
