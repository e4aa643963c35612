"""Data order: the same stream of samples for any number of ranks, workers and restarts."""

from __future__ import annotations

import hashlib
import random
import signal
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, default_collate

from leafward.errors import UsageError


def mix(*numbers: int) -> int:
    """One 63-bit seed from several integers, with no relation between the seeds of neighbours."""
    text = ",".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def seed_cpu(seed: int) -> None:
    """Seed `random`, numpy's legacy generator and torch's CPU generator."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # noqa: NPY002  (data sets that use the legacy generator must be repeatable)
    torch.default_generator.manual_seed(seed)


class DataOrder:
    """An endless stream of samples: one seeded permutation of `length` samples after the other.

    Global position p is sample `permutation(p // length)[p % length]`; the batch of step t holds positions
    [t·B, (t+1)·B), across the border of two epochs where they meet. The order is a function of the seed and the
    step alone, so a resumed run needs nothing but its step number.
    """

    def __init__(self, length: int, batch_size: int, seed: int):
        if length < 1:
            raise UsageError(f"the data set must hold at least one sample, not {length}")
        if batch_size < 1:
            raise UsageError(f"batch_size must be at least 1, not {batch_size}")
        self.length = length
        self.batch_size = batch_size
        self.seed = seed
        self._epochs: dict[int, torch.Tensor] = {}

    def positions(self, step: int) -> range:
        """Global positions of the batch of `step` (counted from 0)."""
        return range(step * self.batch_size, (step + 1) * self.batch_size)

    def indices(self, step: int) -> list[int]:
        """Sample numbers (batch_size) of the batch of `step`."""
        positions = self.positions(step)
        taken: list[int] = []
        for epoch in range(positions.start // self.length, (positions.stop - 1) // self.length + 1):
            first = max(positions.start - epoch * self.length, 0)
            taken += self._permutation(epoch)[first : positions.stop - epoch * self.length].tolist()
        return taken

    def places(self, rank: int, world: int, micro_batch: int) -> list[list[int]]:
        """Which places of a batch (from 0) each micro-batch of this rank holds, in ascending order.

        Places i and B − 1 − i stay together wherever a micro-batch is even, so that whatever pairs the samples of a
        batch with those of the reversed batch, as timm's mixup does, finds the same pairs in every layout.
        """
        ends = [place for i in range((self.batch_size + 1) // 2) for place in (i, self.batch_size - 1 - i)]
        folded = ends[: self.batch_size]  # the middle of an odd batch is there twice, at the end
        part = self.batch_size // world
        firsts = range(rank * part, (rank + 1) * part, micro_batch)
        return [sorted(folded[first : first + micro_batch]) for first in firsts]

    def share(self, step: int, rank: int, world: int, micro_batch: int) -> Iterator[list[tuple[int, int]]]:
        """This rank's part of the batch of `step`, as micro-batches of (position, sample number)."""
        batch = list(zip(self.positions(step), self.indices(step), strict=True))
        for places in self.places(rank, world, micro_batch):
            yield [batch[place] for place in places]

    def micro_batch(self, micro_batch: int | None, world: int) -> int:
        """Samples per forward pass on one rank, at most its part of the batch; the batch must split evenly."""
        if self.batch_size % world:
            raise UsageError(f"batch_size must be a multiple of the {world} ranks, not {self.batch_size}")
        part = self.batch_size // world
        if micro_batch is None or micro_batch >= part:  # with more ranks each has less to do at once
            return part
        if part % micro_batch:
            raise UsageError(
                f"batch_size / ranks ({self.batch_size} / {world} = {part}) must be a multiple of micro_batch, "
                f"not {micro_batch}"
            )
        return micro_batch

    def _permutation(self, epoch: int) -> torch.Tensor:
        if epoch not in self._epochs:
            generator = torch.Generator().manual_seed(mix(self.seed, epoch))
            # A batch touches neighbouring epochs only, so the older ones can go.
            self._epochs = {key: value for key, value in self._epochs.items() if key == epoch - 1}
            self._epochs[epoch] = torch.randperm(self.length, generator=generator)
        return self._epochs[epoch]


def batches(
    dataset: Any,
    order: DataOrder,
    *,
    start: int = 0,
    rank: int = 0,
    world: int = 1,
    micro_batch: int | None = None,
    workers: int = 0,
    collate: Callable[[list[Any]], Any] | None = None,
    pin_memory: bool = False,
) -> Generator[list[Any], None, None]:
    """Endless steps from `start`, each a list of this rank's collated micro-batches.

    Every sample is drawn with `random`, numpy and torch seeded by the data seed and its position, so a random
    augmentation is the same however many workers and ranks share the work. A data set with `__getitems__` gets
    each micro-batch in one call, seeded by its first position.
    """
    micro_batch = order.micro_batch(micro_batch, world)
    loader = DataLoader(
        _Seeded(dataset, order.seed),  # type: ignore[arg-type]
        batch_sampler=_Stream(order, start, rank, world, micro_batch),  # type: ignore[arg-type]
        num_workers=workers,
        collate_fn=collate or default_collate,
        pin_memory=pin_memory,
        worker_init_fn=_ignore_signals,
        persistent_workers=workers > 0,
    )
    per_step = order.batch_size // (world * micro_batch)
    stream = iter(loader)
    while True:
        yield [next(stream) for _ in range(per_step)]


class _Stream:
    """The batch sampler: micro-batches of one rank, from a step on, without end."""

    def __init__(self, order: DataOrder, start: int, rank: int, world: int, micro_batch: int):
        self.order, self.start = order, start
        self.share = (rank, world, micro_batch)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        step = self.start
        while True:
            yield from self.order.share(step, *self.share)
            step += 1


class _Seeded:
    """A data set whose every sample is drawn with generators seeded by its place in the stream."""

    def __init__(self, dataset: Any, seed: int):
        self.dataset, self.seed = dataset, seed

    def __getitems__(self, places: Sequence[tuple[int, int]]) -> list[Any]:
        if hasattr(self.dataset, "__getitems__"):
            seed_cpu(mix(self.seed, 1, places[0][0]))
            return self.dataset.__getitems__([index for _, index in places])
        samples = []
        for position, index in places:
            seed_cpu(mix(self.seed, 1, position))
            samples.append(self.dataset[index])
        return samples


def _ignore_signals(worker: int) -> None:
    """Ctrl-C and SIGTERM reach the whole process group; the training process alone decides when to stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
