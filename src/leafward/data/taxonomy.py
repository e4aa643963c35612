"""Taxonomies as users name them: a file, WordNet, or the part of WordNet above the classes of data sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from leafward.errors import DataError, named
from leafward.hierarchy import Taxonomy

SENSE = ".n.01"
"""What WordNet puts after a noun in its first sense."""


def of_wordnet(source: str | Path) -> bool:
    """Whether WordNet is meant, and not a file that is called so."""
    return str(source).partition(":")[0] == "wordnet" and not Path(source).exists()


def read_taxonomy(source: str | Path, root: str | None = None) -> Taxonomy:
    """A .csv, .json or .txt file, ``wordnet`` (its nouns) or ``wordnet:NODE`` (the nouns under that node)."""
    if not of_wordnet(source):
        return Taxonomy.load(source, root)
    whole, (_, colon, node) = Taxonomy.from_wordnet(), str(source).partition(":")
    with named(source):
        return whole.subtree(node) if colon else whole


def class_taxonomy(source: str | Path, *sets: Sequence[str]) -> Taxonomy:
    """The taxonomy that `source` names, for the class names of one or several data sets.

    A file is taken as it is. Of ``wordnet`` or ``wordnet:NODE`` the classes and their ancestors are kept; a class is
    found by the name of its synset (dog.n.01), or as the first sense of its own name (dog), which its node then has.
    At least one of the sets must have all its classes in the taxonomy.
    """
    tax, wordnet = read_taxonomy(source), of_wordnet(source)
    nodes = {name: _first_sense(name) if wordnet and name not in tax else name for each in sets for name in each}
    covered = [each for each in sets if all(nodes[name] in tax for name in each)]
    if not covered:
        missing = sorted({name for name in sets[0] if nodes[name] not in tax})
        raise DataError(f"{source} lacks {len(missing)} of the classes, for example {missing[0]!r}")
    return _part(tax, {name: nodes[name] for each in covered for name in each}, source) if wordnet else tax


def _first_sense(name: str) -> str:
    return "_".join(name.lower().split()) + SENSE


def _part(tax: Taxonomy, nodes: Mapping[str, str], source: str | Path) -> Taxonomy:
    """The nodes of classes and their ancestors, the nodes called as the classes are."""
    classes: dict[str, str] = {}
    for name, node in nodes.items():
        if classes.setdefault(node, name) != name:
            raise DataError(f"{source}: the classes {classes[node]!r} and {name!r} are the same node {node!r}")
    part = tax.restrict(list(classes))
    edges = ((classes.get(child, child), classes.get(parent, parent) or None) for child, parent in part.edges())
    return Taxonomy.from_edges(edges)
