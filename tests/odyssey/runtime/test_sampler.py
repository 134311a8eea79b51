"""A script's own sampler: one order for each epoch, whoever asks, and what cannot be told again is refused by name."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler, WeightedRandomSampler

from odyssey.errors import JobError
from odyssey.runtime.sampler import GivenSampler

DATA = list(range(7))


class InChunks:
    """Chunks in an order that follows from the epoch, as DistributedSampler has it."""

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self):
        chunks = [[0, 1, 2], [3, 4], [5, 6]]
        random.Random(self.epoch).shuffle(chunks)
        return iter([i for chunk in chunks for i in chunk])


class Drawn:
    """What it draws is Python's."""

    def __iter__(self):
        return iter(random.sample(DATA, 5))


GIVEN = {
    "range": lambda: range(7),
    "sequential": lambda: SequentialSampler(DATA),
    "random": lambda: RandomSampler(DATA),
    "random by its own generator": lambda: RandomSampler(DATA, generator=torch.Generator().manual_seed(3)),
    "weighted": lambda: WeightedRandomSampler([1.0, 0.0, 2.0, 3.0, 0.0, 1.0, 1.0], num_samples=9),
    "chunks": InChunks,
    "drawn": Drawn,
    "tensor": lambda: torch.tensor([3, 1, 4, 1, 5]),
}


@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN.keys())
def test_any_position_has_one_sample_whoever_asks_and_in_whatever_order(given):
    sampler = GivenSampler(given(), seed=5)
    n = sampler.n_samples
    whole = sampler.ids(0, 4 * n)
    before = torch.get_rng_state()
    other = GivenSampler(given(), seed=5)
    assert torch.equal(torch.get_rng_state(), before)
    for start in (3 * n - 1, n, 0, 2 * n + 1, 1):
        assert other.ids(start, start + 2) == whole[start : start + 2]
    epochs = [whole[i * n : (i + 1) * n] for i in range(4)]
    is_drawn = not isinstance(given(), range | SequentialSampler | torch.Tensor)
    assert (len(set(map(tuple, epochs))) > 1) == is_drawn
    assert (GivenSampler(given(), seed=6).ids(0, 4 * n) != whole) == (is_drawn and not isinstance(given(), InChunks))


def test_the_order_is_that_of_the_sampler():
    epochs = [GivenSampler(InChunks(), 0).ids(7 * epoch, 7 * epoch + 7) for epoch in range(4)]
    own = InChunks()
    for epoch, ids in enumerate(epochs):
        own.set_epoch(epoch)
        assert ids == list(own)
    drawn = GivenSampler(WeightedRandomSampler([1.0, 0.0, 2.0], 3000), 0).ids(0, 3000)
    counts = Counter(drawn)
    assert counts[1] == 0 and counts[2] > 1.5 * counts[0] > 0


class Once:
    """It goes on where it was."""

    def __init__(self):
        self.random = random.Random(0)

    def __iter__(self):
        return iter(self.random.sample(DATA, 7))


class Growing(InChunks):
    def __iter__(self):
        return iter(range(1 + self.epoch))


@pytest.mark.parametrize(
    ("given", "what"),
    [
        (DistributedSampler(DATA, 2, 0), "DistributedSampler, which gives each rank a part"),
        (BatchSampler(SequentialSampler(DATA), 2, drop_last=False), "sampler gives a list"),
        (Once(), "a Once that gives another order the second time"),
        (Growing(), "gives 2 sample ids in epoch 1, and 1 before"),
        ([], "gives 0 sample ids in epoch 0"),
        (7, "sampler is a int"),
        (iter(DATA), "gives 0 sample ids in epoch 1"),
    ],
)
def test_what_cannot_be_told_again_is_refused_by_name(given, what):
    with pytest.raises(JobError) as raised:
        GivenSampler(given, 0)
    assert what in raised.value.what
    assert raised.value.help
