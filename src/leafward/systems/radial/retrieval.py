"""Image–text retrieval: recall at k in both directions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from leafward.errors import UsageError

#: entries of a block of similarities that are held at once
LARGEST_BLOCK = 1 << 25


def recall_at_k(
    image: Tensor, text: Tensor, owner: Tensor | None = None, ks: Sequence[int] = (1, 5, 10)
) -> dict[str, float]:
    """Shares of queries whose right answer is among the first k: unit vectors (M, d), (N, d).

    `owner` (N): which image each text describes (default: the one of the same number). An image is answered right by
    any of its texts. Ties count against the right answer, so that a collapsed model scores nothing.
    """
    if owner is None:
        if len(image) != len(text):
            raise UsageError(f"without owner, image and text must be as many, got {len(image)} and {len(text)}")
        owner = torch.arange(len(text), device=text.device)
    if owner.shape != (len(text),) or int(owner.min()) < 0 or int(owner.max()) >= len(image):
        raise UsageError(f"owner must name one of {len(image)} images for each of {len(text)} texts")
    if any(k < 1 for k in ks) or not ks:
        raise UsageError(f"ks must be integers ≥ 1, got {list(ks)}")
    found = {"image_to_text": image_ranks(image, text, owner), "text_to_image": text_ranks(image, text, owner)}
    return {f"{way}@{k}": float((ranks <= k).double().mean()) for way, ranks in found.items() for k in ks}


def text_ranks(image: Tensor, text: Tensor, owner: Tensor) -> Tensor:
    """For each text, how many images are at least as near as its own: (N), 1 is best."""
    ranks = []
    for rows, own in zip(text.split(_block(image)), owner.split(_block(image)), strict=True):
        near = rows @ image.mT
        ranks.append((near >= near.gather(1, own[:, None])).sum(dim=1))
    return torch.cat(ranks)


def image_ranks(image: Tensor, text: Tensor, owner: Tensor) -> Tensor:
    """For each image that has a text, one more than the foreign texts at least as near as its best: (≤ M)."""
    ranks = []
    for first, rows in zip(range(0, len(image), _block(text)), image.split(_block(text)), strict=True):
        near = rows @ text.mT
        own = owner[None] == torch.arange(first, first + len(rows), device=owner.device)[:, None]
        best = near.masked_fill(~own, -torch.inf).amax(dim=1, keepdim=True)
        ranks.append(((near >= best) & ~own).sum(dim=1)[own.any(dim=1)] + 1)
    return torch.cat(ranks)


def _block(gallery: Tensor) -> int:
    return max(1, LARGEST_BLOCK // len(gallery))
