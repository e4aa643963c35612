"""Answers in a taxonomy from the probabilities of classes; they may be inner nodes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from leafward.hierarchy import Taxonomy, decide

SURE = 0.5
"""Probability of the node that the back-off answers with."""


def decided(tax: Taxonomy, probabilities: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
    """Nodes (B) from probabilities (B, C) of the classes `names`: that of least expected distance to the truth, and the
    deepest one with a probability of at least `SURE`."""
    classes = list(names)
    return {
        "least_expected_distance": decide.expected_cost(tax, probabilities, "distance", classes, range(len(tax))),
        "backed_off": decide.back_off(tax, probabilities, SURE, classes),
    }
