"""The language-modelling task for the training loop."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from leafward.data.text.corpus import Corpus
from leafward.data.text.shards import IGNORED, Shard, Windows
from leafward.engine import Cluster, Loss
from leafward.engine.loop import to_device
from leafward.geometry import lorentz
from leafward.nn import Curvatures, Gate
from leafward.systems.helm import HelmForCausalLM


class LanguageTask:
    """Next-token prediction over packed windows of `context` tokens.

    `eval_tokens` limits how much held-out text the evaluations during training read, `eval_batch` is how many windows
    they take at a time. With `keep_best` the weights with the lowest held-out loss are kept, else the last.
    """

    mode = "min"

    def __init__(
        self,
        corpus: Corpus,
        context: int,
        *,
        cluster: Cluster | None = None,
        eval_batch: int = 8,
        eval_tokens: int | None = None,
        keep_best: bool = False,
    ):
        self.dataset = Windows(corpus.train, context)
        self.held_out = Windows(_first(corpus.held_out, eval_tokens), context)
        self.cluster = cluster or Cluster()
        self.eval_batch = eval_batch
        self.monitor = "loss" if keep_best else None
        self.load: Tensor | None = None

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        count = _count(batch)
        return Loss(model(**batch, use_cache=False).loss * count, count)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Loss and perplexity of the held-out tokens; the ranks share the work."""
        sums = torch.zeros(2, dtype=torch.float64, device=self.cluster.device)
        for batch in self._shares():
            batch = to_device(batch, self.cluster.device)
            count = _count(batch)
            # One position of logits is asked for, so that those of all are never held; the loss works by chunks.
            loss = model(**batch, use_cache=False, logits_to_keep=1).loss
            sums += torch.stack([loss.double() * count, count.double()])
        total, count = self.cluster.sum(sums).tolist()
        return {"loss": total / count, "perplexity": math.exp(min(total / count, 700.0))}

    def scalars(self, model: nn.Module) -> dict[str, float]:
        """Geodesic radii of the tokens, curvatures of the experts, and their load (1: an even share)."""
        assert isinstance(model, HelmForCausalLM)
        space, values = model.config.space, {}
        norms = _whole(embedding(model).detach().norm(dim=-1))
        radii = lorentz.dist0(norms.unsqueeze(-1), space.c) if space.curved else norms
        values |= {"radius_mean": float(radii.mean()), "radius_max": float(radii.max())}
        curvatures = [_whole(module().detach()) for module in model.modules() if isinstance(module, Curvatures)]
        if curvatures:
            every = torch.cat(curvatures)
            values |= {"curvature_min": float(every.min()), "curvature_max": float(every.max())}
        if self.load is not None:
            load = self.cluster.sum(self.load.double())
            share = load * load.shape[-1] / load.sum(dim=-1, keepdim=True).clamp_min(1.0)
            values |= {"load_min": float(share.min()), "load_max": float(share.max())}
        return values

    @contextmanager
    def balancing(self, model: HelmForCausalLM, rate: float) -> Iterator[None]:
        """Inside, the gates' biases move towards even loads after each update of an optimiser.

        Not in the forward pass, because recomputed activations must see the biases of the first time.
        """
        gates = [module for module in model.modules() if isinstance(module, Gate)]

        def after_update(*_: Any) -> None:
            self.load = torch.stack([gate.load for gate in gates])
            model.rebalance(rate)

        handle = register_optimizer_step_post_hook(after_update) if gates else None
        before, model.balance_rate = model.balance_rate, None
        try:
            yield
        finally:
            model.balance_rate = before
            if handle is not None:
                handle.remove()

    def _shares(self) -> Iterator[dict[str, Tensor]]:
        """This rank's batches of held-out windows. Sharded models need equally many on every rank, so that the last
        may be one that counts nothing."""
        count = len(self.held_out)
        size = min(self.eval_batch, count)
        firsts = range(0, count, size)
        rounds = -(-len(firsts) // self.cluster.world)
        for index in range(self.cluster.rank * rounds, (self.cluster.rank + 1) * rounds):
            first = firsts[min(index, len(firsts) - 1)]
            batch = self.held_out.batch(range(first, min(first + size, count)), size)
            if index >= len(firsts):
                batch["labels"].fill_(IGNORED)
            yield batch


def embedding(model: HelmForCausalLM) -> Tensor:
    """The space coordinates of the tokens (V, n)."""
    return cast(nn.Embedding, model.model.embed).weight


def _count(batch: dict[str, Tensor]) -> Tensor:
    """How many tokens are predicted."""
    return (batch["labels"][:, 1:] != IGNORED).sum()


def _first(shard: Shard, tokens: int | None) -> Shard:
    """The first `tokens` tokens of a shard."""
    if tokens is None or tokens >= len(shard.tokens):
        return shard
    kept = int((shard.starts < tokens).sum())
    return Shard(shard.tokens[:tokens], shard.starts[:kept], shard.sizes[:kept])


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
