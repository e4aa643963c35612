"""Random taxonomies, and hierarchical metrics by their definitions: sets, walks and loops, nothing shared with src."""

from __future__ import annotations

import functools
import math

import numpy as np

from leafward.hierarchy import Taxonomy


def random_taxonomy(rng: np.random.Generator, size: int, dag: bool) -> Taxonomy:
    """Node 0 is the root; names are shuffled so that numbers do not follow depth."""
    labels = rng.permutation(size)
    pairs: list[tuple[str, str | None]] = [(f"n{labels[0]}", None)]
    for i in range(1, size):
        count = min(i, 1 + (int(rng.integers(0, 3)) if dag else 0))
        pairs += [(f"n{labels[i]}", f"n{labels[j]}") for j in rng.choice(i, count, replace=False)]
    rng.shuffle(pairs)
    return Taxonomy.from_edges(pairs)


class Brute:
    """Everything by walking edges."""

    def __init__(self, tax: Taxonomy) -> None:
        self.up = {i: tax.parents.of(i).tolist() for i in range(len(tax))}
        self.down = {i: [j for j in self.up if i in self.up[j]] for i in self.up}
        self.root = next(i for i in self.up if not self.up[i])
        for walk in ("ancestors", "height", "depth", "climb"):  # the same walks again and again
            setattr(self, walk, functools.cache(getattr(self, walk)))

    def ancestors(self, i: int) -> set[int]:
        return {i}.union(*(self.ancestors(j) for j in self.up[i]))

    def height(self, i: int) -> int:
        return 1 + max(self.height(j) for j in self.down[i]) if self.down[i] else 0

    def depth(self, i: int) -> int:
        return 1 + min(self.depth(j) for j in self.up[i]) if self.up[i] else 0

    def climb(self, i: int, to: int) -> float:
        return 0 if i == to else min((1 + self.climb(j, to) for j in self.up[i]), default=math.inf)

    def distance(self, i: int, j: int) -> float:
        return min(self.climb(i, u) + self.climb(j, u) for u in self.up)

    def lca_height(self, i: int, j: int) -> int:
        return min(self.height(u) for u in self.ancestors(i) & self.ancestors(j))

    def report(self, answers: list[list[int]], truth: list[int]) -> dict:
        first = [row[0] for row in answers]
        own = [
            (self.ancestors(p) - {self.root}, self.ancestors(t) - {self.root})
            for p, t in zip(first, truth, strict=True)
        ]
        share = lambda part, whole: len(part) / len(whole) if whole else 1.0  # noqa: E731
        heights = [[self.lca_height(p, t) for p in row] for row, t in zip(answers, truth, strict=True)]
        wrong = [row[0] for row, p, t in zip(heights, first, truth, strict=True) if p != t]
        precision = np.mean([share(p & t, p) for p, t in own])
        recall = np.mean([share(p & t, t) for p, t in own])
        return {
            "count": len(truth),
            "coverage": 1.0,
            "accuracy": np.mean([p == t for p, t in zip(first, truth, strict=True)]),
            "level_accuracy": self.level_accuracy(own),
            "precision": precision,
            "recall": recall,
            "f1": 2 * precision * recall / (precision + recall) if precision + recall else 0.0,
            "jaccard": np.mean([share(p & t, p | t) for p, t in own]),
            "tree_induced_error": np.mean([self.distance(p, t) for p, t in zip(first, truth, strict=True)]),
            "lca_height": np.mean([row[0] for row in heights]),
            "mistake_severity": np.mean(wrong) if wrong else None,
            "distance_at_k": {
                str(k): np.mean([np.mean(row[:k]) for row in heights]) for k in range(1, len(answers[0]) + 1)
            },
        }

    def level_accuracy(self, own: list[tuple[set[int], set[int]]]) -> dict[str, float]:
        levels = {}
        for level in range(1, 1 + max(self.depth(i) for i in self.up)):
            at = {i for i in self.up if self.depth(i) == level}
            hits = [bool(p & t & at) for p, t in own if t & at]
            if hits:
                levels[str(level)] = np.mean(hits)
        return levels
