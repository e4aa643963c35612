"""Data order: what a batch holds does not depend on ranks, workers, micro-batches or restarts."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from engine_toys import Points
from hypothesis import given
from hypothesis import strategies as st

from leafward.engine.data import DataOrder, batches, mix
from leafward.errors import UsageError


@given(length=st.integers(1, 40), batch=st.integers(1, 60), seed=st.integers(0, 2**31), epochs=st.integers(1, 4))
def test_every_epoch_is_a_permutation(length: int, batch: int, seed: int, epochs: int) -> None:
    order = DataOrder(length, batch, seed)
    steps = -(-length * epochs // batch)
    stream = [index for step in range(steps) for index in order.indices(step)]
    for epoch in range(epochs):
        assert sorted(stream[epoch * length : (epoch + 1) * length]) == list(range(length))


@given(length=st.integers(1, 30), batch=st.integers(1, 40), step=st.integers(0, 500), seed=st.integers(0, 99))
def test_a_step_can_be_asked_for_alone(length: int, batch: int, step: int, seed: int) -> None:
    walked = DataOrder(length, batch, seed)
    for earlier in range(max(step - 3, 0), step):
        walked.indices(earlier)
    assert walked.indices(step) == DataOrder(length, batch, seed).indices(step)
    assert len(walked.indices(step)) == batch


@given(
    length=st.integers(1, 30),
    world=st.integers(1, 4),
    per_step=st.integers(1, 3),
    micro=st.integers(1, 4),
    step=st.integers(0, 50),
)
def test_shares_of_ranks_and_micro_batches_make_up_the_batch(
    length: int, world: int, per_step: int, micro: int, step: int
) -> None:
    order = DataOrder(length, world * per_step * micro, 5)
    shares = [list(order.share(step, rank, world, micro)) for rank in range(world)]
    assert all(len(share) == per_step and all(len(part) == micro for part in share) for share in shares)
    flat = sorted(pair for share in shares for part in share for pair in part)
    assert [position for position, _ in flat] == list(order.positions(step))
    assert [index for _, index in flat] == order.indices(step)


@given(world=st.integers(1, 4), per_step=st.integers(1, 3), half=st.integers(1, 3))
def test_a_reversed_batch_has_the_same_pairs_in_every_layout(world: int, per_step: int, half: int) -> None:
    size = world * per_step * 2 * half
    order = DataOrder(5, size, 0)
    parts = [part for rank in range(world) for part in order.places(rank, world, 2 * half)]
    pairs = {frozenset(pair) for part in parts for pair in zip(part, reversed(part), strict=True)}
    assert pairs == {frozenset((place, size - 1 - place)) for place in range(size)}
    assert order.places(0, 1, size) == [list(range(size))]


def test_epochs_and_seeds_differ() -> None:
    order = DataOrder(50, 50, 0)
    assert len({tuple(order.indices(step)) for step in range(5)}) == 5
    assert order.indices(0) != DataOrder(50, 50, 1).indices(0)
    counts = Counter(mix(seed, step) for seed in range(50) for step in range(50))
    assert max(counts.values()) == 1


def _stream(steps: int, **options: int) -> torch.Tensor:
    """All samples of some steps, each at its place in the batch; zero at places of other ranks."""
    order = DataOrder(7, 6, 3)
    world = options.get("world", 1)
    parts = order.places(options.get("rank", 0), world, options.get("micro_batch", 6 // world))
    places = [place for part in parts for place in part]
    made = itertools.islice(batches(Points(7, 1.0), order, **options), steps)
    found = torch.zeros(steps, 6, *Points(7, 1.0).x.shape[1:])
    for step, taken in enumerate(made):
        found[step, places] = torch.cat([batch["x"] for batch in taken])
    return found


def test_augmentation_is_the_same_for_workers_ranks_micro_batches_and_restarts() -> None:
    reference = _stream(5)
    assert torch.equal(_stream(5, workers=2), reference)
    assert torch.equal(_stream(5, micro_batch=2), reference)
    assert torch.equal(_stream(2, start=3), reference[3:])
    ranks = [_stream(5, rank=rank, world=3) for rank in range(3)]
    assert torch.equal(torch.stack(ranks).sum(dim=0), reference)
    # The same sample in another epoch gets other noise.
    assert torch.unique(reference.flatten(0, 1), dim=0).shape[0] == 30


class Vectorised:
    def __len__(self) -> int:
        return 10

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        self.calls = [*getattr(self, "calls", []), indices]
        return list(torch.tensor(indices) * 2)


def test_a_vectorised_data_set_is_asked_once_per_micro_batch() -> None:
    data, order = Vectorised(), DataOrder(10, 4, 0)
    (first,) = next(batches(data, order))
    assert first.tolist() == [2 * index for index in order.indices(0)]
    assert data.calls == [order.indices(0)]


@pytest.mark.parametrize(
    ("world", "micro", "words"), [(3, None, "batch_size .*3 ranks.*8"), (2, 3, "8 / 2 = 4.*micro_batch.*3")]
)
def test_batches_that_do_not_split_are_refused(world: int, micro: int | None, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        DataOrder(10, 8, 0).micro_batch(micro, world)


def test_more_ranks_have_smaller_micro_batches() -> None:
    """Presets of the papers accumulate on few ranks, and were refused on many: 1024 images on 8 ranks, 256 at once."""
    order = DataOrder(5000, 1024, 0)
    assert [order.micro_batch(256, world) for world in (1, 4, 8, 16, 64)] == [256, 256, 128, 64, 16]


def test_an_empty_data_set_is_refused() -> None:
    with pytest.raises(UsageError, match="at least one sample"):
        DataOrder(0, 8, 0)
