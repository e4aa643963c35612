"""Radial Embedding: a text encoder taught that the specific lies behind the general, seen from a root.

Alper & Averbuch-Elor, "Emergent Visual-Semantic Hierarchies in Image-Text Representations" (ECCV 2024). With unit
embeddings e and a root r (the embedding of the empty text), the exterior angle at a general text e of another e' is

    Ξ_r(e, e') = ∠(e − r, e' − e),

small where e' lies straight behind e. A triple (general, specific, negative) has a positive angle Ξ⁺ = Ξ_r(general,
specific) and a negative one Ξ⁻ = Ξ_r(general, negative). The loss of a batch of T triples is

    10 · pull + (mean Ξ⁺ − mean Ξ⁻) + (Ξ⁺ − Ξ⁻ at the largest Ξ⁺) + (Ξ⁺ − Ξ⁻ at the smallest Ξ⁻),

where pull = mean (1 − cos(e, e_frozen))/2 holds all texts near the frozen model. The rival is the entailment-cone
loss (Ganea et al. 2018, eq. 32): how far a specific text lies outside the cone of its general one, and how far a
negative lies inside it. Both know a flat space about the root and a hyperbolic one whose origin is the root.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from leafward.config import checked
from leafward.encoders.encoder import Encoder
from leafward.engine import Cluster
from leafward.geometry import cones, euclidean, lorentz
from leafward.systems.radial.objective import Geometry, RadialConfig


class Triples(NamedTuple):
    """Embeddings of T triples and their roots, each (T, d)."""

    general: Tensor
    specific: Tensor
    negative: Tensor
    root: Tensor


class Terms(NamedTuple):
    """The parts of a loss, scalars; `total` is their weighted sum."""

    total: Tensor
    pull: Tensor
    contrast: Tensor
    hardest: Tensor


def exterior_angle(
    general: Tensor, other: Tensor, root: Tensor, geometry: Geometry = "euclidean", c: float = 1.0
) -> Tensor:
    """Ξ_r(general, other): three (..., d) -> (...) in [0, π]; gradients are finite everywhere.

    In the hyperbolic space e stands for the point at the end of the geodesic that leaves the origin along e − r.
    """
    if geometry == "euclidean":
        return cones.flat_exterior_angle(general, other, root)
    return cones.exterior_angle(lorentz.expmap0(general - root, c), lorentz.expmap0(other - root, c), c)


def radius(embedding: Tensor, root: Tensor) -> Tensor:
    """Distance from the root, small for the general: (..., d), (..., d) -> (...). It is the same in both geometries."""
    return euclidean.dist(embedding, root)


def angle_contrast(positive: Tensor, negative: Tensor, cluster: Cluster | None = None) -> tuple[Tensor, Tensor]:
    """(mean Ξ⁺ − mean Ξ⁻, Ξ⁺ − Ξ⁻ summed over the two hardest triples): angles (T), (T) -> two scalars.

    The ranks of a `cluster` get the parts of these numbers that come from their own triples.
    """
    cluster = cluster or Cluster()
    gap = positive - negative
    hardest = gap.gather(0, torch.stack([positive.argmax(), negative.argmin()]))
    if cluster.world > 1:
        extremes = cluster.gather((float(positive.detach().max()), -float(negative.detach().min())))
        owners = [max(range(cluster.world), key=lambda rank, i=i: extremes[rank][i]) for i in range(2)]
        hardest = hardest * gap.new_tensor([owner == cluster.rank for owner in owners])
    return cluster.parts(len(gap))[0] * gap.mean(), hardest.sum()


def cone_loss(triples: Triples, config: RadialConfig) -> Tensor:
    """Ganea et al. (2018), eq. 32, as means: E⁺ + max(0, margin − E⁻) with E = max(0, Ξ − half-aperture): scalar."""
    positive, negative = angles(triples, config)
    reach = triples.general - triples.root
    c = None if config.geometry == "euclidean" else config.c
    half = cones.half_aperture(reach if c is None else lorentz.expmap0(reach, c), c, config.aperture)
    outside = torch.relu(positive - half)
    inside = torch.relu(config.margin - torch.relu(negative - half))
    return outside.mean() + inside.mean()


def angles(triples: Triples, config: RadialConfig) -> tuple[Tensor, Tensor]:
    """Positive and negative exterior angles: (T), (T)."""
    about = {"root": triples.root, "geometry": config.geometry, "c": config.c}
    return (
        exterior_angle(triples.general, triples.specific, **about),
        exterior_angle(triples.general, triples.negative, **about),
    )


def pull(embedding: Tensor, frozen: Tensor) -> Tensor:
    """Mean of (1 − cos)/2 between unit vectors (M, d), (M, d): scalar."""
    return (1.0 - (embedding * frozen).sum(dim=-1)).mean() / 2.0


def radial_loss(
    triples: Triples, embedding: Tensor, frozen: Tensor, config: RadialConfig, cluster: Cluster | None = None
) -> Terms:
    """The loss of a batch: T triples, and all its M texts before and now, (M, d), (M, d).

    The ranks of a `cluster` share the batch: each gets the part of the loss that comes from its own triples and texts.
    """
    cluster = cluster or Cluster()
    texts, share = cluster.parts(len(embedding), len(triples.general))
    held = texts * pull(embedding, frozen)
    if config.loss == "cone":
        contrast = share * cone_loss(triples, config)
        hardest = torch.zeros_like(contrast)
    else:
        contrast, hardest = angle_contrast(*angles(triples, config), cluster)
    total = config.pull * held + config.contrast * contrast + config.hardest * hardest
    return Terms(total, held, contrast, hardest)


class RadialModel(nn.Module):
    """An encoder and the roots that its angles are taken about; this is what is trained.

    Learned roots are free vectors (R, d) that start at the embeddings of their texts; otherwise a root is its text's
    embedding at every step.
    """

    def __init__(self, encoder: Encoder, config: RadialConfig, root_texts: Sequence[str] = ("",)) -> None:
        super().__init__()
        config = checked(RadialConfig, config)
        self.encoder, self.root_texts = encoder, tuple(root_texts)
        start = encoder.encode_text(self.root_texts) if config.root == "learned" else None
        self.free_roots = None if start is None else nn.Parameter(start.clone())

    def forward(self, tokens: Mapping[str, Tensor]) -> Tensor:
        """Unit embeddings of tokenised texts, with their gradient: (N, L) -> (N, d)."""
        return self.encoder.text_features(tokens)

    @torch.no_grad()
    def roots(self) -> Tensor:
        """The roots as they stand: unit vectors (R, d)."""
        return self.encoder.encode_text(self.root_texts) if self.free_roots is None else self.learned_roots()

    def learned_roots(self) -> Tensor:
        """The free roots as unit vectors with their gradient: (R, d)."""
        assert self.free_roots is not None
        return nn.functional.normalize(self.free_roots, dim=-1)

    def no_weight_decay(self) -> set[str]:
        """A root is a place, not a weight."""
        return {"free_roots"}
