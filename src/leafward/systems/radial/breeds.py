"""BREEDS: classification at every level of its ImageNet tree (Santurkar et al., ICLR 2021).

At each depth of the tree an image (or the name of a class) is assigned to the node of that depth whose name is
nearest; the node must be the ancestor of the true class. The levels together form a path.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leafward.errors import DataError, UsageError
from leafward.files import read_json, read_text
from leafward.hierarchy import Taxonomy, metrics


@dataclass(frozen=True)
class Breeds:
    """The tree over the classes, by WordNet id, and the words of every node (N), in order of number."""

    tax: Taxonomy
    words: tuple[str, ...]


def read_breeds(folder: str | Path) -> Breeds:
    """BREEDS' class_hierarchy.txt (parent child), node_names.txt (id, name) and dataset_class_info.json.

    The tree is cut down to the classes of the data set and what is above them. Of several words the first is kept.
    """
    folder = Path(folder)
    try:
        edges = [line.split() for line in read_text(folder / "class_hierarchy.txt").splitlines()]
        names = dict(line.split("\t", 1) for line in read_text(folder / "node_names.txt").splitlines() if line)
        classes = [row[1] for row in read_json(folder / "dataset_class_info.json")]
        tree = Taxonomy.from_edges((child, parent) for parent, child in filter(None, edges))
    except (DataError, ValueError, IndexError, TypeError) as error:
        raise DataError(f"{folder} does not hold BREEDS' files: {error}") from error
    known = [name for name in classes if name in tree]
    if not known:
        raise DataError(f"{folder}: no class of dataset_class_info.json stands in class_hierarchy.txt")
    tax = tree.restrict(known)
    return Breeds(tax, tuple(names.get(name, name).split(",")[0].strip() for name in tax.names))


def score(breeds: Breeds, queries: Tensor, label: np.ndarray, nodes: Tensor, with_leaf: bool = True) -> dict[str, Any]:
    """Accuracy at each depth: unit vectors (M, d) whose true leaves are `label` (M), against all nodes (N, d).

    `with_leaf=False` leaves out the depth of the true class itself, for queries made from its own name. Depth 0, the
    root, is not asked. Also: how many queries each depth has, the mean over the levels, and the share of paths in which
    every node lies below the one before it.
    """
    tax = breeds.tax
    if nodes.shape != (len(tax), queries.shape[-1]):
        raise UsageError(f"nodes must be ({len(tax)}, {queries.shape[-1]}), got {tuple(nodes.shape)}")
    truth = tax.paths(tax.ids(label, "label"))
    if len(truth) != len(queries):
        raise UsageError(f"label must be one for each of the {len(queries)} queries, got {len(truth)}")
    asked = truth >= 0
    if not with_leaf:
        asked[np.arange(len(truth)), asked.sum(axis=1) - 1] = False
    answers, accuracy, counts = np.full(truth.shape, -1, np.int64), {}, {}
    for depth in range(1, truth.shape[1]):
        rows = np.flatnonzero(asked[:, depth])
        if len(rows):
            level = np.flatnonzero(tax.depth == depth)
            near = queries[torch.from_numpy(rows)] @ nodes[torch.from_numpy(level)].mT
            answers[rows, depth] = level[near.argmax(dim=1).cpu().numpy()]
            accuracy[depth] = float((answers[rows, depth] == truth[rows, depth]).mean())
            counts[depth] = len(rows)
    if not accuracy:
        raise UsageError("no query has a level to ask: every class stands right below the root")
    return {
        "queries": len(queries),
        "queries_by_depth": counts,
        "accuracy_by_depth": accuracy,
        "mean_accuracy": float(np.mean(list(accuracy.values()))),
        "consistent_paths": metrics.consistency(tax, answers),
    }
