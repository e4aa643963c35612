"""LatHAdapter (arXiv 2508.11176): learned attributes between images and classes, on top of any prompt-learning host.

Notation: images z (B, d), classes T (C, d), attributes A (N, d), all tangent vectors at the origin of the Poincaré
ball; distances by the isometric Lorentz points in float32 or better. The two parts are

- ATR, `refine`: classes look at the attributes through a normalised affinity graph;
- HHL, `hierarchy_loss`: two neighbours and a stranger; the common ancestor of the neighbours should be nearer to
  them than the common ancestor of all three, and farther from the stranger (the loss of HIER, Kim et al. 2023).

The paper's plain forms fail in two ways that are fixed here: signed affinities give negative degrees (NaN), and
triplets mined in a batch of 4 have the anchor or nothing as their negative.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from leafward.adapters.surface import Adapter, AdapterConfig, adapters
from leafward.config import Natural, Several
from leafward.encoders.scores import distances
from leafward.errors import UsageError
from leafward.geometry import pairs
from leafward.geometry.curvature import Curvature
from leafward.geometry.scalars import wide
from leafward.systems.lathadapter.hierarchy import HierarchyConfig
from leafward.systems.lathadapter.prompts.host import Host, Output, cosine

LARGEST = 100.0  # factor between a learned c and where it begins


class LatentHierarchyConfig(HierarchyConfig, AdapterConfig, frozen=True):
    """LatHAdapter on a prompt-learning host."""

    method: ClassVar[str] = "latent_hierarchy"

    attributes: Several = 20
    """Number of learned attributes N."""
    geometry: Literal["lorentz", "euclidean"] = "lorentz"
    """Hyperbolic distances, or the twin with Euclidean ones and the same parameters."""
    seed: Natural = 0
    """Seed of the attributes' beginning."""

    @property
    def curvature(self) -> float | None:
        """c, or None for the Euclidean twin."""
        return self.c if self.geometry == "lorentz" else None

    def build(self, model: nn.Module) -> LatentHierarchy:
        if not isinstance(model, Host):
            raise UsageError(f"a latent hierarchy sits on a prompt-learning host, not on a {type(model).__name__}")
        return LatentHierarchy(self, model.class_features())


class LatentHierarchy(Adapter):
    """The attributes, the queue of earlier features, and the hook that refines a host's output."""

    freezes_base = False  # the host's prompts are trained along
    config: LatentHierarchyConfig  # pyright: ignore[reportIncompatibleVariableOverride]
    queue: Tensor
    filled: Tensor

    def __init__(self, config: LatentHierarchyConfig, classes: Tensor) -> None:
        super().__init__(config)
        self.attributes = nn.Parameter(initial_attributes(classes, config.attributes, config.seed))
        c = config.curvature
        self.learned = Curvature(c, c / LARGEST, c * LARGEST) if config.learn_c and c is not None else None
        self.register_buffer("queue", torch.zeros(config.queue, classes.shape[1], device=classes.device))
        self.register_buffer("filled", torch.zeros((), dtype=torch.int64, device=classes.device))

    def install(self, model: nn.Module) -> list[RemovableHandle]:
        return [model.register_forward_hook(self._act)]

    def no_weight_decay(self) -> set[str]:
        return {"attributes"}

    @property
    def curvature(self) -> float | Tensor | None:
        """c as it is now, or None for the Euclidean twin."""
        return self.config.curvature if self.learned is None else self.learned()

    def refined(self, text: Tensor) -> Tensor:
        """The classes after ATR: (C, d) -> (C, d)."""
        config = self.config
        groups = config.groups if len(text) > config.exact else None
        return refine(text, self.attributes, config.refinement, degree=config.degree, groups=groups)

    def logits(self, image: Tensor, refined: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """cos/τ (B, C) of refined classes, and the distances (B, C) that are taken from it at inference."""
        if len(refined) > self.config.exact:
            return self._logits_of_many(wide(image), wide(refined), scale)
        return scale * cosine(image, refined), self._distances(image, refined)

    def _logits_of_many(self, image: Tensor, refined: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """The same from one product in the type of the features, with nothing of the size of the classes beside it."""
        lengths = torch.linalg.vector_norm(refined, dim=-1).clamp_min(1e-12)
        cosines = F.normalize(image, dim=-1) @ refined.mT / lengths
        radii = torch.linalg.vector_norm(image, dim=-1, keepdim=True), lengths[:, None]
        if self.config.normalise:
            radii = torch.ones_like(radii[0]), torch.ones_like(radii[1])
        # Tangents of the ball are doubled, as in `encoders.scores.distances`.
        return scale * cosines, pairs.distances_of_cosines(cosines, 2.0 * radii[0], 2.0 * radii[1], self.curvature)

    def _distances(self, x: Tensor, y: Tensor) -> Tensor:
        return distances(self._tangent(x), self._tangent(y), self.curvature)

    def _tangent(self, x: Tensor) -> Tensor:
        return F.normalize(wide(x), dim=-1) if self.config.normalise else wide(x)

    def _act(self, host: nn.Module, args: Any, output: Output) -> Output:
        if not self.enabled:
            return output
        assert isinstance(host, Host)
        refined = self.refined(output.text)
        similar, far = self.logits(output.image, refined, host.scale)
        losses = dict(output.losses)
        if output.labels is not None:
            if "cross_entropy" not in self.config.terms:
                losses.pop("cross_entropy", None)
            losses |= self._losses(output.image, refined, similar, far, output.labels)
        return replace(output, text=refined, logits=similar - far, losses=losses)

    def _losses(
        self, image: Tensor, refined: Tensor, similar: Tensor, far: Tensor, labels: Tensor
    ) -> dict[str, Tensor]:
        """Those of the four terms that are used."""
        terms, weight = self.config.terms, self.config.hierarchy_weight
        losses = {}
        if "cross_entropy" in terms:
            losses["cross_entropy"] = F.cross_entropy(similar, labels, ignore_index=-1)
        if "distance_entropy" in terms:
            losses["distance_entropy"] = F.cross_entropy(-far, labels, ignore_index=-1)
        if weight and "image_attribute" in terms:
            losses["image_attribute"] = weight * self._image_attribute(image)
        if weight and "attribute_class" in terms:
            losses["attribute_class"] = weight * self._attribute_class(refined)
        return losses

    def _image_attribute(self, image: Tensor) -> Tensor:
        """HHL with images as leaves and attributes as ancestors; the queue gives real negatives to small batches."""
        image = self._tangent(image)
        leaves = torch.cat([image, self.queue])
        used = torch.arange(len(leaves), device=image.device) < len(image) + self.filled
        loss = self._hierarchy(leaves, self.attributes, used, anchors=len(image))
        if self.training and self.config.queue:
            self._enqueue(image.detach())
        return loss

    def _attribute_class(self, refined: Tensor) -> Tensor:
        """HHL with attributes as leaves and classes as ancestors."""
        leaves = self._tangent(self.attributes)
        return self._hierarchy(leaves, refined, torch.ones(len(leaves), dtype=torch.bool, device=leaves.device))

    def _hierarchy(self, leaves: Tensor, ancestors: Tensor, used: Tensor, anchors: int | None = None) -> Tensor:
        config = self.config
        chosen, valid = sample_triplets(leaves.detach(), used, config.neighbours, config.triplets, anchors)
        if len(ancestors) > config.exact:
            ancestors = ancestors[torch.randperm(len(ancestors), device=ancestors.device)[: config.ancestors]]
        gaps = distances(leaves, self._tangent(ancestors), self.curvature)
        temperature = None if config.choice == "printed" else config.temperature
        return hierarchy_loss(gaps, chosen, valid, temperature, config.margin)

    @torch.no_grad()
    def _enqueue(self, image: Tensor) -> None:
        """Newest first; shifting a small queue is cheaper than keeping a pointer that a device must be asked for."""
        self.queue.copy_(torch.cat([image.to(self.queue), self.queue])[: len(self.queue)])
        self.filled.copy_((self.filled + len(image)).clamp(max=len(self.queue)))


class Classifier(nn.Module):
    """A trained host for a fixed list of classes, for inference: what belongs to the classes is computed once."""

    text: Tensor

    def __init__(self, host: Host, classes: Tensor | None = None) -> None:
        super().__init__()
        self.host = host
        active = [each for each in adapters(host).values() if isinstance(each, LatentHierarchy) and each.enabled]
        self.latent = active[-1] if active else None
        with torch.no_grad():
            text = host.text(host.classes if classes is None else classes)
            for adapter in active:
                text = adapter.refined(text)
        self.register_buffer("text", text)

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, C)."""
        image = self.host.image(images)
        if self.latent is None:
            return self.host.scale * cosine(image, self.text)
        similar, far = self.latent.logits(image, self.text, self.host.scale)
        return similar - far


def initial_attributes(classes: Tensor, count: int, seed: int) -> Tensor:
    """Attributes between classes: each is the mean of two random ones, (C, d) -> (count, d)."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(len(classes), (count,), generator=generator)
    step = torch.randint(1, max(len(classes), 2), (count,), generator=generator)
    second = (first + step) % len(classes)
    return 0.5 * wide(classes[first.to(classes.device)] + classes[second.to(classes.device)])


def refine(
    classes: Tensor,
    attributes: Tensor,
    strength: float,
    *,
    degree: Literal["all", "classes"] = "all",
    groups: int | None = None,
) -> Tensor:
    """ATR: T̂ of F̂ = F + β D^(−½) S D^(−½) F with F = [T; A]: (C, d), (N, d) -> (C, d).

    S is the cosine where it is positive and 0 elsewhere (the paper's signed S can have negative degrees, whose root is
    NaN), and the degrees are kept away from 0. Only the rows of the classes are computed. `degree`: sums over all
    columns, or over those of the classes. `groups`: classes see each other through the means of so many groups, see
    `_refine_by_groups`.
    """
    if groups is not None and groups < len(classes):
        return _refine_by_groups(wide(classes), wide(attributes), strength, degree, groups)
    both = torch.cat([wide(classes), wide(attributes)])
    unit = F.normalize(both, dim=-1)
    affinity = (unit @ unit.mT).relu()
    counted = affinity if degree == "all" else affinity[:, : len(classes)]
    degrees = counted.sum(dim=1).clamp_min(1e-6)
    share = affinity[: len(classes)] * torch.rsqrt(degrees[: len(classes), None] * degrees)
    return both[: len(classes)] + strength * (share @ both)


def _refine_by_groups(classes: Tensor, attributes: Tensor, strength: float, degree: str, groups: int) -> Tensor:
    """ATR in O((C + N) (G + N) d): the affinity of a class to another is that to the mean of its group.

    A group are the classes nearest to one of G classes, taken at even steps. Affinities to attributes are exact. On the
    1,203 LVIS texts of CLIP, 8 groups change T̂ − T by 0.5 %, 8 to 128 nearest neighbours by 58 to 11 %: all cosines
    of texts are large, so what matters is the sum over the many and not the few that are near.
    """
    # Lengths are divided out of the products, so that nothing of the size of the classes is made but the norms and T̂.
    inverse = 1.0 / torch.linalg.vector_norm(classes, dim=-1, keepdim=True).clamp_min(1e-12)
    with torch.no_grad():
        pivots = torch.linspace(0, len(classes) - 1, groups, device=classes.device).long()
        group = (classes @ (classes[pivots] * inverse[pivots]).mT).argmax(dim=1)
        member = F.one_hot(group, groups).to(classes)  # (C, G)
        sizes = member.sum(dim=0)
    # The means of unit vectors are left as short as they are: where signs agree, their cosines are the mean cosines.
    means = (member * inverse).mT @ classes / sizes.clamp_min(1.0)[:, None]
    pure = F.normalize(attributes, dim=-1)
    seen = torch.cat([means, pure])  # (G + N, d)
    counted = torch.cat([sizes, torch.full_like(pure[:, 0], float(degree == "all"))])
    affinity = ((classes @ seen.mT) * inverse).relu()
    left = (affinity @ counted).clamp_min(1e-6).rsqrt()[:, None]
    right = ((pure @ seen.mT).relu() @ counted).clamp_min(1e-6).rsqrt()[:, None]
    sums = torch.cat([(member * left).mT @ classes, right * attributes])
    return torch.addmm(classes, strength * left * affinity, sums)


def reciprocal_neighbours(points: Tensor, used: Tensor, k: int) -> Tensor:
    """Which of the used points are among each other's k nearest, the point itself left out: (n, d), (n) -> (n, n)."""
    # Squared distances grow with −2 x·y + |y|² within a row.
    near = 2.0 * points @ points.mT - points.square().sum(dim=1)
    near.fill_diagonal_(-math.inf)
    near = near.masked_fill(~used, -math.inf)
    value, place = near.topk(min(k, len(points) - 1), dim=1)
    inside = torch.zeros_like(near, dtype=torch.bool).scatter(1, place, value > -math.inf)
    return inside & inside.mT & used & used[:, None]


def sample_triplets(
    points: Tensor, used: Tensor, k: int, count: int, anchors: int | None = None
) -> tuple[Tensor, Tensor]:
    """(anchor, positive, negative) triplets of the first `anchors` points: (n, d) -> (anchors·count, 3), valid (…).

    A positive is a reciprocal neighbour, a negative any other used point that is not the anchor. Anchors that lack
    either have invalid triplets.
    """
    anchors = len(points) if anchors is None else anchors
    positive = reciprocal_neighbours(points, used, k)[:anchors]
    itself = torch.eye(anchors, len(points), dtype=torch.bool, device=points.device)
    negative = used & ~positive & ~itself
    valid = positive.any(dim=1) & negative.any(dim=1)

    def draw(mask: Tensor) -> Tensor:
        weights = torch.where(mask.any(dim=1, keepdim=True), mask.float(), 1.0)  # an empty row must not be asked
        return torch.multinomial(weights, count, replacement=True).flatten()

    first = torch.arange(anchors, device=points.device).repeat_interleave(count)
    return torch.stack([first, draw(positive), draw(negative)], dim=1), valid.repeat_interleave(count)


def hierarchy_loss(gaps: Tensor, triplets: Tensor, valid: Tensor, temperature: float | None, margin: float) -> Tensor:
    """HHL: distances (n, m) of leaves to possible ancestors, triplets (T, 3), valid (T) -> mean over the valid ones.

    The lowest common ancestor of leaves is the possible ancestor that is nearest to the farthest of them, chosen by a
    hard Gumbel-softmax with straight-through gradients over −max(d)/temperature, or where that is None over
    exp(−max(d)). A triplet whose two ancestors coincide says nothing.
    """

    def chosen(far: Tensor) -> Tensor:
        return F.gumbel_softmax((-far).exp() if temperature is None else -far / temperature, hard=True)

    i, j, k = gaps[triplets[:, 0]], gaps[triplets[:, 1]], gaps[triplets[:, 2]]  # each (T, m)
    both = torch.maximum(i, j)
    pair, triple = chosen(both), chosen(torch.maximum(both, k))
    inner, outer = pair.argmax(dim=1), triple.argmax(dim=1)
    change = pair - triple
    loss = (
        F.relu((i * change).sum(dim=1) + margin)
        + F.relu((j * change).sum(dim=1) + margin)
        + F.relu(margin - (k * change).sum(dim=1))
    )
    return torch.where(valid & (inner != outer), loss, 0.0).sum() / valid.sum().clamp_min(1)
