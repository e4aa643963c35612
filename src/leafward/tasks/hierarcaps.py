"""The HierarCaps evaluation: does the radius order captions, and does a path from the root find them?

As the authors' code has it: the radius of a text is its distance from the root; 50 thresholds part the range of the
radii of all texts; at each, the text nearest to the image (by cosine) of those whose radius is at most the threshold
is taken; repeats that follow one another are dropped, and what is left is the image's path. Precision and recall
compare paths and reference chains as sets of texts; τ_d is Kendall's τ of radius against level.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leafward.adapters.radial import radius
from leafward.errors import UsageError
from leafward.hierarchy import metrics
from leafward.tasks.captions import Captions, image_key

STEPS = 50
#: entries of the (images, texts) similarities that are held at once
LARGEST_BLOCK = 1 << 25


@dataclass(frozen=True)
class Scores:
    """τ_d over the chains; precision, recall and mean path length over the images, None where there were none."""

    chains: int
    tau: float
    images: int = 0
    precision: float | None = None
    recall: float | None = None
    path_length: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Candidates:
    """The captions of some chains as numbers: `texts` distinct, `ids` (C, L) their places, `roots` likewise."""

    def __init__(self, chains: Sequence[Captions]) -> None:
        lengths = {len(each.texts) for each in chains}
        if len(lengths) != 1 or not all(each.is_chain for each in chains):
            raise UsageError(f"the evaluation needs chains of one length, got lengths {sorted(lengths)}")
        self.chains = list(chains)
        self.texts = list(dict.fromkeys(text for each in chains for text in each.texts))
        self.roots = list(dict.fromkeys(each.root for each in chains))
        text_id = {text: i for i, text in enumerate(self.texts)}
        root_id = {text: i for i, text in enumerate(self.roots)}
        self.ids = torch.tensor([[text_id[text] for text in each.texts] for each in chains])
        self.root_ids = torch.tensor([root_id[each.root] for each in chains])
        # Chains without an image each stand for one of their own.
        keys = [image_key(each.image) if each.image else f"row {i}" for i, each in enumerate(chains)]
        self.chains_of: dict[str, list[int]] = {}
        for i, key in enumerate(keys):
            self.chains_of.setdefault(key, []).append(i)

    @property
    def images(self) -> list[str]:
        """Keys of the distinct images, in order of appearance."""
        return list(self.chains_of)


def score(
    candidates: Candidates,
    text: Tensor,
    root: Tensor,
    queries: Tensor | None = None,
    images: Sequence[str] | None = None,
    steps: int = STEPS,
) -> Scores:
    """Score unit embeddings of the distinct texts (U, d), of the roots (R, d) and of the images (M, d).

    `images`: which images the queries stand for (default: all, in order); they are not scored without queries.
    """
    for name, given, wanted in (("text", text, candidates.texts), ("root", root, candidates.roots)):
        if given.shape != (len(wanted), text.shape[-1]):
            raise UsageError(f"{name} must be ({len(wanted)}, {text.shape[-1]}), got {tuple(given.shape)}")
    ids = candidates.ids.to(text.device)
    radii = radius(text[ids], root[candidates.root_ids.to(root.device)][:, None])
    tau = metrics.radius_tau(radii)
    if queries is None:
        return Scores(len(candidates.chains), tau)
    keys = candidates.images if images is None else list(images)
    if len(keys) != len(queries):
        raise UsageError(f"queries must be one for each of the {len(keys)} images, got {len(queries)}")
    found = paths(queries, text[ids.ravel()], radii.ravel(), ids.ravel(), steps)
    predicted = [[candidates.texts[i] for i in path] for path in found]
    true = [[candidates.chains[i].texts for i in candidates.chains_of[key]] for key in keys]
    precision, recall = metrics.path_precision_recall(predicted, true)
    length = float(np.mean([len(path) for path in found]))
    return Scores(len(candidates.chains), tau, len(keys), precision, recall, length)


def paths(queries: Tensor, text: Tensor, radii: Tensor, ids: Tensor, steps: int = STEPS) -> list[list[int]]:
    """The path of each query: queries (M, d), captions (N, d) with radii (N) and numbers of their texts (N).

    In order of radius, the best text up to each threshold is a running maximum, read off at `steps` places.
    """
    if steps < 2:
        raise UsageError(f"steps must be at least 2, got {steps}")
    ordered, order = radii.double().sort(stable=True)
    low, high = ordered[0].item(), ordered[-1].item()
    thresholds = torch.from_numpy(np.linspace(low, high, steps)).to(ordered)
    last = torch.searchsorted(ordered, thresholds, right=True) - 1
    behind, named = text[order].mT, ids[order]
    block = max(1, LARGEST_BLOCK // len(order))
    rows = [named[(part @ behind).cummax(dim=1).indices[:, last]] for part in queries.split(block)]
    best = torch.cat(rows).cpu()
    fresh = torch.ones_like(best, dtype=torch.bool)
    fresh[:, 1:] = best[:, 1:] != best[:, :-1]
    return [row[keep].tolist() for row, keep in zip(best, fresh, strict=True)]
