"""Cost aggregation in the manner of CAT-Seg (Cho et al. 2024): from a cost volume to a mask for each class.

B images, T classes, H × W places, C channels. Attention runs over places in windows, guided by the image's appearance,
and over classes at each place, guided by their texts; the number of classes is free and their order does not matter.
Two up-sampling stages with shallower features of the image follow.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

GUIDANCE = 32  # channels of each guidance


class CostAggregation(nn.Module):
    """cost (B, T, H, W), appearance (B, d, H, W), text (B, T, d), two shallow maps (B, d_i, H, W) -> (B, T, 4H, 4W)."""

    def __init__(
        self,
        appearance: int,
        text: int,
        shallow: Sequence[int],
        channels: int = 64,
        heads: int = 4,
        window: int = 6,
        blocks: int = 2,
    ) -> None:
        super().__init__()
        self.embed = nn.Conv2d(1, channels, 7, padding=3)
        self.appearance = nn.Conv2d(appearance, GUIDANCE, 1)
        self.text = nn.Linear(text, GUIDANCE)
        self.blocks = nn.ModuleList()
        for _ in range(blocks):
            # The second windows lie half a window off the first, so that places of neighbours meet.
            self.blocks.append(SpatialAttention(channels, heads, window, 0))
            self.blocks.append(SpatialAttention(channels, heads, window, window // 2))
            self.blocks.append(ClassAttention(channels))
        self.ups = nn.ModuleList(
            Up(channels >> stage, width, channels >> (stage + 1)) for stage, width in enumerate(shallow)
        )
        self.head = nn.Conv2d(channels >> len(shallow), 1, 3, padding=1)

    def forward(self, cost: Tensor, appearance: Tensor, text: Tensor, shallow: Sequence[Tensor]) -> Tensor:
        images, classes = cost.shape[:2]
        x = self.embed(cost.flatten(0, 1).unsqueeze(1)).unflatten(0, (images, classes))  # (B, T, C, H, W)
        seen = self.appearance(F.normalize(appearance, dim=1))
        said = self.text(F.normalize(text, dim=-1))
        for block in self.blocks:
            x = block(x, said if isinstance(block, ClassAttention) else seen)
        for up, guide in zip(self.ups, shallow, strict=True):
            x = up(x, guide)
        return self.head(x.flatten(0, 1)).squeeze(1).unflatten(0, (images, classes))


class SpatialAttention(nn.Module):
    """Attention within windows of places, each class apart; queries and keys also see the appearance (B, G, H, W)."""

    def __init__(self, channels: int, heads: int, window: int, offset: int) -> None:
        super().__init__()
        self.heads, self.window, self.offset = heads, window, offset
        self.norm, self.after = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.query = nn.Linear(channels + GUIDANCE, channels)
        self.key = nn.Linear(channels + GUIDANCE, channels)
        self.value = nn.Linear(channels, channels)
        self.out = nn.Linear(channels, channels)
        self.feed = feed_forward(channels)

    def forward(self, x: Tensor, guidance: Tensor) -> Tensor:
        images, classes, _, height, width = x.shape
        flat = x.flatten(0, 1).permute(0, 2, 3, 1)  # (B·T, H, W, C)
        normed = self.norm(flat)
        guide = guidance.permute(0, 2, 3, 1).repeat_interleave(classes, dim=0)
        guided = torch.cat([normed, guide], dim=-1)
        inside = torch.ones(1, height, width, 1, dtype=torch.bool, device=x.device)
        q, k, v = (self._windows(part) for part in (self.query(guided), self.key(guided), self.value(normed)))
        mask = self._windows(inside).squeeze(-1)  # (windows, L): padding is not looked at
        mask = mask.repeat(images * classes, 1)[:, None, None, :]
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (q, k, v))
        # A window of padding alone has nothing to look at and is cut away; it must only not be NaN.
        mask = mask | ~mask.any(dim=-1, keepdim=True)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        flat = flat + self._whole(self.out(mixed), len(flat), height, width)
        flat = flat + self.feed(self.after(flat))
        return flat.permute(0, 3, 1, 2).unflatten(0, (images, classes))

    def _padding(self, height: int, width: int) -> tuple[int, int, int, int]:
        """Left, right, top and bottom, to whole windows."""
        first = self.offset
        return first, -(first + width) % self.window, first, -(first + height) % self.window

    def _windows(self, x: Tensor) -> Tensor:
        """(N, H, W, c) -> (N·windows, window², c)."""
        left, right, top, bottom = self._padding(*x.shape[1:3])
        x = F.pad(x, (0, 0, left, right, top, bottom))
        rows, columns = x.shape[1] // self.window, x.shape[2] // self.window
        x = x.reshape(len(x), rows, self.window, columns, self.window, -1).transpose(2, 3)
        return x.reshape(-1, self.window**2, x.shape[-1])

    def _whole(self, x: Tensor, count: int, height: int, width: int) -> Tensor:
        """The inverse of `_windows`: -> (count, H, W, c)."""
        left, right, top, bottom = self._padding(height, width)
        rows, columns = (height + top + bottom) // self.window, (width + left + right) // self.window
        x = x.reshape(count, rows, columns, self.window, self.window, -1).transpose(2, 3)
        x = x.reshape(count, rows * self.window, columns * self.window, -1)
        return x[:, top : top + height, left : left + width]


class ClassAttention(nn.Module):
    """Linear attention over the classes at each place; queries and keys also see the texts (B, T, G).

    φ(q)(φ(k)ᵀv) / φ(q)Σφ(k) with φ = elu + 1: work proportional to the number of classes.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm, self.after = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.query = nn.Linear(channels + GUIDANCE, channels)
        self.key = nn.Linear(channels + GUIDANCE, channels)
        self.value = nn.Linear(channels, channels)
        self.out = nn.Linear(channels, channels)
        self.feed = feed_forward(channels)

    def forward(self, x: Tensor, guidance: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        flat = x.permute(0, 3, 4, 1, 2)  # (B, H, W, T, C)
        normed = self.norm(flat)
        guided = torch.cat([normed, guidance[:, None, None].expand(-1, height, width, -1, -1)], dim=-1)
        q, k = F.elu(self.query(guided)) + 1.0, F.elu(self.key(guided)) + 1.0
        summary = k.mT @ self.value(normed)  # (B, H, W, C, C)
        weight = (q * k.sum(dim=-2, keepdim=True)).sum(dim=-1, keepdim=True)
        flat = flat + self.out((q @ summary) / weight)
        flat = flat + self.feed(self.after(flat))
        return flat.permute(0, 3, 4, 1, 2)


class Up(nn.Module):
    """Twice the resolution, with a shallow map of the image: (B, T, C, H, W), (B, d, h, w) -> (B, T, C′, 2H, 2W)."""

    def __init__(self, channels: int, guide: int, out: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(channels, out, 2, stride=2)
        self.guide = nn.Conv2d(guide, GUIDANCE, 1)
        self.mix = nn.Sequential(
            nn.Conv2d(out + GUIDANCE, out, 3, padding=1),
            nn.GroupNorm(max(1, out // 16), out),
            nn.GELU(),
            nn.Conv2d(out, out, 3, padding=1),
        )

    def forward(self, x: Tensor, guide: Tensor) -> Tensor:
        images, classes = x.shape[:2]
        up = self.up(x.flatten(0, 1))
        seen = F.interpolate(self.guide(guide), size=up.shape[-2:], mode="bilinear", align_corners=False)
        mixed = self.mix(torch.cat([up, seen.repeat_interleave(classes, dim=0)], dim=1))
        return (up + mixed).unflatten(0, (images, classes))


def feed_forward(channels: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(channels, 4 * channels), nn.GELU(), nn.Linear(4 * channels, channels))
