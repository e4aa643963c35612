"""Clustering as token mixing (HCFormer): patches gather around centres of their window, windows around global centres.

Legend: B images of H×W tokens with C channels; a window holds N tokens and M centres; there are G windows and K global
centres; h heads of d channels. Equation numbers are those of docs/hcformer.md.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

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

WEIGHT_STD = 0.02  # of every linear map at the start, as in the published code
_BIAS_WIDTH = 768
_KNOTS = 17  # along each axis of offsets, from −1 to 1: one for each token of the first stage's windows, and their end
_FIRST_RADIUS = 2.0  # where hyperbolic distances differ clearly from flat ones: cosh 2 = 3.8
_FIRST_SHARPNESS = {"euclidean": 10.0, "lorentz": 2.0}
_SQUARE_FLOOR = 1e-12  # a zero vector has cosine 0 to everything, and a finite gradient


@dataclass(frozen=True)
class Windows:
    """How an axis is cut into equal windows: `side` tokens each, or `count` of them. The last may be padded."""

    side: int | None = None
    count: int | None = None

    def check(self) -> None:
        if (self.side is None) == (self.count is None):
            raise UsageError(f"windows must have a side or a count, and not both, got {self!r}")
        positive(windows=self.side or self.count or 0)
        if self.count is not None and self.count > 2:
            # Three windows of two tokens would leave the third without any on a map of four.
            raise UsageError(f"the count of windows along an axis must be 1 or 2, got {self.count}; or give their side")

    def cut(self, length: int) -> tuple[int, int]:
        """Number and side of the windows of an axis of `length` tokens; each has at least one."""
        if self.side is not None:
            return (length + self.side - 1) // self.side, self.side
        assert self.count is not None
        count = self.count if length >= self.count else 1
        return count, (length + count - 1) // count


class Offsets(NamedTuple):
    """Offsets from k × k centres to p × q tokens, each axis as weights of linear interpolation between R knots."""

    rows: Tensor
    """(k, p, R)."""
    columns: Tensor
    """(k, q, R)."""

    @classmethod
    def of(cls, rows: Tensor, columns: Tensor) -> Offsets:
        """From the offsets (p, k) and (q, k) along each axis, in [−1, 1]."""
        knots = torch.linspace(-1.0, 1.0, _KNOTS, device=rows.device)
        spacing = 2.0 / (_KNOTS - 1)
        # A window that reaches over the border can have its middle outside; it counts as on the border.
        hats = [1.0 - (o.mT.clamp(-1.0, 1.0).unsqueeze(-1) - knots).abs() / spacing for o in (rows, columns)]
        return cls(*(hat.clamp_min(0.0) for hat in hats))


class Layout(NamedTuple):
    """Where the tokens, windows and centres of an H×W map lie: a function of the size alone, made once per stage."""

    size: tuple[int, int]
    """H, W."""
    grid: tuple[int, int]
    """Windows along each axis; their product is G."""
    side: tuple[int, int]
    """Tokens of a window along each axis; their product is N."""
    valid: Tensor | None
    """(G, N): which places of a window hold a token of the map; None where all do, as it is then for the next three."""
    places: Tensor | None
    """(G·N): the token of the map at every place of the windows; padded places repeat the border."""
    tokens: Tensor | None
    """(H·W): the place in the windows of every token of the map."""
    present: Tensor | None
    """(G, M): which centres have a token; None where all do."""
    pool: Tensor
    """(1 or G, M, N): row m is the mean over the tokens of centre m."""
    mean: Tensor
    """(1 or G, 1, N): the mean over the tokens of a window."""
    offsets: Offsets
    """From the M centres of a window to its N tokens, in sides of the window."""
    global_rows: Tensor
    """(k, H): with `global_columns`, the mean over the tokens of a global centre; K = k²."""
    global_columns: Tensor
    """(k, W)."""
    global_offsets: Offsets
    """From the K global centres to the G windows, in heights and widths of the map."""

    @classmethod
    def of(
        cls, height: int, width: int, windows: Windows, centres: int, global_centres: int, device: torch.device
    ) -> Layout:
        """The layout of a map with `centres`² centres in each window and `global_centres`² on the whole map."""
        rows, columns = (_Axis(length, windows, centres, global_centres, device) for length in (height, width))
        pool = _outer(rows.members, columns.members).unsqueeze(0)  # (1, M, N)
        valid = present = places = tokens = None
        mean = torch.ones_like(pool[:, :1])
        if rows.padded or columns.padded:
            valid = _outer(rows.valid, columns.valid)  # (G, N)
            mean = valid.unsqueeze(1).to(pool.dtype)
            pool = pool * mean
            present = pool.sum(dim=-1) > 0
            valid = valid > 0
            places = (rows.places[:, None, :, None] * width + columns.places[None, :, None, :]).flatten()
            (i, p), (j, q), place = rows.split, columns.split, rows.side * columns.side
            row, column = i * columns.count * place + p * columns.side, j * place + q
            tokens = (row.unsqueeze(1) + column).flatten()
        return cls(
            size=(height, width),
            grid=(rows.count, columns.count),
            side=(rows.side, columns.side),
            valid=valid,
            places=places,
            tokens=tokens,
            present=present,
            pool=pool / pool.sum(dim=-1, keepdim=True).clamp_min(1.0),
            mean=mean / mean.sum(dim=-1, keepdim=True),
            offsets=Offsets.of(rows.offsets / rows.side, columns.offsets / columns.side),
            global_rows=rows.global_pool,
            global_columns=columns.global_pool,
            global_offsets=Offsets.of(rows.global_offsets / height, columns.global_offsets / width),
        )

    def partition(self, x: Tensor) -> Tensor:
        """(B, H, W, C) -> (B, G, N, C)."""
        (n, m), (p, q) = self.grid, self.side
        if self.places is not None:
            return x.flatten(1, 2).index_select(1, self.places).unflatten(1, (n * m, p * q))
        if self.grid == (1, 1):
            return x.flatten(1, 2).unsqueeze(1)
        return x.unflatten(2, (m, q)).unflatten(1, (n, p)).transpose(2, 3).flatten(3, 4).flatten(1, 2)

    def merge(self, x: Tensor) -> Tensor:
        """(B, G, N, C) -> (B, H, W, C): the inverse of `partition`."""
        (n, m), (p, q) = self.grid, self.side
        if self.tokens is not None:
            return x.flatten(1, 2).index_select(1, self.tokens).unflatten(1, self.size)
        if self.grid == (1, 1):
            return x.squeeze(1).unflatten(1, self.size)
        return x.unflatten(2, (p, q)).unflatten(1, (n, m)).transpose(2, 3).flatten(3, 4).flatten(1, 2)

    def global_pool(self, x: Tensor) -> Tensor:
        """Means over the k × k regions of the global centres: (B, H, W, C) -> (B, K, C)."""
        rows, columns = self.global_rows.to(x.dtype), self.global_columns.to(x.dtype)
        strips = columns @ x  # (B, H, k, C)
        return (rows @ strips.flatten(2)).unflatten(2, strips.shape[2:]).flatten(1, 2)

    def pooled(self, x: Tensor) -> Tensor:
        """Means over the windows and over the regions of the global centres, of a map without padding: (B, H, W, C) ->
        (B, G + K, C). On a GPU means over axes take a pass each, where batches of small products take far longer."""
        k = self.global_rows.shape[0]
        if self.size[0] % k == 0 and self.size[1] % k == 0:
            centres = _means(x, (k, k))
        else:
            members = _outer(self.global_rows, self.global_columns).to(x.dtype)
            centres = torch.bmm(members.expand(x.shape[0], -1, -1), x.flatten(1, 2))
        return torch.cat([_means(x, self.grid), centres.to(x.dtype)], dim=1)

    def spread(self, x: Tensor) -> Tensor:
        """(B, H, W, ...) with windows and their tokens on axes of their own: (B, n, p, m, q, ...)."""
        (n, m), (p, q) = self.grid, self.side
        return x.unflatten(2, (m, q)).unflatten(1, (n, p))


def _passing(device: torch.device) -> bool:
    """Whether what is made now must not be kept: while a call is traced tensors are not real, and while a CUDA graph
    records it their memory is the graph's, and empty until that is replayed."""
    if torch.compiler.is_compiling() or type(torch.empty(0, device=device)) is not Tensor:
        return True
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@functools.lru_cache(maxsize=16)
def _kept_layout(
    height: int, width: int, windows: Windows, centres: int, global_centres: int, device: torch.device
) -> Layout:
    """A layout takes a hundred small operations to make; four stages have one each for a size of the image."""
    with torch.inference_mode(False):  # what is made for inference could not serve training later
        return Layout.of(height, width, windows, centres, global_centres, device)


class _Axis:
    """One axis of a layout: `count` windows of `side` tokens, of which the last may be padded."""

    def __init__(self, length: int, windows: Windows, centres: int, global_centres: int, device: torch.device) -> None:
        self.count, self.side = windows.cut(length)
        # A size that is not known yet (torch.export) may need padding, so it gets the general form.
        self.padded = windows.count != 1 and (isinstance(length, torch.SymInt) or self.count * self.side != length)
        place = torch.arange(self.count * self.side, device=device).unflatten(0, (self.count, self.side))
        self.valid = (place < length).float()
        self.places = place.clamp(max=length - 1)
        token = torch.arange(length, device=device)
        self.split = token // self.side, token % self.side  # window and place in it
        self.members, position = _regions(self.side, centres, device)
        token = torch.arange(self.side, device=device) + 0.5
        self.offsets = token.unsqueeze(1) - position  # (side, centres)
        members, position = _regions(length, global_centres, device)
        self.global_pool = members / members.sum(dim=1, keepdim=True)
        middle = (torch.arange(self.count, device=device) + 0.5) * self.side
        self.global_offsets = middle.unsqueeze(1) - position  # (count, global_centres)


def _regions(length: int, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """`count` equal regions of `length` tokens, overlapping where they do not divide it: members (count, length) as
    zeros and ones, and middles (count)."""
    index, token = torch.arange(count, device=device), torch.arange(length, device=device)
    start, end = index * length // count, ((index + 1) * length + count - 1) // count
    members = (token >= start.unsqueeze(1)) & (token < end.unsqueeze(1))
    return members.float(), (start + end) / 2


def _outer(rows: Tensor, columns: Tensor) -> Tensor:
    """(a, b), (c, e) -> (a·c, b·e): the products of all pairs of rows and of columns."""
    return (rows[:, None, :, None] * columns[None, :, None, :]).flatten(2, 3).flatten(0, 1)


def _means(x: Tensor, grid: tuple[int, int]) -> Tensor:
    """Means over n × m equal parts of a map: (B, H, W, C) -> (B, n·m, C)."""
    (n, m), (height, width) = grid, x.shape[1:3]
    return x.unflatten(2, (m, width // m)).unflatten(1, (n, height // n)).mean(dim=(2, 4)).flatten(1, 2)


class OffsetBias(nn.Module):
    """A learned function of the offset between token and centre (eq. 6), one value per head: -> (h, N, M).

    A small network gives its values at R × R knots over [−1, 1]², with linear interpolation between them. Being a
    function of the offset and not a table of places, it needs no resizing and holds at any input size; its cost does
    not grow with the image but for two small products.
    """

    knots: Tensor

    def __init__(self, heads: int, width: int = _BIAS_WIDTH) -> None:
        super().__init__()
        self.inner = nn.Linear(2, width)
        self.outer = nn.Linear(width, heads, bias=False)  # a constant would not pass the softmax
        # Where the weights are: transformers' from_pretrained can leave linspace deaf to `with torch.device(...)`.
        knots = torch.linspace(-1.0, 1.0, _KNOTS, device=self.inner.weight.device)
        self.register_buffer("knots", torch.cartesian_prod(knots, knots), persistent=False)  # (R², 2)

    def forward(self, offsets: Offsets) -> Tensor:
        with torch.autocast(self.knots.device.type, enabled=False):  # casts would take longer than the products
            values, rows, columns = self._factors(offsets)
            pairs = (rows @ values.unsqueeze(1)).unsqueeze(2) @ columns.mT  # (h, k, k, p, q)
            return pairs.permute(0, 3, 4, 1, 2).flatten(3, 4).flatten(1, 2)

    def table(self, offsets: Offsets) -> Tensor:
        """The same with its axes apart, (h, k, p, k, q), in two products for sizes that are known; sizes that are not
        (torch.export) cannot be taken apart again, and have the products of `forward`."""
        with torch.autocast(self.knots.device.type, enabled=False):
            values, rows, columns = self._factors(offsets)
            across = values.flatten(0, 1) @ columns.flatten(0, 1).mT  # (h·R, k·q)
            table = rows.flatten(0, 1) @ across.unflatten(0, (-1, _KNOTS))  # (h, k·p, k·q)
            return table.unflatten(2, columns.shape[:2]).unflatten(1, rows.shape[:2])

    def _factors(self, offsets: Offsets) -> tuple[Tensor, Tensor, Tensor]:
        """Values at the knots (h, R, R), and the weights of rows and columns."""
        values = self.outer.weight @ F.relu(self.inner(self.knots)).mT
        rows, columns = (weights.to(values.dtype) for weights in offsets)
        return values.unflatten(1, (_KNOTS, _KNOTS)), rows, columns


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
    bias: OffsetBias

    def __init__(self, dim: int, heads: int, head_dim: int, similarity: CosineSimilarity | LorentzSimilarity) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, head_dim
        # Similarity features and values in one product; the norm before it brings the bias.
        self.embed = nn.Linear(dim, 2 * heads * head_dim, bias=False)
        self.similarity = similarity
        self.bias = OffsetBias(heads)

    def forward(
        self, tokens: Tensor, centres: Tensor, offsets: Offsets, valid: Tensor | None, present: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(B, G, N, C) and (B, G, M, C) -> (B, G, N, h, d), and the assignments (B, G, h, N, M).

        Pooling and embedding commute, so centres are pooled tokens, embedded here with the others.
        """
        count = tokens.shape[2]
        both = self.embed(torch.cat([tokens, centres], dim=2)).unflatten(-1, (2, self.heads, self.head_dim))
        features, values = both.permute(3, 0, 1, 4, 2, 5).unbind(0)  # (B, G, h, N + M, d)
        assigned = self._assign(features[..., :count, :], features[..., count:, :], offsets, valid, present)
        mixed = exchange(assigned, values[..., :count, :], values[..., count:, :])
        return mixed.transpose(2, 3), assigned

    def _assign(
        self, tokens: Tensor, centres: Tensor, offsets: Offsets, valid: Tensor | None, present: Tensor | None
    ) -> Tensor:
        logits = self.similarity(tokens, centres) + self.bias(offsets)
        if valid is None or present is None:
            return logits.softmax(dim=-1).to(tokens.dtype)
        logits = logits.masked_fill(~present[:, None, None, :], -math.inf)
        return (logits.softmax(dim=-1) * valid[:, None, :, None]).to(tokens.dtype)


def exchange(assigned: Tensor, values: Tensor, centres: Tensor) -> Tensor:
    """Aggregate and dispatch: (..., N, M), (..., N, d), (..., M, d) -> (..., N, d)."""
    total = 1.0 + assigned.sum(dim=-2).unsqueeze(-1)
    return assigned @ ((centres + assigned.mT @ values) / total).to(values.dtype)


class ClusterMixer(nn.Module):
    """FC(Norm([g_W, g_P])) (eq. 9): the window level g_W beside the patch level g_P; (B, H, W, C) -> (B, H, W, C).

    `windows` says how the map is cut, `centres` and `global_centres` are the centres along each axis of a window and of
    the map; `global_centres=0` leaves the window level out. `geometry` is that of the window level,
    `patch_geometry` that of the patch level: "lorentz" compares by distance, "euclidean" by cosine. `curvature` is
    c > 0 (sectional curvature −c), learned within a factor of ten if `learn_curvature`.
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
    ) -> None:
        super().__init__()
        positive(dim=dim, heads=heads, head_dim=head_dim, centres=centres)
        windows.check()
        if global_centres == 1 or global_centres < 0:
            why = "one centre tells nothing apart"
            raise UsageError(f"global_centres must be 0 (no window level) or at least 2 ({why}), got {global_centres}")
        if not 0.0 < curvature < math.inf:
            raise UsageError(f"curvature must be a positive finite number, got {curvature!r}")

        def level(name: str, kind: str) -> Clustering:
            if kind not in GEOMETRIES:
                raise UsageError(f"{name} is {kind!r}; {nearest(kind, GEOMETRIES)}")
            if kind == "euclidean":
                return Clustering(dim, heads, head_dim, CosineSimilarity(heads))
            similarity = LorentzSimilarity(dim, heads, head_dim, curvature, learn_curvature)
            return Clustering(dim, heads, head_dim, similarity)

        self.windows, self.centres, self.global_centres = windows, centres, global_centres
        self.patch_level = level("patch_geometry", patch_geometry)
        self.window_level = level("geometry", geometry) if global_centres else None
        width = heads * head_dim * (2 if global_centres else 1)
        self.norm = nn.LayerNorm(width)
        self.proj = nn.Linear(width, dim)

    def layout(self, height: int, width: int, device: torch.device) -> Layout:
        """The layout of H×W maps for `forward`; mixers with equal windows and centres can share one."""
        arguments = height, width, self.windows, self.centres, max(self.global_centres, 1), device
        return Layout.of(*arguments) if _passing(device) else _kept_layout(*arguments)

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        return self._mix_by_kernels(x, layout) if self._kernels_serve(x, layout) else self.mix(x, layout)[0]

    def mix(self, x: Tensor, layout: Layout) -> tuple[Tensor, dict[str, Tensor]]:
        """The output, and the assignments that it was made with: "patch" (B, G, h, N, M), "window" (B, h, G, K)."""
        tokens = layout.partition(x)
        centres = layout.pool.to(x.dtype) @ tokens
        mixed, patch = self.patch_level(tokens, centres, layout.offsets, layout.valid, layout.present)
        assigned = {"patch": patch}
        if self.window_level is not None:
            windows = (layout.mean.to(x.dtype) @ tokens).transpose(1, 2)  # (B, 1, G, C)
            centres = layout.global_pool(x).unsqueeze(1)
            coarse, window = self.window_level(windows, centres, layout.global_offsets, None, None)
            mixed = torch.cat([coarse.transpose(1, 2).expand_as(mixed), mixed], dim=3)
            assigned["window"] = window.squeeze(1)
        return layout.merge(self.proj(self.norm(mixed.flatten(3)))), assigned

    def _kernels_serve(self, x: Tensor, layout: Layout) -> bool:
        """Whether `_mix_by_kernels` can stand for `mix`."""
        curved = isinstance(self.patch_level.similarity, LorentzSimilarity)
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
        table = patch.bias.table(layout.offsets)
        fine, sums = kernels.cluster_patches(patch.embed(x), alpha, table, layout.side, self.centres)
        if window is None:
            return self._project(fine, sums, None, layout)
        count, few = math.prod(layout.grid), kernels.pool_fits(math.prod(layout.side), self.global_centres**2)
        pooled = kernels.cluster_pool(x, layout.side, self.global_centres) if few else layout.pooled(x)
        if self._fits(count, self.global_centres, x):
            table = window.bias.table(layout.global_offsets)
            coarse = kernels.cluster_windows(window.embed(pooled), *window.similarity.scales(), table)
        else:  # of a large map, where the windows are many and still few beside its tokens
            windows, centres = pooled.unsqueeze(1).tensor_split([count], dim=2)
            coarse = window(windows, centres, layout.global_offsets, None, None)[0].squeeze(1).flatten(2)
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
