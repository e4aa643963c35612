"""Where the windows, tokens and centres of a map lie. Letters are those of `leafward.systems.hcformer.mixer`."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from leafward.errors import UsageError
from leafward.nn.space import positive

KNOTS = 17  # along each axis of offsets, from −1 to 1: one for each token of the first stage's windows, and their end


@dataclass(frozen=True)
class Windows:
    """How an axis is cut into equal windows: `side` tokens each, or `count` of them. The last may be padded.

    `shifted` windows begin half a side before the map, so that they reach over the borders of those that are not; a map
    that is one window has none.
    """

    side: int | None = None
    count: int | None = None
    shifted: bool = False

    @classmethod
    def of(cls, words: str | int | Windows) -> Windows:
        """From what a setting says: "8" is a side of eight tokens, "/2" two windows along each axis."""
        if isinstance(words, Windows):
            return words
        text = str(words)
        if not re.fullmatch(r"/?[1-9]\d{0,3}", text):
            raise UsageError(f"windows must be a side in tokens (8) or a number along each axis (/2), got {words!r}")
        return cls(count=int(text[1:])) if text.startswith("/") else cls(side=int(text))

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
            return (length + self.before(self.side) + self.side - 1) // self.side, self.side
        assert self.count is not None
        count = self.count if length >= self.count else 1
        side = (length + count - 1) // count
        return (length + self.before(side) + side - 1) // side if self.shifted else count, side

    def before(self, side: int) -> int:
        """Places of the first window that lie before the map."""
        return side // 2 if self.shifted and self.count != 1 else 0


class Offsets(NamedTuple):
    """Offsets from k × k centres to p × q tokens, each axis as weights of linear interpolation between R knots."""

    rows: Tensor
    """(k, p, R)."""
    columns: Tensor
    """(k, q, R)."""

    @classmethod
    def of(cls, rows: Tensor, columns: Tensor) -> Offsets:
        """From the offsets (p, k) and (q, k) along each axis, in [−1, 1]."""
        knots = torch.linspace(-1.0, 1.0, KNOTS, device=rows.device)
        spacing = 2.0 / (KNOTS - 1)
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


def passing(device: torch.device) -> bool:
    """Whether what is made now must not be kept: while a call is traced tensors are not real, and while a CUDA graph
    records it their memory is the graph's, and empty until that is replayed."""
    if torch.compiler.is_compiling() or type(torch.empty(0, device=device)) is not Tensor:
        return True
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@functools.lru_cache(maxsize=16)
def kept_layout(
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
        before = windows.before(self.side)
        exact = not before and self.count * self.side == length
        self.padded = windows.count != 1 and (isinstance(length, torch.SymInt) or not exact)
        place = torch.arange(self.count * self.side, device=device).unflatten(0, (self.count, self.side)) - before
        self.valid = ((place >= 0) & (place < length)).float()
        self.places = place.clamp(0, length - 1)
        token = torch.arange(length, device=device) + before
        self.split = token // self.side, token % self.side  # window and place in it
        self.members, position = _regions(self.side, centres, device)
        token = torch.arange(self.side, device=device) + 0.5
        self.offsets = token.unsqueeze(1) - position  # (side, centres)
        members, position = _regions(length, global_centres, device)
        self.global_pool = members / members.sum(dim=1, keepdim=True)
        middle = (torch.arange(self.count, device=device) + 0.5) * self.side - before
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
