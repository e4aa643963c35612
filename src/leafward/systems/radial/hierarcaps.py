"""The HierarCaps evaluation: does the radius order captions, and does a path from the root find them?

As the authors' code has it: the radius of a text is its distance from the root; 50 thresholds part the range of the
radii of all texts; at each, the text nearest to the image (by cosine) of those whose radius is at most the threshold
is taken; repeats that follow one another are dropped, and what is left is the image's path. Precision and recall
compare paths and reference chains as sets of texts; τ_d is Kendall's τ of radius against level.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leafward.data.captions import Captions, image_key
from leafward.errors import UsageError
from leafward.hierarchy import metrics
from leafward.stats.intervals import Interval, mean_interval
from leafward.systems.radial.loss import radius

STEPS = 50
#: what a score can be at least and at most: an interval of few chains or images is cut there
LEAST = {"tau": -1.0, "precision": 0.0, "recall": 0.0, "path_length": 1.0}
MOST = {"tau": 1.0, "precision": 1.0, "recall": 1.0, "path_length": float("inf")}
#: entries of the (images, texts) similarities that are held at once
LARGEST_BLOCK = 1 << 25


@dataclass(frozen=True)
class Scores:
    """τ_d over the chains; precision, recall and mean path length over the images, None where there were none.

    `intervals`: of each by name, over chains or images; without those of a single one.
    """

    chains: int
    tau: float
    images: int = 0
    precision: float | None = None
    recall: float | None = None
    path_length: float | None = None
    intervals: dict[str, Interval] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The numbers without their intervals."""
        return {name: value for name, value in asdict(self).items() if name != "intervals"}


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
    ids, radii = candidates.ids.to(text.device), chain_radii(candidates, text, root)
    found = {"tau": [metrics.radius_tau(chain) for chain in radii.double().cpu().numpy()]}
    if queries is None:
        return _scores(len(candidates.chains), 0, found)
    keys = candidates.images if images is None else list(images)
    if len(keys) != len(queries):
        raise UsageError(f"queries must be one for each of the {len(keys)} images, got {len(queries)}")
    ways = paths(queries, text[ids.ravel()], radii.ravel(), ids.ravel(), steps)
    predicted = [[candidates.texts[i] for i in way] for way in ways]
    true = [[candidates.chains[i].texts for i in candidates.chains_of[key]] for key in keys]
    right = [metrics.path_precision_recall([path], [chains]) for path, chains in zip(predicted, true, strict=True)]
    found["precision"], found["recall"] = map(list, zip(*right, strict=True))
    found["path_length"] = [float(len(way)) for way in ways]
    return _scores(len(candidates.chains), len(keys), found)


def chain_radii(candidates: Candidates, text: Tensor, root: Tensor) -> Tensor:
    """Distances of the captions from their roots, from embeddings as in `score`: (C, L), general to specific."""
    return radius(text[candidates.ids.to(text.device)], root[candidates.root_ids.to(root.device)][:, None])


def _scores(chains: int, images: int, found: dict[str, list[float]]) -> Scores:
    """Means over what was found for each chain or image, with their intervals."""
    means = {name: mean_interval(values, LEAST[name], MOST[name]) for name, values in found.items()}
    intervals = {name: interval for name, (_, interval) in means.items() if interval is not None}
    return Scores(chains, images=images, intervals=intervals, **{name: mean for name, (mean, _) in means.items()})


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
