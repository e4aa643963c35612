"""Radial Embedding as a task for the training loop: caption trees as numbers, batches of triples, the loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from leafward.data.captions import Captions
from leafward.encoders.encoder import Encoder, trimmed
from leafward.engine import Cluster, Loss
from leafward.errors import DataError
from leafward.systems.radial.loss import RadialConfig, RadialModel, Triples, radial_loss


class Sample(NamedTuple):
    """One caption tree as numbers of texts: texts (m) with negatives, triples (t, 3), the number of its root."""

    texts: np.ndarray
    triples: np.ndarray
    root: int


class Batch(NamedTuple):
    """U distinct texts of some samples, and where they stand: M occurrences, T triples, R roots.

    tokens: (U, L) each; frozen (U, d): embeddings by the frozen model; texts (M), general, specific, negative (T) and
    root_rows (R): rows of the U; root (T): which root a triple belongs to; samples: how many there are.
    """

    tokens: dict[str, Tensor]
    frozen: Tensor
    texts: Tensor
    general: Tensor
    specific: Tensor
    negative: Tensor
    root: Tensor
    root_rows: Tensor
    samples: int


class CaptionData:
    """Caption trees with every text tokenised and embedded by the (still frozen) encoder once: a map-style data set.

    Trees without a triple, that is without an edge whose general text has a negative, are left out.
    """

    def __init__(self, captions: Sequence[Captions], encoder: Encoder, batch_size: int = 256) -> None:
        self.root_texts = tuple(dict.fromkeys(each.root for each in captions))
        texts = dict.fromkeys(self.root_texts)
        for each in captions:
            texts.update(dict.fromkeys((*each.texts, *filter(None, each.negatives))))
        number = {text: i for i, text in enumerate(texts)}
        self.texts = list(texts)
        samples = [self._sample(each, number) for each in captions]
        # A batch of samples without a triple would have no angle to average.
        self.samples = [sample for sample in samples if len(sample.triples)]
        if not self.samples:
            raise DataError("the captions hold no triple to learn from: a text with a parent that has a negative")
        self.tokens = encoder.tokenize(self.texts)
        self.frozen = encoder.encode_tokens(self.tokens, batch_size).cpu()

    def _sample(self, each: Captions, number: dict[str, int]) -> Sample:
        place = [number[text] for text in each.texts]
        wrong = [None if text is None else number[text] for text in each.negatives]
        triples = [(place[up], place[down], wrong[up]) for up, down in each.edges() if wrong[up] is not None]
        occurring = [*place, *(text for text in wrong if text is not None)]
        root = self.root_texts.index(each.root)
        return Sample(np.array(occurring, np.int64), np.array(triples, np.int64).reshape(-1, 3), root)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index]

    def collate(self, samples: Sequence[Sample]) -> Batch:
        """Distinct texts are encoded once, however often they occur."""
        roots = np.arange(len(self.root_texts))  # the first texts
        parts = [roots, *(sample.texts for sample in samples), *(sample.triples.ravel() for sample in samples)]
        distinct, rows = np.unique(np.concatenate(parts), return_inverse=True)
        occurring = sum(len(sample.texts) for sample in samples)
        root_rows, texts, triples = np.split(rows, [len(roots), len(roots) + occurring])
        general, specific, negative = torch.from_numpy(triples.reshape(-1, 3)).unbind(1)
        owner = np.repeat([sample.root for sample in samples], [len(sample.triples) for sample in samples])
        chosen = torch.from_numpy(distinct)
        return Batch(
            trimmed({name: tensor[chosen] for name, tensor in self.tokens.items()}),
            self.frozen[chosen],
            torch.from_numpy(texts),
            general,
            specific,
            negative,
            torch.from_numpy(owner),
            torch.from_numpy(root_rows),
            len(samples),
        )


class RadialTask:
    """What the training loop learns: a `RadialModel` on `CaptionData`. `evaluator` scores the model in between, with
    `keep_best` the best τ_d counts."""

    mode = "max"

    def __init__(
        self,
        data: CaptionData,
        config: RadialConfig,
        evaluator: Callable[[RadialModel], dict[str, float]] | None = None,
        cluster: Cluster | None = None,
        *,
        keep_best: bool = False,
    ) -> None:
        self.dataset, self.config, self.evaluator = data, config, evaluator
        self.monitor = "tau" if keep_best else None
        self.cluster = cluster or Cluster()
        self.collate = data.collate

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """The hardest pairs and the means are those of the micro-batches of all ranks together."""
        assert isinstance(model, RadialModel)
        embedding = model(batch.tokens)
        roots = embedding[batch.root_rows] if model.free_roots is None else model.learned_roots()
        triples = Triples(
            embedding[batch.general], embedding[batch.specific], embedding[batch.negative], roots[batch.root]
        )
        texts = embedding[batch.texts], batch.frozen[batch.texts]
        terms = radial_loss(triples, *texts, self.config, self.cluster)
        parts = {"pull": terms.pull, "contrast": terms.contrast, "hardest": terms.hardest}
        samples = batch.samples / self.cluster.parts(batch.samples)[0]  # of all ranks
        metrics = {name: value.detach() * samples for name, value in parts.items()}
        return Loss(terms.total * samples, batch.samples, metrics)

    def evaluate(self, model: nn.Module) -> dict[str, Any]:
        return {} if self.evaluator is None else self.evaluator(model)  # type: ignore[arg-type]
