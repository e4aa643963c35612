"""Held-out loss, perplexity and bits per byte, document by document, with intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from leafward.data.text.shards import IGNORED, Shard, Windows
from leafward.engine import Progress
from leafward.engine.loop import to_device
from leafward.geometry.scalars import wide
from leafward.nn.head import CHUNK
from leafward.stats.estimate import Estimate, Interval, Over
from leafward.stats.intervals import around, over_seeds
from leafward.systems.helm import HelmForCausalLM


@dataclass(frozen=True)
class Scores:
    """Sums over each unit of held-out text, each (U,): nats, predicted tokens and bytes of text.

    A unit is a document; where there is only one, a window of it (and its bytes are those of the document, shared out
    by tokens). The token that ends a document is predicted, and counts, too.
    """

    nats: NDArray[np.float64]
    tokens: NDArray[np.int64]
    bytes: NDArray[np.float64]
    unit: str

    @property
    def loss(self) -> Estimate:
        """Nats per token, with its 95 % interval over units."""
        return ratio(self.nats, self.tokens, self.unit)

    def headline(self) -> dict[str, Estimate]:
        """Loss, perplexity and bits per byte, each with its interval."""
        loss = self.loss
        ends = (
            None
            if loss.interval is None
            else Interval(math.exp(loss.interval.low), math.exp(loss.interval.high), loss.over)
        )
        return {
            "loss": loss,
            "perplexity": Estimate(math.exp(loss.number), ends),
            "bits_per_byte": ratio(self.nats / math.log(2.0), self.bytes, self.unit),
        }

    def to_json(self) -> dict[str, Any]:
        """What a result keeps of it."""
        found = {name: {"value": each.value, "interval": each.interval} for name, each in self.headline().items()}
        return {"unit": self.unit, "units": len(self.nats), "tokens": int(self.tokens.sum()), **found}


@torch.no_grad()
def score(
    model: HelmForCausalLM, shard: Shard, context: int, *, batch_size: int = 8, precision: str = "float32"
) -> Scores:
    """Scores of `model` on all documents of a shard, in windows as in training."""
    model.eval()
    windows, device = Windows(shard, context), next(model.parameters()).device
    by_window = len(shard.starts) == 1
    units = len(windows) if by_window else len(shard.starts)
    nats, tokens = np.zeros(units), np.zeros(units, np.int64)
    size = min(batch_size, len(windows))
    with Progress(len(windows), "scoring", unit="window") as progress:
        for first in range(0, len(windows), size):
            numbers = range(first, min(first + size, len(windows)))
            batch = windows.batch(numbers, size)
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16"):
                losses = token_losses(model, to_device(batch, device)).cpu().double().numpy()
            counted = (batch["labels"][:, 1:] != IGNORED).numpy()
            places = np.minimum(np.arange(first, first + size), numbers.stop - 1)
            unit = places[:, None] if by_window else batch["documents"][:, 1:].numpy()
            unit = np.broadcast_to(unit, counted.shape)[counted]
            nats += np.bincount(unit, losses[counted], units)
            tokens += np.bincount(unit, minlength=units)
            progress.update(numbers.stop)
    if by_window:
        return Scores(nats, tokens, tokens * (shard.sizes.sum() / tokens.sum()), "windows")
    return Scores(nats, tokens, shard.sizes.astype(np.float64), "documents")


def token_losses(model: HelmForCausalLM, batch: dict[str, Tensor]) -> Tensor:
    """−ln p of each token after the first of a window, (B,T) -> (B,T−1), by chunks; 0 where it is not predicted."""
    states = model.model(
        batch["input_ids"], position_ids=batch["position_ids"], documents=batch["documents"], use_cache=False
    ).last_hidden_state
    features, matrix = model.lm_head.lanes(states[:, :-1])
    features, labels = features.flatten(0, 1), batch["labels"][:, 1:]
    rows = max(1, CHUNK // matrix.shape[0])
    losses = [
        F.cross_entropy(wide(part @ matrix.T), label, ignore_index=IGNORED, reduction="none")
        for part, label in zip(features.split(rows), labels.flatten().split(rows), strict=True)
    ]
    return torch.cat(losses).view(labels.shape)


def ratio(totals: NDArray[Any], sizes: NDArray[Any], of: str = "samples") -> Estimate:
    """Σ totals / Σ sizes and its 95 % interval over the units: Student's t on the linearised ratio.

    With R the ratio and e_i = totals_i − R sizes_i the standard error is √(n/(n−1) Σ e_i²) / Σ sizes (a cluster
    estimate: tokens of one document are not independent).
    """
    value, count = float(totals.sum() / sizes.sum()), len(totals)
    if count < 2:
        return Estimate(value)
    error = math.sqrt(count / (count - 1) * float(((totals - value * sizes) ** 2).sum())) / float(sizes.sum())
    return Estimate(value, around(value, error, count, Over(samples=count, of=of)))


def paired(ours: Sequence[Scores], twins: Sequence[Scores]) -> Estimate:
    """The difference in loss, ours − twin: over seeds, or with one seed over the units."""
    if len(ours) > 1:
        return over_seeds([one.loss.number - other.loss.number for one, other in zip(ours, twins, strict=True)])
    return ratio(ours[0].nats - twins[0].nats, ours[0].tokens, ours[0].unit)
