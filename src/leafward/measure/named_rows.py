"""The rows of a target that have names, with their radii: tokens of a vocabulary, classes of a feature file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from leafward.data.fewshot import ENDINGS, read_feature_set
from leafward.errors import DataError, UsageError
from leafward.hierarchy import Taxonomy
from leafward.measure.levels import Levels, radius_by_level
from leafward.measure.moments import Rows
from leafward.measure.targets import Entry, Found, open_target

CLASSES = "text_features"


def named_radii(target: str, tensor: str | None, taxonomy: Taxonomy, below: int | None) -> dict[str, Levels]:
    """Radius against depth for each matrix of a target whose rows are named; refused where there is none."""
    found = open_target(target)
    compared = {}
    for name, entry in found.chosen(tensor).items():
        names = _names(found, entry)
        if names is not None:
            compared[name] = radius_by_level(radii(entry), names, taxonomy, below)
    if not compared:
        raise UsageError(
            f"--taxonomy: no matrix of {target} has rows with names; it needs an embedding with a tokenizer beside it, "
            "or a feature file"
        )
    return compared


def _names(found: Found, entry: Entry) -> Sequence[str] | None:
    if entry.name == CLASSES and found.label.endswith(ENDINGS) and Path(found.label).is_file():
        try:
            return read_feature_set(found.label).class_names
        except DataError:
            return None
    tokens = found.tokens()
    # A vocabulary names the rows of the matrices that have one for each of its tokens.
    return tokens if tokens is not None and abs(entry.used - len(tokens)) <= len(tokens) // 50 else None


def radii(entry: Entry) -> np.ndarray:
    """The length of each row, or its distance from the origin on the hyperboloid: asinh(√c |s|)/√c."""
    reader = entry.open()
    parts = [np.linalg.norm(block.astype(np.float64), axis=1) for _, block in Rows(reader, entry.used).slices()]
    lengths = np.concatenate(parts)
    if entry.curvature is None:
        return lengths
    root = entry.curvature**0.5
    return np.arcsinh(root * lengths) / root
