"""Position bias of the assignments: a function of the offset between token and centre, or a table of places."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leafward.systems.hcformer.layout import KNOTS, Layout, Offsets

_WIDTH = 768


class OffsetBias(nn.Module):
    """A learned function of the offset between token and centre (eq. 6), one value per head: -> (h, N, M).

    A small network gives its values at R × R knots over [−1, 1]², with linear interpolation between them. Being a
    function of the offset and not a table of places, it needs no resizing and holds at any input size; its cost does
    not grow with the image but for two small products.
    """

    knots: Tensor

    def __init__(self, heads: int, width: int = _WIDTH) -> None:
        super().__init__()
        self.inner = nn.Linear(2, width)
        self.outer = nn.Linear(width, heads, bias=False)  # a constant would not pass the softmax
        # Where the weights are: transformers' from_pretrained can leave linspace deaf to `with torch.device(...)`.
        knots = torch.linspace(-1.0, 1.0, KNOTS, device=self.inner.weight.device)
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
            table = rows.flatten(0, 1) @ across.unflatten(0, (-1, KNOTS))  # (h, k·p, k·q)
            return table.unflatten(2, columns.shape[:2]).unflatten(1, rows.shape[:2])

    def _factors(self, offsets: Offsets) -> tuple[Tensor, Tensor, Tensor]:
        """Values at the knots (h, R, R), and the weights of rows and columns."""
        values = self.outer.weight @ F.relu(self.inner(self.knots)).mT
        rows, columns = (weights.to(values.dtype) for weights in offsets)
        return values.unflatten(1, (KNOTS, KNOTS)), rows, columns


class TableBias(nn.Module):
    """A learned number for every centre and place (the published code's form, beside eq. 6).

    Patch level: (h, k², R, R) over the tokens of the map, window level: over its windows; both are resized to the map
    at hand with corners aligned. Zero at the start, as published.
    """

    def __init__(self, heads: int, centres: int, side: int, level: str) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.zeros(heads, centres**2, side, side))
        self.level = level

    def forward(self, layout: Layout) -> Tensor:
        """(G, h, N, M) at the patch level, (h, G, K) at the window level."""
        size = layout.size if self.level == "patch" else layout.grid
        maps = F.interpolate(self.places, size=size, mode="bilinear", align_corners=True)  # (h, M, ...)
        if self.level == "window":
            return maps.flatten(2).mT
        parts = layout.partition(maps.permute(2, 3, 0, 1).flatten(2).unsqueeze(0))[0]  # (G, N, h·M)
        return parts.unflatten(2, maps.shape[:2]).transpose(1, 2)
