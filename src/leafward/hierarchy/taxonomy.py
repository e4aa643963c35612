"""A taxonomy: named nodes under one root, each with one parent (a tree) or several (a DAG).

Nodes are numbered 0 … N−1; every method takes names or numbers, one or many. Questions about pairs (distances, lowest
common ancestors, entailment) cost memory that grows with the nodes and edges, not with the depth; `ancestors`, the
matrix, is computed when first asked for and kept. Notation: A(i) is the set of ancestors of i with i itself.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from leafward.errors import DataError, LeafwardError, UsageError, nearest
from leafward.files import replacing, write_text
from leafward.hierarchy import ancestry, graph, readers
from leafward.hierarchy.graph import Sparse
from leafward.hierarchy.readers import Edges, PathLike

if TYPE_CHECKING:
    from networkx import DiGraph

#: The ancestor matrix of a taxonomy of sane depth has a few dozen entries per node; beyond this it is a mistake.
LARGEST_CLOSURE = 300_000_000
#: A DAG keeps the ancestors of all nodes for questions about pairs; where they are more, it searches those asked for.
KEPT = 20_000_000

#: one name or number, or many: a list, an array or a tensor
Nodes = Any


class Taxonomy:
    """Build one with `from_csv`, `from_json`, `from_text`, `from_nested`,
    `from_superclasses`, `from_networkx`, `from_wordnet` or `from_edges`.

    Attributes: `names`; `parents`, `children` (neighbour lists); `depth` (N), edges on the shortest way from the
    root; `longest_depth` (N), the same by the longest way; `height` (N), edges on the longest way to a leaf;
    `order` (N), parents before children; `leaves` and `leaf_names`.
    """

    def __init__(self, edges: Edges, root: str | None = None) -> None:
        """`root`: name of a virtual root to put above all others; without it, several roots are refused."""
        names = edges.names()
        number = {name: i for i, name in enumerate(names)}
        child, parent = edges.arrays(number)
        tops = np.flatnonzero(np.bincount(child, minlength=len(names)) == 0)
        if root is not None:
            if root in number:
                raise DataError(f"{edges.source}: the virtual root {root!r} is already the name of a node")
            number[root] = len(names)
            names.append(root)
            child, parent = np.append(child, tops), np.append(parent, np.full(len(tops), len(names) - 1))
        self.names: tuple[str, ...] = tuple(names)
        self.parents = graph.rows_of(child, parent, len(names))
        self.children = graph.rows_of(parent, child, len(names))
        self._number = number
        found = graph.layout(self.parents, self.children)
        if found is None:
            raise DataError(_describe_cycle(edges, [names[i] for i in graph.find_cycle(self.parents, self.children)]))
        if root is None and len(tops) > 1:
            some = ", ".join(repr(names[i]) for i in tops[:5]) + (", …" if len(tops) > 5 else "")
            raise DataError(
                f"{edges.source}: {len(tops)} roots: {some}; a taxonomy has one: fix the parents, or pass "
                "root='NAME' (--root NAME) to put a virtual root above them"
            )
        self.order, self.depth, self.longest_depth = found
        self.root = int(self.order[0])
        self.leaves = np.flatnonzero(self.children.counts() == 0)
        self.is_tree = bool((self.parents.counts() <= 1).all())

    # Reading and writing

    @classmethod
    def from_csv(cls, path: PathLike, root: str | None = None) -> Taxonomy:
        """Rows ``child,parent``, with or without that header; an empty parent declares a root."""
        return cls(readers.read_csv(path), root)

    @classmethod
    def from_json(cls, path: PathLike, root: str | None = None) -> Taxonomy:
        """Nested objects, ``{"name", "children"}`` objects, or what `save` wrote."""
        return cls(readers.read_json(path), root)

    @classmethod
    def from_text(cls, path: PathLike, root: str | None = None) -> Taxonomy:
        """One name on each line, indented deeper than its parent."""
        return cls(readers.read_text(path), root)

    @classmethod
    def from_nested(cls, tree: Any, root: str | None = None) -> Taxonomy:
        """A nested mapping: ``{"animal": {"dog": {}, "cat": ["tabby"]}}``."""
        return cls(readers.from_nested(tree), root)

    @classmethod
    def from_superclasses(cls, groups: Mapping[str, Iterable[str]] | PathLike, root: str = "root") -> Taxonomy:
        """``{"superclass": ["class", …]}``, a mapping or a JSON file, under a virtual root."""
        return cls(readers.from_superclasses(groups), root)

    @classmethod
    def from_networkx(cls, graph: DiGraph, root: str | None = None) -> Taxonomy:
        """A directed NetworkX graph whose edges point from parent to child."""
        return cls(readers.from_networkx(graph), root)

    @classmethod
    def from_edges(cls, pairs: Iterable[tuple[str, str | None]], root: str | None = None) -> Taxonomy:
        """(child, parent) pairs; a parent of None declares a root."""
        return cls(readers.from_edges(pairs), root)

    @classmethod
    def from_wordnet(
        cls,
        path: PathLike | None = None,
        pos: Literal["noun", "verb"] = "noun",
        names: Literal["lemma", "wnid"] = "lemma",
        root: str | None = None,
    ) -> Taxonomy:
        """WordNet's hypernyms from its database files (NLTK's corpus or Debian's wordnet-base where no path is given).

        Nodes are called as NLTK does, "dog.n.01", or with names="wnid" as ImageNet does, "n02084071". Verbs have
        many roots, so they need `root`.
        """
        return cls(readers.read_wordnet(path, pos, names), root)

    @classmethod
    def load(cls, path: PathLike, root: str | None = None) -> Taxonomy:
        """Read by the ending of the file's name: .csv, .json or .txt."""
        readers_by_ending = {".csv": cls.from_csv, ".json": cls.from_json, ".txt": cls.from_text}
        return readers_by_ending[_ending(path, readers_by_ending)](path, root)

    def save(self, path: PathLike) -> None:
        """Write .csv or .json, in one step; `load` gives the same nodes, numbers and order of parents."""
        if _ending(path, (".csv", ".json")) == ".json":
            parents = {name: [self.names[j] for j in self.parents.of(i)] for i, name in enumerate(self.names)}
            write_text(path, json.dumps({"parents": parents}, indent=1, ensure_ascii=False) + "\n")
            return
        with replacing(path) as temporary, open(temporary, "w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["child", "parent"])
            writer.writerows(self.edges())

    def edges(self) -> Iterable[tuple[str, str]]:
        """(child, parent) names in order of number; the root once, with an empty parent."""
        for i, name in enumerate(self.names):
            yield from ((name, self.names[j]) for j in self.parents.of(i))
            if i == self.root:
                yield name, ""

    # Names and numbers

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self._number

    def __repr__(self) -> str:
        kind = "tree" if self.is_tree else "DAG"
        return f"Taxonomy({kind}, {len(self):,} nodes, {len(self.leaves):,} leaves, depth {int(self.depth.max())})"

    @property
    def leaf_names(self) -> list[str]:
        """Names of the leaves, in order of number: the default order of a classifier's classes."""
        return [self.names[i] for i in self.leaves]

    def ids(self, nodes: Nodes, argument: str = "nodes") -> np.ndarray:
        """Names or numbers, in any nesting, as an array of numbers; what is unknown is refused by name."""
        if isinstance(nodes, torch.Tensor):
            nodes = nodes.detach().cpu().numpy()
        given = np.asarray(nodes)
        if given.size == 0:
            return np.zeros(given.shape, np.int64)
        if given.dtype.kind in "iu":
            wrong = given[(given < 0) | (given >= len(self))]
            if wrong.size:
                raise UsageError(
                    f"{argument}: node {int(wrong.flat[0])} is out of range, the nodes are 0 … {len(self) - 1}"
                )
            return given.astype(np.int64)
        if given.dtype.kind not in "UO":
            raise UsageError(f"{argument} must be names or numbers of nodes, got an array of {given.dtype}")
        found = [self._number.get(name, -1) for name in given.ravel().tolist()]
        if -1 in found:
            name = given.flat[found.index(-1)]
            raise UsageError(f"{argument}: {str(name)!r} is not a node of the taxonomy; {self._hint(str(name))}")
        return np.array(found, np.int64).reshape(given.shape)

    def leaf_ids(self, leaves: Nodes, argument: str = "leaves") -> np.ndarray:
        """`ids` of leaves (C); inner nodes and repetitions are refused by name."""
        numbers = self.ids(leaves, argument)
        inner = numbers[self.children.counts()[numbers] > 0]
        if inner.size:
            raise UsageError(f"{argument}: {self.names[inner[0]]!r} is not a leaf; restrict() can make it one")
        values, counts = np.unique(numbers, return_counts=True)
        if (counts > 1).any():
            raise UsageError(f"{argument}: {self.names[values[counts > 1][0]]!r} is named {counts.max()} times")
        return numbers

    def _hint(self, name: str) -> str:
        return nearest(name, self.names) if len(self) <= 10_000 else f"there are {len(self):,} nodes"

    # Structure

    @cached_property
    def height(self) -> np.ndarray:
        """Edges on the longest way down to a leaf: (N), 0 at leaves."""
        return graph.heights(self.order, self.children)

    @cached_property
    def ancestors(self) -> Sparse:
        """Row i holds ones at A(i): sparse (N, N), int32."""
        from scipy.sparse import csr_array

        if self.is_tree and (pairs := int(self.ancestor_counts.sum())) > LARGEST_CLOSURE:
            raise self._too_many(f"{pairs:,} pairs of a node and its ancestor; at most")
        found = self._kept or ancestry.closure(self.parents, LARGEST_CLOSURE)
        if found is None:
            raise self._too_many("more pairs of a node and its ancestor than the")
        return csr_array((np.ones(len(found.items), np.int32), found.items, found.start), shape=(len(self),) * 2)

    def _too_many(self, pairs: str) -> LeafwardError:
        return LeafwardError(
            f"this taxonomy of {len(self):,} nodes, {int(self.longest_depth.max()):,} deep, has {pairs} "
            f"{LARGEST_CLOSURE:,} that can be kept"
        )

    @cached_property
    def _kept(self) -> ancestry.Forebears | None:
        return None if self.is_tree else ancestry.closure(self.parents, KEPT)

    @cached_property
    def _tree(self) -> ancestry.Tree:
        return ancestry.Tree(self.first_parent, self.depth, self.order)

    @cached_property
    def ancestor_counts(self) -> np.ndarray:
        """|A(i)|: (N)."""
        if self.is_tree:
            return self.depth + 1
        return np.diff(self.ancestors.indptr).astype(np.int64)

    @cached_property
    def descendants(self) -> Sparse:
        """Row i holds ones at the nodes under i and at i itself: sparse (N, N), int32."""
        return self.ancestors.T.tocsr()

    @cached_property
    def _low_first(self) -> tuple[np.ndarray, np.ndarray]:
        """The nodes by height, then depth (deep first), then number: (N), and the place of each in that order: (N)."""
        order = np.lexsort((np.arange(len(self)), -self.longest_depth, self.height))
        return order, np.argsort(order)

    def under(self, node: Nodes) -> np.ndarray:
        """Numbers of a node and everything below it, ascending."""
        return ancestry.reach(self.children, self.ids(node, "node").reshape(1))

    def entails(self, general: Nodes, specific: Nodes) -> np.ndarray:
        """Whether `general` is in A(`specific`), pair by pair: (P), (P) -> (P) booleans; a node entails itself."""
        above, below = np.broadcast_arrays(self.ids(general, "general"), self.ids(specific, "specific"))
        if self.is_tree:
            return self._tree.entails(above, below)
        found = np.zeros(above.size, bool)
        for part in self.shared(below.ravel(), below.ravel()):
            found[part.which.start + part.pair[part.node == above.ravel()[part.which][part.pair]]] = True
        return found.reshape(above.shape)

    def shared(self, a: np.ndarray, b: np.ndarray) -> Iterator[ancestry.Shared]:
        """A(a_p) ∩ A(b_p) for numbers (P), (P), with the edges up from both, some pairs at a time."""
        return ancestry.shared(self.parents, self._kept, a, b)

    def lca(self, a: Nodes, b: Nodes) -> np.ndarray:
        """Lowest common ancestor, pair by pair: (P), (P) -> numbers (P).

        On a DAG: the common ancestor of least height, of these the deepest, of these the first.
        """
        first, second = np.broadcast_arrays(self.ids(a, "a"), self.ids(b, "b"))
        if self.is_tree:
            return self._tree.lca(first.ravel(), second.ravel()).reshape(first.shape)
        order, place = self._low_first
        found = np.zeros(first.size, np.int64)
        for part in self.shared(first.ravel(), second.ravel()):
            found[part.which] = order[part.least(place[part.node])]
        return found.reshape(first.shape)

    def distance(self, a: Nodes, b: Nodes) -> np.ndarray:
        """Edges on the shortest way from a up to a common ancestor and down to b: (P), (P) -> (P).

        On a tree it is the length of the only path.
        """
        first, second = np.broadcast_arrays(self.ids(a, "a"), self.ids(b, "b"))
        if self.is_tree:
            return self.depth[first] + self.depth[second] - 2 * self.depth[self.lca(first, second)]
        found = np.zeros(first.size, np.int64)
        for part in self.shared(first.ravel(), second.ravel()):
            found[part.which] = part.least(part.ways)
        return found.reshape(first.shape)

    def paths(self, nodes: Nodes = None) -> np.ndarray:
        """A shortest way from the root to each node (default: each leaf): (P) -> (P, depth + 1), padded with −1."""
        ends = self.leaves if nodes is None else self.ids(nodes).ravel()
        way = np.full((len(ends), int(self.depth[ends].max(initial=0)) + 1), -1, np.int64)
        node, row = ends.copy(), np.arange(len(ends))
        while len(row):
            way[row, self.depth[node]] = node
            climbing = self.depth[node] > 0
            node, row = self.first_parent[node[climbing]], row[climbing]
        return way

    @cached_property
    def first_parent(self) -> np.ndarray:
        """The first parent on a shortest way to the root: (N); −1 at the root."""
        up = np.full(len(self), -1, np.int64)
        child, parent = self.parents.expand(np.arange(len(self)))
        near = self.depth[parent] == self.depth[child] - 1
        up[child[near][::-1]] = parent[near][::-1]  # the first wins, being written last
        return up

    # Parts

    def subtree(self, node: Nodes) -> Taxonomy:
        """The taxonomy of a node and everything below it; parents outside it are dropped."""
        return self._part(self.under(node), int(self.ids(node, "node")))

    def restrict(self, nodes: Nodes) -> Taxonomy:
        """The taxonomy of the given nodes and their ancestors; a given node with none of the others below is a leaf."""
        chosen = self.ids(nodes).ravel()
        if not chosen.size:
            raise UsageError("nodes: at least one is needed")
        return self._part(ancestry.reach(self.parents, chosen), self.root)

    def _part(self, keep: np.ndarray, root: int) -> Taxonomy:
        inside = np.zeros(len(self), bool)
        inside[keep] = True
        edges = Edges("part of a taxonomy")
        for i in keep:
            if i == root:
                edges.declare_root(self.names[i])
            else:
                for j in self.parents.of(i)[inside[self.parents.of(i)]]:
                    edges.connect(self.names[i], self.names[j])
        return Taxonomy(edges)


def _describe_cycle(edges: Edges, cycle: list[str]) -> str:
    pairs = list(zip(cycle, [*cycle[1:], cycle[0]], strict=True))
    lines = [edges.line_of(child, parent) for child, parent in pairs]
    more = ", …" if len(lines) > 8 else ""
    where = "" if None in lines else " (lines " + ", ".join(str(line) for line in lines[:8]) + more + ")"
    shown = [*cycle, cycle[0]] if len(cycle) <= 8 else [*cycle[:8], "…", cycle[0]]
    return f"{edges.source}: cycle: " + " under ".join(repr(name) for name in shown) + where


def _ending(path: PathLike, allowed: Iterable[str]) -> str:
    ending = Path(path).suffix.lower()
    if ending not in allowed:
        raise UsageError(f"path must end in {' or '.join(allowed)}, got {str(path)!r}")
    return ending
