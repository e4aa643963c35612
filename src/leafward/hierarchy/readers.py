"""Formats in which taxonomies come, each read into the same thing: names and (child, parent) edges with their places.

Nothing is judged here but the format itself and repeated edges; cycles, several roots and the like are found when
a `leafward.hierarchy.Taxonomy` is built, which points back to the line through `Edges.place`.
"""

from __future__ import annotations

import csv
import importlib
import json
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from leafward.errors import DataError, UsageError
from leafward.files import read_text as text_of

if TYPE_CHECKING:
    from networkx import DiGraph

PathLike = str | os.PathLike[str]
DEBIAN_WORDNET = Path("/usr/share/wordnet")


class Edges:
    """Names with their numbers and the edges between them, collected one by one.

    Numbers follow the order of *declaration* (a name on the left, or alone), then that of first mention as a
    parent; so what is saved in order of number is read back with the same numbers.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self._declared: dict[str, int | None] = {}  # name -> line
        self._mentioned: dict[str, int | None] = {}
        self._edges: dict[tuple[str, str], int | None] = {}
        self._roots: dict[str, int | None] = {}  # if any is declared, every node must be

    def place(self, line: int | None) -> str:
        """Where something stands, for an error: "file, line 3"."""
        return self.source if line is None else f"{self.source}, line {line}"

    def declare(self, name: object, line: int | None = None) -> str:
        """Note a node; returns its name."""
        text = self._checked(name, line)
        self._declared.setdefault(text, line)
        return text

    def declare_root(self, name: object, line: int | None = None) -> None:
        """Note a node that has no parent."""
        root = self.declare(name, line)
        if root in self._roots:
            first = self._roots[root]
            also = "" if first is None else f", first on line {first}"
            raise DataError(f"{self.place(line)}: duplicate row: the root {root!r}{also}")
        self._roots[root] = line

    def declare_once(self, name: object, line: int | None = None) -> str:
        """Note a node in a format where each name stands once."""
        text = self._checked(name, line)
        if text in self._declared:
            first = self._declared[text]
            also = "" if first is None else f", first on line {first}"
            raise DataError(f"{self.place(line)}: the name {text!r} stands here a second time{also}; names must differ")
        return self.declare(text, line)

    def connect(self, child: object, parent: object, line: int | None = None) -> None:
        """Note that `parent` stands above `child`, and `child` itself if it is new."""
        below, above = self.declare(child, line), self._checked(parent, line)
        if (below, above) in self._edges:
            first = self._edges[below, above]
            also = "" if first is None else f", first on line {first}"
            raise DataError(f"{self.place(line)}: duplicate row: {below!r} under {above!r}{also}")
        self._edges[below, above] = line
        self._mentioned.setdefault(above, line)

    def names(self) -> list[str]:
        """All names in the order of their numbers; a parent that should have been declared is refused."""
        if not self._declared:
            raise DataError(f"{self.source}: holds no node")
        for (child, parent), line in self._edges.items():
            if child in self._roots:
                raise DataError(f"{self.place(line)}: {child!r} stands under {parent!r}, but is declared a root")
            if self._roots and parent not in self._declared:
                raise DataError(
                    f"{self.place(line)}: orphan {child!r}: its parent {parent!r} is unknown "
                    "(a root is declared in this source, so every parent must have its own entry)"
                )
        return list(dict.fromkeys([*self._declared, *self._mentioned]))

    def line_of(self, child: str, parent: str) -> int | None:
        """The line on which an edge stands, where there is a file."""
        return self._edges[child, parent]

    def arrays(self, number: Mapping[str, int]) -> tuple[np.ndarray, np.ndarray]:
        """Children (E) and parents (E) as numbers, in order of appearance."""
        pairs = np.array([(number[below], number[above]) for below, above in self._edges], np.int64).reshape(-1, 2)
        return pairs[:, 0], pairs[:, 1]

    def _checked(self, name: object, line: int | None) -> str:
        if not isinstance(name, str):
            raise DataError(f"{self.place(line)}: a node's name must be text, got {name!r}")
        text = name.strip()
        if not text:
            raise DataError(f"{self.place(line)}: a node's name is empty")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{self.place(line)}: the name {text!r} holds half a character, which is no text"
            ) from error
        return text


def from_edges(pairs: Iterable[tuple[str, str | None]], source: str = "edges") -> Edges:
    """(child, parent) pairs; a parent of None or "" declares a root."""
    edges = Edges(source)
    for child, parent in pairs:
        _row(edges, child, parent, None)
    return edges


def _row(edges: Edges, child: str, parent: str | None, line: int | None) -> None:
    if parent is None or (isinstance(parent, str) and not parent.strip()):
        edges.declare_root(child, line)
    else:
        edges.connect(child, parent, line)


def read_csv(path: PathLike) -> Edges:
    """Rows ``child,parent``; a header with these two words, in either order, is obeyed. One row for each parent.

    An empty parent declares a root; then every parent must have a row of its own. Without such a row, the names
    that never stand as a child are the roots.
    """
    edges, swap = Edges(str(path)), False
    for position, (line, row) in enumerate(_csv_rows(path)):
        if len(row) != 2:
            raise DataError(f"{edges.place(line)}: expected two fields, child and parent, got {len(row)}: {row!r}")
        words = [field.strip().lower() for field in row]
        if position == 0 and sorted(words) == ["child", "parent"]:
            swap = words[0] == "parent"
            continue
        child, parent = reversed(row) if swap else row
        _row(edges, child, parent, line)
    return edges


def _csv_rows(path: PathLike) -> Iterator[tuple[int, list[str]]]:
    with _opened(path) as file:
        reader = csv.reader(file, strict=True)
        try:
            yield from ((reader.line_num, row) for row in reader if row)
        except csv.Error as error:
            raise DataError(f"{path}, line {reader.line_num}: not readable as CSV: {error}") from error


def read_text(path: PathLike) -> Edges:
    """One name on each line, indented deeper than its parent (spaces or tabs, used alike throughout)."""
    edges, stack = Edges(str(path)), list[tuple[str, str]]()  # (indentation, name) from the root to the last line
    with _opened(path) as file:
        for line, raw in enumerate(file, start=1):
            name = raw.strip()
            if not name:
                continue
            indent, left = raw[: len(raw) - len(raw.lstrip())], None
            while stack and not (indent != stack[-1][0] and indent.startswith(stack[-1][0])):
                left = stack.pop()[0]
            if left is not None and left != indent:
                raise DataError(f"{edges.place(line)}: the indentation of {name!r} fits no line above it")
            edges.declare_once(name, line)
            if stack:
                edges.connect(name, stack[-1][1], line)
            else:
                edges.declare_root(name, line)
            stack.append((indent, name))
    return edges


def read_json(path: PathLike) -> Edges:
    """See `from_nested`; also the layout ``{"parents": {child: [parent, …]}}``, in which DAGs are saved."""
    with _opened(path) as file:
        try:
            tree = json.load(file, object_pairs_hook=_no_repeats)
        except _RepeatedKey as error:
            raise DataError(
                f"{path}: the name {error.args[0]!r} stands twice in one object; names must differ"
            ) from None
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}: not readable as JSON: {error}") from error
    if isinstance(tree, dict) and set(tree) == {"parents"} and isinstance(tree["parents"], dict):
        return _from_parents(tree["parents"], str(path))
    return from_nested(tree, str(path))


class _RepeatedKey(Exception):
    """json.load would silently keep the last of two equal keys."""


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        times = Counter(key for key, _ in pairs)
        raise _RepeatedKey(next(key for key in times if times[key] > 1))
    return found


def _from_parents(parents: Mapping[str, Any], source: str) -> Edges:
    edges = Edges(source)
    for child, above in parents.items():
        if not isinstance(above, list):
            raise DataError(f"{source}: the parents of {child!r} must be a list of names, got {above!r}")
        for parent in above:
            edges.connect(child, parent)
        if not above:
            edges.declare_root(child)
    return edges


def from_nested(tree: Any, source: str = "nested mapping") -> Edges:
    """A nested mapping ``{"animal": {"dog": {}, "cat": ["tabby"]}}``, or ``{"name": …, "children": [ … ]}`` objects.

    Values are mappings, lists of names or objects, or nothing (None) for a leaf. Each name stands once.
    """
    edges = Edges(source)
    waiting: deque[tuple[Any, str | None]] = deque([(tree, None)])
    while waiting:
        value, parent = waiting.popleft()
        for name, below in _members(value, parent, source):
            text = edges.declare_once(name)
            if parent is None:
                edges.declare_root(text)
            else:
                edges.connect(text, parent)
            waiting.append((below, text))
    return edges


def _members(value: Any, parent: str | None, source: str) -> Iterator[tuple[Any, Any]]:
    """The (name, what is below it) pairs of one level."""
    if value is None:
        return
    if isinstance(value, Mapping):
        if "name" in value and set(value) <= {"name", "children"}:
            yield value["name"], value.get("children")
        else:
            yield from value.items()
    elif isinstance(value, list | tuple):
        for item in value:
            if isinstance(item, Mapping):
                yield from _members(item, parent, source)
            else:
                yield item, None
    else:
        where = "at the top" if parent is None else f"under {parent!r}"
        raise DataError(f"{source}: expected a mapping or a list of names {where}, got {value!r}")


def from_superclasses(groups: Mapping[str, Iterable[str]] | PathLike, source: str = "superclasses") -> Edges:
    """Two levels, ``{"superclass": ["class", …]}`` as CIFAR-100 and BREEDS come; a mapping or a JSON file of it."""
    if isinstance(groups, str | os.PathLike):
        return read_json(groups)
    for superclass, classes in groups.items():
        if isinstance(classes, str):
            raise DataError(
                f"{source}: the classes of {superclass!r} must be a list of names, got the text {classes!r}"
            )
    return from_nested({superclass: list(classes) for superclass, classes in groups.items()}, source)


def from_networkx(graph: DiGraph, source: str = "graph") -> Edges:
    """A directed NetworkX graph whose edges point from parent to child and whose nodes are text."""
    if not hasattr(graph, "is_directed") or not graph.is_directed():
        raise UsageError(f"graph must be a directed NetworkX graph, parent → child, got {type(graph).__name__}")
    edges = Edges(source)
    for node in graph.nodes:
        edges.declare(node)
        for parent in graph.predecessors(node):
            edges.connect(node, parent)
    return edges


def read_wordnet(
    path: PathLike | None, pos: Literal["noun", "verb"] = "noun", names: Literal["lemma", "wnid"] = "lemma"
) -> Edges:
    """Hypernyms (and instance hypernyms) of WordNet's database files ``data.POS`` and ``index.POS``.

    `names`: "lemma" gives NLTK's names ("dog.n.01"), "wnid" ImageNet's ("n02084071"). Without a path: NLTK's
    corpus where NLTK has it, else Debian's wordnet-base.
    """
    if pos not in ("noun", "verb"):
        raise UsageError(f"pos must be 'noun' or 'verb', got {pos!r}")
    if names not in ("lemma", "wnid"):
        raise UsageError(f"names must be 'lemma' or 'wnid', got {names!r}")
    opened = _wordnet() if path is None else lambda name: _opened(Path(path) / name)
    letter = pos[0]
    edges, name_of, above = Edges(f"WordNet's data.{pos}"), {}, []
    senses = _senses(opened(f"index.{pos}")) if names == "lemma" else {}
    for line, text in enumerate(opened(f"data.{pos}"), start=1):
        if text.startswith("  "):  # the licence
            continue
        try:
            offset, lemma, hypernyms = _synset(text)
            name = f"{letter}{offset}" if names == "wnid" else f"{lemma}.{letter}.{senses[lemma, offset]:02d}"
        except (ValueError, IndexError, KeyError) as error:
            raise DataError(f"{edges.place(line)}: not a line of WordNet's database: {text[:60]!r}") from error
        name_of[offset] = edges.declare_once(name, line)
        above.append((name, hypernyms, line))
    for name, hypernyms, line in above:
        for offset in dict.fromkeys(hypernyms):
            if offset not in name_of:
                raise DataError(f"{edges.place(line)}: orphan {name!r}: its hypernym {offset} is unknown")
            edges.connect(name, name_of[offset], line)
    return edges


def _wordnet() -> Callable[[str], Iterable[str]]:
    """Opens a file of the WordNet that this machine has: NLTK's (which may be zipped), else Debian's."""
    try:
        corpus = importlib.import_module("nltk.corpus").wordnet
        corpus.ensure_loaded()
        return lambda name: StringIO(corpus.open(name).read())
    except (ImportError, LookupError):
        pass
    if (DEBIAN_WORDNET / "data.noun").is_file():
        return lambda name: _opened(DEBIAN_WORDNET / name)
    raise DataError(
        f"WordNet was found neither in NLTK's data nor in {DEBIAN_WORDNET}; give path, the folder that holds "
        "data.noun and index.noun, or install it: apt install wordnet-base, or nltk.download('wordnet')"
    )


def _synset(text: str) -> tuple[str, str, list[str]]:
    """Offset, first word in lower case, and offsets of the hypernyms ("@", "@i") of one line of data.POS (wndb(5))."""
    fields = text.partition("|")[0].split()
    words = int(fields[3], 16)
    first = 4 + 2 * words
    pointers = [fields[first + 1 + 4 * i : first + 5 + 4 * i] for i in range(int(fields[first]))]
    return fields[0], fields[4].lower(), [offset for symbol, offset, _, _ in pointers if symbol in ("@", "@i")]


def _senses(lines: Iterable[str]) -> dict[tuple[str, str], int]:
    """(lemma, offset) -> number of the sense, from 1, of index.POS: the offsets end the line in order of sense."""
    found = {}
    for text in lines:
        if not text.startswith("  "):
            fields = text.split()
            for sense, offset in enumerate(fields[-int(fields[2]) :], start=1):
                found[fields[0], offset] = sense
    return found


def _opened(path: PathLike) -> StringIO:
    return StringIO(text_of(path), newline="")
