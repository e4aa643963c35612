"""Where the nodes of a taxonomy lie whose leaves have features: each at the centroid of the leaves below it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from leafward.geometry import Lorentz
from leafward.hierarchy.taxonomy import Taxonomy


def filed(tree: Taxonomy, leaves: Sequence[str], features: Tensor, radius: float) -> Tensor:
    """Tangent vectors of the nodes (N, d) in hyperbolic space, from features (len(leaves), d).

    A feature gives a leaf its direction; all leaves lie at the same `radius` from the origin. A node lies at the
    Lorentz centroid of the leaves below it, so the more it spans, the nearer it comes to the origin.
    """
    space = Lorentz(1.0)
    points = space.expmap0(radius * torch.nn.functional.normalize(features.double()))
    place = np.full(len(tree), -1)
    place[tree.ids(leaves)] = np.arange(len(leaves))
    below = [place[tree.under(node)] for node in range(len(tree))]
    centres = torch.stack([space.centroid(points[rows[rows >= 0]]) for rows in below])
    return space.logmap0(centres).float()
