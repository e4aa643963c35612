"""What to answer, given any classifier's probabilities over the leaves: ``from leafward.hierarchy import decide``.

Every function takes probabilities (B, C), a torch tensor or an array, and `classes`, the leaf (name or number) that
each column stands for; without it the columns are all the leaves in their order, ``tax.leaf_names``. Nodes are
answered by number, as the same kind of array on the same device; −1 means no answer. The probability of a node is
the sum over the classes below it, each counted once, also on a DAG.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from leafward.errors import UsageError
from leafward.hierarchy.graph import Sparse
from leafward.hierarchy.taxonomy import Nodes, Taxonomy

#: Ancestor masks (C, N) up to this many entries are multiplied densely, larger ones sparsely.
DENSE_ENTRIES = 1 << 24
#: A matrix of costs between classes and answers on a DAG may have this many entries.
LARGEST_COSTS = 1 << 27

Cost = Literal["distance", "lca_height"]


def leaf(tax: Taxonomy, probabilities: Any, classes: Nodes = None) -> Any:
    """The most probable leaf: (B, C) -> (B)."""
    p, columns = _checked(tax, probabilities, classes)
    return _like(columns[p.argmax(dim=-1)], probabilities)


def node_probabilities(tax: Taxonomy, probabilities: Any, classes: Nodes = None) -> Any:
    """The probability of every node, the sum over the classes below it: (B, C) -> (B, N)."""
    p, columns = _checked(tax, probabilities, classes)
    return _like(_node_sums(tax, p, columns), probabilities)


def path(tax: Taxonomy, probabilities: Any, classes: Nodes = None) -> Any:
    """Walk from the root, each time to the most probable child: (B, C) -> (B, L), padded with −1 after the leaf.

    Robust where mass is spread over many similar leaves: their common ancestor wins before they compete. The end
    need not be the most probable leaf.
    """
    p, columns = _checked(tax, probabilities, classes)
    best = _best_child(tax, _node_sums(tax, p, columns))
    node = torch.full((len(p),), tax.root, dtype=torch.int64, device=p.device)
    way = [node]
    for _ in range(int(tax.longest_depth.max())):
        node = torch.where(node >= 0, best.gather(1, node.clamp_min(0)[:, None]).squeeze(1), node)
        way.append(node)
    walked = torch.stack(way, dim=1)
    longest = int((walked >= 0).sum(dim=1).max()) if len(p) else 1
    return _like(walked[:, :longest], probabilities)


def _best_child(tax: Taxonomy, sums: Tensor) -> Tensor:
    """The first of the most probable children of each node: (B, N) -> (B, N), −1 at leaves."""
    parent, child = tax.children.expand(np.arange(len(tax)))
    owner = torch.from_numpy(parent).to(sums.device).expand(len(sums), -1)
    offspring = torch.from_numpy(child).to(sums.device)
    value = sums[:, offspring]
    top = torch.full_like(sums, -1.0).scatter_reduce(1, owner, value, "amax")
    # Of the children that reach the maximum the first edge is taken.
    edge = torch.arange(len(child), device=sums.device).expand(len(sums), -1)
    edge = torch.where(value == top.gather(1, owner), edge, len(child))
    first = torch.full(sums.shape, len(child), dtype=torch.int64, device=sums.device)
    first = first.scatter_reduce(1, owner, edge, "amin")
    return torch.cat([offspring, offspring.new_full((1,), -1)])[first]


def back_off(tax: Taxonomy, probabilities: Any, threshold: float, classes: Nodes = None) -> Any:
    """The deepest node whose probability reaches the threshold, of equals the most probable: (B, C) -> (B).

    The root always does, so there is always an answer. Depth counts by the longest way from the root.
    """
    _unit_interval("threshold", threshold)
    p, columns = _checked(tax, probabilities, classes)
    sums = _node_sums(tax, p, columns)
    depth = torch.from_numpy(tax.longest_depth).to(p.device)
    reached = torch.where(sums >= threshold, depth, -1)
    reached[:, tax.root].clamp_min_(0)  # rounding may leave the sum of all just below 1
    deepest = reached == reached.amax(dim=1, keepdim=True)
    return _like(torch.where(deepest, sums, -1.0).argmax(dim=1), probabilities)


def abstain(tax: Taxonomy, probabilities: Any, threshold: float, classes: Nodes = None) -> Any:
    """The most probable leaf, or −1 where its probability is below the threshold: (B, C) -> (B)."""
    _unit_interval("threshold", threshold)
    p, columns = _checked(tax, probabilities, classes)
    top, place = p.max(dim=-1)
    return _like(torch.where(top >= threshold, columns[place], -1), probabilities)


def expected_cost(
    tax: Taxonomy,
    probabilities: Any,
    cost: Cost | Any = "distance",
    classes: Nodes = None,
    answers: Nodes = None,
) -> Any:
    """The answer of least expected cost, argmin_a Σ_i p_i D[i, a]: (B, C) -> (B).

    `cost`: "distance" (edges between the class and the answer), "lca_height" (height of their lowest common
    ancestor), or a matrix (C, number of answers). `answers`: the nodes allowed; default the classes themselves.
    With every node allowed and "distance", inner nodes serve as a back-off without a threshold.
    """
    p, columns = _checked(tax, probabilities, classes)
    allowed = columns.cpu().numpy() if answers is None else tax.ids(answers, "answers").ravel()
    if not len(allowed):
        raise UsageError("answers: at least one node is needed")
    if not isinstance(cost, str):
        expected = p @ _cost_matrix(cost, (p.shape[1], len(allowed))).to(p)
    elif cost not in ("distance", "lca_height"):
        raise UsageError(f"cost must be 'distance', 'lca_height' or a matrix, got {cost!r}")
    elif tax.is_tree:
        expected = _tree_costs(tax, p, columns, cost, allowed)
    else:
        expected = p @ _dag_costs(tax, columns.cpu().numpy(), cost, allowed).to(p)
    return _like(torch.from_numpy(allowed).to(p.device)[expected.argmin(dim=1)], probabilities)


def _tree_costs(tax: Taxonomy, p: Tensor, columns: Tensor, cost: str, allowed: np.ndarray) -> Tensor:
    """Σ_i p_i D[i, a] up to a term that does not depend on a, without the matrix D: -> (B, answers).

    On a tree A(i) ∩ A(a) is the path to the lowest common ancestor, so both costs are α_i + β_a − Σ w_u over it:
    distance = |A(i)| + |A(a)| − 2 |A(i) ∩ A(a)|, and lca_height is the root's height less every step on that path.
    Σ_i p_i Σ_u w_u = Σ_{u ∈ A(a)} w_u P(u), with P(u) the probability of node u.
    """
    if cost == "distance":
        weight, beta = np.full(len(tax), 2.0), tax.ancestor_counts[allowed]
    else:
        parent = np.where(tax.first_parent < 0, tax.root, tax.first_parent)
        weight, beta = (tax.height[parent] - tax.height).astype(np.float64), np.zeros(len(allowed))
    weighted = _node_sums(tax, p, columns) * torch.from_numpy(weight).to(p)
    return torch.from_numpy(beta).to(p) - _product(tax.ancestors[allowed].T.tocsr(), weighted)


def _dag_costs(tax: Taxonomy, columns: np.ndarray, cost: str, allowed: np.ndarray) -> Tensor:
    if len(columns) * len(allowed) > LARGEST_COSTS:
        raise UsageError(
            f"costs between {len(columns):,} classes and {len(allowed):,} answers on a DAG need a matrix of more "
            f"than {LARGEST_COSTS:,} entries; give fewer answers"
        )
    one_row = tax.distance if cost == "distance" else lambda a, b: tax.height[tax.lca(a, b)]
    step = max(1, (1 << 18) // len(allowed))
    rows = [one_row(columns[i : i + step, None], allowed[None]) for i in range(0, len(columns), step)]
    return torch.from_numpy(np.concatenate(rows))


def _cost_matrix(cost: Any, shape: tuple[int, int]) -> Tensor:
    matrix = torch.as_tensor(cost)
    if tuple(matrix.shape) != shape or not torch.isfinite(matrix).all():
        raise UsageError(f"cost must be a finite matrix (classes, answers) = {shape}, got {tuple(matrix.shape)}")
    return matrix


@dataclass(frozen=True)
class RiskCoverage:
    """Risk against coverage as the threshold on confidence falls; entry i answers where confidence ≥ threshold[i].

    coverage: share answered; risk: mean loss of the answered; area: mean of the risk over coverage (AURC).
    """

    threshold: np.ndarray
    coverage: np.ndarray
    risk: np.ndarray
    area: float

    def at_risk(self, risk: float) -> float:
        """The largest coverage whose risk is at most the given one; 0 where there is none."""
        return float(self.coverage[self.risk <= risk].max(initial=0.0))


def risk_coverage(confidence: Any, loss: Any) -> RiskCoverage:
    """The curve of confidence (B) and loss (B): 0/1 errors, or a hierarchical loss such as ``tax.distance``.

    Equal confidences are answered together, so there is one entry for each distinct value, from high to low.
    """
    sure, bad = (torch.as_tensor(x).detach().cpu().double().numpy() for x in (confidence, loss))
    if sure.shape != bad.shape or sure.ndim != 1 or not sure.size:
        raise UsageError(f"confidence and loss must be of one shape (B), B ≥ 1, got {sure.shape} and {bad.shape}")
    if not (np.isfinite(sure).all() and np.isfinite(bad).all()):
        raise UsageError("confidence and loss must be finite")
    order = np.argsort(-sure, kind="stable")
    ends = np.append(np.flatnonzero(np.diff(sure[order])), len(sure) - 1)
    risk = np.cumsum(bad[order])[ends] / (ends + 1)
    coverage = (ends + 1) / len(sure)
    return RiskCoverage(sure[order][ends], coverage, risk, float((risk * np.diff(coverage, prepend=0.0)).sum()))


def _checked(tax: Taxonomy, probabilities: Any, classes: Nodes) -> tuple[Tensor, Tensor]:
    """Probabilities in float32 or wider (B, C), each row adding up to one, and the leaf of each column (C)."""
    columns = tax.leaves if classes is None else tax.leaf_ids(classes, "classes").ravel()
    p = torch.as_tensor(probabilities).detach()
    if p.ndim != 2 or p.shape[1] != len(columns):
        raise UsageError(f"probabilities must be (B, {len(columns)}), one column for each class, got {tuple(p.shape)}")
    if not p.is_floating_point():
        raise UsageError(f"probabilities must be floating point, got {p.dtype}")
    tolerance = 1e-3 if p.dtype.itemsize >= 4 else 2e-2
    p = p if p.dtype.itemsize >= 4 else p.float()
    total = p.sum(dim=1)
    if len(p) and not bool((p >= 0).all() & ((total - 1.0).abs() <= tolerance).all()):
        raise UsageError("probabilities must be non-negative and add up to 1 in each row; logits need a softmax first")
    return p, torch.from_numpy(columns).to(p.device)


def _node_sums(tax: Taxonomy, p: Tensor, columns: Tensor) -> Tensor:
    """Σ over the classes below each node: (B, C) -> (B, N)."""
    return _product(tax.ancestors[columns.cpu().numpy()], p)


def _product(mask: Sparse, values: Tensor) -> Tensor:
    """values @ mask for a sparse mask (K, M): (B, K) -> (B, M), densely where the mask is small."""
    if mask.shape[0] * mask.shape[1] <= DENSE_ENTRIES:
        return values @ torch.from_numpy(mask.toarray()).to(values)
    entries = mask.tocoo()
    places = torch.from_numpy(np.stack([entries.col, entries.row]))
    sparse = torch.sparse_coo_tensor(places, torch.from_numpy(entries.data), mask.shape[::-1], check_invariants=False)
    return (sparse.to(values) @ values.T).T


def _unit_interval(argument: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise UsageError(f"{argument} must lie between 0 and 1, got {value}")


def _like(answer: Tensor, given: Any) -> Any:
    """A tensor for a tensor, an array for anything else."""
    return answer if isinstance(given, Tensor) else answer.numpy()
