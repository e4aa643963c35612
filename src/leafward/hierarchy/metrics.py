"""Hierarchical metrics: of ancestor sets, but on a tree of depths alone, so that no depth is too deep.

A(i) is the set of ancestors of node i with i itself; A°(i) leaves out the root, which every node shares. On a DAG
each definition speaks of sets and shortest ways, and gives the usual value where the DAG is a tree.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from leafward.errors import UsageError
from leafward.files import finite
from leafward.hierarchy.taxonomy import Nodes, Taxonomy


@dataclass(frozen=True)
class Report:
    """What `evaluate` found. Means are over the answered samples.

    count, coverage: samples; the share of them that was answered.
    accuracy: share of exact answers.
    level_accuracy: for depth 1, 2, …: of the samples whose truth has an ancestor (or itself) at that depth, the
        share whose answer shares one. (On a tree: whose answer has the same one.)
    precision, recall, jaccard: means of |A°(p)∩A°(t)| over |A°(p)|, |A°(t)| and |A°(p)∪A°(t)|; an empty set over
        an empty set is 1, so to answer with the root claims nothing false. f1: of these two means.
    tree_induced_error: mean number of edges from the answer to the truth (Dekel et al. 2004).
    lca_height: mean height of the lowest common ancestor; 0 for a right leaf.
    mistake_severity: the same over the wrong answers alone; NaN where there is none (Bertinetto et al. 2020).
    distance_at_k: mean of lca_height over the first k answers, for each k (empty without ranked answers).
    """

    count: int
    coverage: float
    accuracy: float
    level_accuracy: dict[int, float]
    precision: float
    recall: float
    f1: float
    jaccard: float
    tree_induced_error: float
    lca_height: float
    mistake_severity: float
    distance_at_k: dict[int, float]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: NaN becomes None, levels and k become text."""
        plain = dataclasses.asdict(self)
        for key in ("level_accuracy", "distance_at_k"):
            plain[key] = {str(step): value for step, value in plain[key].items()}
        return finite(plain)


def evaluate(tax: Taxonomy, predicted: Nodes, true: Nodes) -> Report:
    """Score answers (B), or ranked answers (B, k), best first, against the truth (B); names or numbers of nodes.

    The number −1 in an unranked answer means none was given; such samples only lower the coverage.
    """
    truth = _flat(tax.ids(true, "true"), "true")
    answers = _answers(tax, predicted, truth)
    given = answers[:, 0] >= 0
    if not given.any():
        raise UsageError("predicted: there is no answer in it")
    first, goal = answers[given, 0], truth[given]
    (overlap, right), (size, _), (full, reached) = (
        _agreement(tax, *pair) for pair in ((first, goal), (first, first), (goal, goal))
    )
    sizes = size, full
    precision, recall = _mean_share(overlap, sizes[0]), _mean_share(overlap, sizes[1])
    heights = tax.height[tax.lca(answers[given], goal[:, None])]
    wrong = first != goal
    running = heights.mean(axis=0).cumsum() / np.arange(1, heights.shape[1] + 1)
    return Report(
        count=len(truth),
        coverage=float(given.mean()),
        accuracy=float((~wrong).mean()),
        level_accuracy={level: float(right[level] / n) for level, n in enumerate(reached.tolist()) if level and n},
        precision=precision,
        recall=recall,
        f1=2.0 * precision * recall / (precision + recall) if precision + recall else 0.0,
        jaccard=_mean_share(overlap, sizes[0] + sizes[1] - overlap),
        tree_induced_error=float(tax.distance(first, goal).mean()),
        lca_height=float(heights[:, 0].mean()),
        mistake_severity=float(heights[wrong, 0].mean()) if wrong.any() else math.nan,
        distance_at_k={k + 1: float(value) for k, value in enumerate(running)} if _ranked(predicted) else {},
    )


def _answers(tax: Taxonomy, predicted: Nodes, truth: np.ndarray) -> np.ndarray:
    """Answers as numbers (B, k), −1 where none was given."""
    raw = predicted.detach().cpu().numpy() if isinstance(predicted, torch.Tensor) else np.asarray(predicted)
    if raw.ndim not in (1, 2) or len(raw) != len(truth) or 0 in raw.shape:
        raise UsageError(f"predicted must be (B) or (B, k) with B = {len(truth)} as in true, got {raw.shape}")
    missing = raw == -1 if raw.ndim == 1 and raw.dtype.kind == "i" else np.zeros(raw.shape, bool)
    numbers = tax.ids(np.where(missing, 0, raw) if missing.any() else raw, "predicted")
    return np.where(missing, -1, numbers).reshape(len(truth), -1)


def _ranked(predicted: Nodes) -> bool:
    return np.ndim(predicted) == 2


def _flat(nodes: np.ndarray, argument: str) -> np.ndarray:
    if nodes.ndim != 1 or not nodes.size:
        raise UsageError(f"{argument} must be one node for each sample, (B) with B ≥ 1, got shape {nodes.shape}")
    return nodes


def _mean_share(part: np.ndarray, whole: np.ndarray) -> float:
    """Mean of part / whole, where 0 / 0 counts as 1."""
    return float(np.where(whole > 0, part / np.maximum(whole, 1), 1.0).mean())


def _agreement(tax: Taxonomy, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """|A°(a) ∩ A°(b)| for each pair, (B), and how many pairs share an ancestor at depth 0, 1, 2, …, (levels)."""
    levels = int(tax.depth.max()) + 1
    if tax.is_tree:
        deepest = tax.depth[tax.lca(a, b)]
        return deepest, np.bincount(deepest, minlength=levels)[::-1].cumsum()[::-1]
    overlap, reached = np.zeros(len(a), np.int64), np.zeros(levels, np.int64)
    for part in tax.shared(a, b):
        count = len(overlap[part.which])
        overlap[part.which] = np.bincount(part.pair, minlength=count) - 1  # without the root
        met = np.zeros((count, levels), bool)
        met[part.pair, tax.depth[part.node]] = True
        reached += met.sum(axis=0)
    return overlap, reached


def consistency(tax: Taxonomy, paths: Nodes) -> float:
    """Share of predicted paths (B, L), coarse to fine, in which each node is a descendant of the one before it.

    Entries of −1 are gaps (a level without an answer) and are passed over.
    """
    steps = paths.detach().cpu().numpy() if isinstance(paths, torch.Tensor) else np.asarray(paths)
    if steps.ndim != 2 or 0 in steps.shape:
        raise UsageError(f"paths must be (B, L), one row for each sample, got shape {steps.shape}")
    filled = steps >= 0 if steps.dtype.kind == "i" else np.ones(steps.shape, bool)
    nodes = tax.ids(np.where(filled, steps, tax.root) if not filled.all() else steps, "paths")
    # The entry before each one, gaps passed over; where there is none, the root, which entails everything.
    last = np.maximum.accumulate(np.where(filled, np.arange(steps.shape[1]), -1), axis=1)
    before = np.concatenate([np.full((len(steps), 1), -1), last[:, :-1]], axis=1)
    above = np.where(before >= 0, np.take_along_axis(nodes, np.maximum(before, 0), axis=1), tax.root)
    fits = tax.entails(above, nodes) & ((above != nodes) | (before < 0))
    return float((fits | ~filled).all(axis=1).mean())


def entailment_auc(scores: Any, labels: Any) -> float:
    """Area under the ROC curve: the chance that a true pair outscores a false one, ties counting one half.

    scores (P), higher for entailment; labels (P), e.g. from `Taxonomy.entails`.
    """
    from scipy.stats import rankdata

    values, positive = _scored(scores, labels)
    hits = int(positive.sum())
    return float((rankdata(values)[positive].sum() - hits * (hits + 1) / 2) / (hits * (len(values) - hits)))


def entailment_ap(scores: Any, labels: Any) -> float:
    """Average precision Σ (R_n − R_{n−1}) P_n over distinct thresholds, high to low; equal scores enter together."""
    values, positive = _scored(scores, labels)
    order = np.argsort(-values, kind="stable")
    ends = np.append(np.flatnonzero(np.diff(values[order])), len(values) - 1)
    hits = np.cumsum(positive[order])[ends]
    return float((np.diff(hits, prepend=0) * hits / (ends + 1)).sum() / hits[-1])


def _scored(scores: Any, labels: Any) -> tuple[np.ndarray, np.ndarray]:
    values, positive = _array(scores).ravel(), _array(labels).ravel()
    if len(values) != len(positive):
        raise UsageError(f"scores and labels must be of one length, got {len(values)} and {len(positive)}")
    if not np.isfinite(values).all():
        raise UsageError(f"scores: {int((~np.isfinite(values)).sum())} of {len(values)} are not finite")
    if not np.isin(positive, (0, 1)).all():
        raise UsageError("labels must be 0 or 1")
    positive = positive.astype(bool)
    if positive.all() or not positive.any():
        raise UsageError("labels must hold both true and false pairs")
    return values, positive


def radius_tau(radii: Any) -> float:
    """τ_d: mean over chains of Kendall's τ between the order of the radii and the levels 1 … L: radii (B, L).

    Rows go from general to specific; NaN pads shorter chains at the end, each of which needs two levels. Equal
    radii count as in order: the radii are ranked, first come first, and the ranks compared, as HierarCaps does.
    """
    values = np.atleast_2d(_array(radii)).astype(np.float64)
    levels = values.shape[-1]
    first, second = np.triu_indices(levels, 1)
    if values.ndim != 2 or not values.size or (np.isfinite(values).sum(axis=1) < 2).any():
        raise UsageError(f"radii must be (B, L) with at least two finite levels in each row, got shape {values.shape}")
    gap = values[:, second] - values[:, first]
    sign = np.where(np.isnan(gap), 0.0, np.where(gap >= 0, 1.0, -1.0))
    return float((sign.sum(axis=1) / (~np.isnan(gap)).sum(axis=1)).mean())


def taxonomy_tau(tax: Taxonomy, radii: Any) -> float:
    """`radius_tau` over the ways from the root to each leaf: radii (N), one for each node."""
    values = _array(radii).astype(np.float64)
    if values.shape != (len(tax),):
        raise UsageError(f"radii must be one number for each node, ({len(tax)},), got {values.shape}")
    ways = tax.paths()
    return radius_tau(np.where(ways >= 0, values[ways], np.nan))


def path_precision_recall(
    predicted: Sequence[Sequence[str]], true: Sequence[Sequence[Sequence[str]]]
) -> tuple[float, float]:
    """Precision and recall of retrieved caption paths, as HierarCaps defines them.

    predicted: for each image the texts of its path. true: for each image one or more reference chains, all of one
    length. Precision: share of the distinct predicted texts that occur in a reference. Recall: share of the levels
    at which some reference's text was predicted. Both are means over images.
    """
    if len(predicted) != len(true) or not len(true):
        raise UsageError(f"predicted and true must be of one length ≥ 1, got {len(predicted)} and {len(true)}")
    precision, recall = [], []
    for texts, chains in zip(predicted, true, strict=True):
        if isinstance(texts, str) or not chains or isinstance(chains[0], str) or len({len(c) for c in chains}) != 1:
            raise UsageError(
                "each entry of true must be a list of chains of one length, each of predicted a list of texts"
            )
        found = set(texts)
        right = found & {text for chain in chains for text in chain}
        precision.append(len(right) / max(1, len(found)))
        recall.append(np.mean([any(text in found for text in level) for level in zip(*chains, strict=True)]))
    return float(np.mean(precision)), float(np.mean(recall))


def _array(values: Any) -> np.ndarray:
    return values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
