"""Data sets that draw random numbers (augmentation, random windows): every rank reads the same, each time.

One rank reads a micro-batch for its input, another one for its target; a step that is redone reads it again.
"""

from __future__ import annotations

import random
from itertools import pairwise
from math import ceil

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, default_collate

import odyssey
from odyssey.errors import JobError
from odyssey.runtime import data as module
from odyssey.runtime.batches import Batches
from odyssey.runtime.data import MapStyle, batches_by, draws_random_numbers, pairs_by, spread
from odyssey.runtime.prefetcher import Prefetcher
from odyssey.runtime.sampler import Sampler
from tests import models
from tests.odyssey.test_rank_parts import one_stage_plan


class Augmented:
    """What is input and what is target belong together by a random number: a window at a random place, with noise."""

    def __init__(self, draw):
        self.draw = draw

    def __len__(self):
        return 32

    def __getitem__(self, index):
        start = self.draw()
        return torch.tensor([index, start]), torch.tensor([start, start + 1])


DRAWS = {
    "torch": lambda: int(torch.randint(10**6, ())),
    "python": lambda: random.randrange(10**6),
    "numpy": lambda: int(numpy.random.randint(10**6)),
}


@pytest.mark.parametrize("kind", DRAWS)
def test_a_sample_that_draws_random_numbers_is_the_same_for_all_ranks_and_each_time(kind):
    """I7."""
    data = Augmented(DRAWS[kind])
    assert draws_random_numbers(data, [3])
    plan = one_stage_plan()
    found = []
    for num_workers, _ in enumerate(["reads the input", "reads the target", "redoes the step"]):
        DRAWS[kind]()  # each has drawn something else
        prefetcher = Prefetcher(MapStyle(data, Sampler(32, 0), plan, is_random=True, num_workers=num_workers))
        prefetcher.want(5, [plan.samples.positions(1)])
        found.append(prefetcher.get(5, plan.samples.positions(1)))
        prefetcher.close()
    for inputs, targets in found:
        assert torch.equal(inputs, found[0][0]) and torch.equal(targets, found[0][1])
        assert torch.equal(inputs[:, 1], targets[:, 0]), "what belongs together stays together"
    other = Prefetcher(MapStyle(data, Sampler(32, 0), plan, is_random=True)).get(6, plan.samples.positions(1))
    assert not torch.equal(other[1], found[0][1]), "another step draws other numbers"


@pytest.mark.parametrize("kind", DRAWS)
def test_getting_samples_leaves_the_generators_as_they_were(kind):
    data = Augmented(DRAWS[kind])
    torch.manual_seed(1), random.seed(1), numpy.random.seed(1)
    expected = DRAWS[kind]()
    torch.manual_seed(1), random.seed(1), numpy.random.seed(1)
    assert draws_random_numbers(data, [3])
    samples = Batches(data, 8, 4, 0).samples()
    samples.first(), samples.prefetcher().get(0, range(4))
    assert DRAWS[kind]() == expected


class Partly(Augmented):
    """Of 1000 samples, only those in `those` draw."""

    def __init__(self, draw, those):
        super().__init__(draw)
        self.those = those

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        return super().__getitem__(index) if index in self.those else (torch.tensor([index, 0]), torch.tensor([0, 1]))


@pytest.mark.parametrize("those", [range(500, 1000), range(7, 1000, 10), range(700, 720)], ids=["half", "tenth", "some"])
@pytest.mark.parametrize("kind", DRAWS)
def test_data_that_draw_for_some_samples_only_are_the_same_however_they_are_read(kind, those):
    """I7. The first sample does not."""
    found = []
    for num_workers in (0, 1, 2):
        seed_all(num_workers)
        prefetcher = Batches(Partly(DRAWS[kind], those), 1000, 100, 0, num_workers=num_workers).samples().prefetcher()
        wanted = [range(start, start + 100) for start in range(0, 1000, 100)]
        prefetcher.want(0, wanted)
        found.append(torch.cat([prefetcher.get(0, positions)[0] for positions in wanted]).tolist())
        prefetcher.close()
    assert found[0] == found[1] == found[2]
    assert len({start for _, start in found[0]}) > 10


def test_worker_processes_are_seeded_whatever_the_samples_that_are_looked_at_draw():
    those = set(range(1000)) - set(spread(1000))
    found = []
    for num_workers in (1, 2):
        prefetcher = Batches(Partly(DRAWS["torch"], those), 1000, 500, 0, num_workers=num_workers).samples().prefetcher()
        wanted = [range(500), range(500, 1000)]
        prefetcher.want(0, wanted)
        found.append(torch.cat([prefetcher.get(0, positions)[0] for positions in wanted]).tolist())
        prefetcher.close()
    assert found[0] == found[1]


@pytest.mark.parametrize("n", [1, 2, 64, 65, 1000, 10**12])
def test_samples_that_are_looked_at_are_of_all_parts_of_the_data(n):
    found = spread(n)
    assert found[0] == 0 and len(found) <= 65
    assert all(0 < later - one <= 2 * ceil(n / 64) for one, later in pairwise([*found, n]))
    assert n > 64 or found == list(range(n))
    assert found == spread(n), "the same on all ranks"


def test_a_look_at_samples_ends_where_they_are_slow_and_leaves_errors_to_who_uses_them(monkeypatch):
    class Data(Partly):
        def __getitem__(self, index):
            read.append(index)
            if index == 1:
                raise OSError("disk is gone")
            return super().__getitem__(index)

    read = []
    assert draws_random_numbers(Data(DRAWS["torch"], {3}), range(5))
    assert read == [0, 0, 1, 2, 3]
    monkeypatch.setattr(module, "LOOK_S", -1.0)
    assert not draws_random_numbers(Data(DRAWS["torch"], {3}), range(5))
    assert read == [0, 0, 1, 2, 3, 0, 0]


def mixed(draw):
    """Collation that is another one each time: what is added to its samples."""

    def collate(samples):
        inputs, targets = default_collate(samples)
        return inputs + draw(), targets

    return collate


def in_arrays(draw):
    """It changes its samples in place, and what it draws is put into numpy's arrays."""

    def collate(samples):
        for sample in samples:
            sample[0].clamp_(max=3)
        return {"input": numpy.array([sample[0].tolist() for sample in samples]) + draw()}

    return collate


KEPT = torch.Generator(), random.Random(1), numpy.random.default_rng(1)
OWN = {
    "torch": lambda: int(torch.randint(10**6, (), generator=KEPT[0])),
    "python": lambda: KEPT[1].randrange(10**6),
    "numpy": lambda: int(KEPT[2].integers(10**6)),
}


class Counted(IterableDataset):
    def __iter__(self):
        yield from ((torch.tensor(i), torch.tensor(-i)) for i in range(40))


@pytest.mark.parametrize("data", [[(torch.tensor(i), torch.tensor(-i)) for i in range(40)], Counted()], ids=["map", "stream"])
@pytest.mark.parametrize("kind", DRAWS)
def test_collating_draws_the_same_for_all_ranks_and_each_time_and_leaves_the_generators_as_they_were(kind, data):
    """I7. What is drawn beside a thread would be drawn from what layers draw from."""
    found = []
    for num_workers in (0, 0, 2):
        seed_all(1)
        expected = DRAWS[kind]()
        seed_all(1)
        samples = Batches(data, 8, 4, 0, pairs_by(mixed(DRAWS[kind])), num_workers).samples()
        prefetcher = samples.prefetcher()
        assert samples.collating_draws and samples.first()
        for step in (5, 6):
            prefetcher.want(step, [range(4), range(4, 8)])
            found += [sum(prefetcher.get(step, positions)) for positions in (range(4), range(4, 8))]
        prefetcher.close()
        assert DRAWS[kind]() == expected
    drawn = [values.tolist() for values in found]
    assert drawn[:4] == drawn[4:8] == drawn[8:]
    assert len({values[0] for values in drawn}) == 4, "each micro-batch has its own"


@pytest.mark.parametrize("data", [[(torch.tensor(i), torch.tensor(-i)) for i in range(40)], Counted()], ids=["map", "stream"])
@pytest.mark.parametrize("kind", OWN)
def test_collating_that_draws_from_a_generator_of_its_own_is_refused(kind, data):
    """It would depend on how often a rank has collated."""
    for collate in (pairs_by(mixed(OWN[kind])), batches_by(in_arrays(OWN[kind]))):
        with pytest.raises(JobError) as caught:
            Batches(data, 8, 4, 0, collate).samples()
        expected = "collate(samples) gives two different" if isinstance(data, list) else "data gives other samples when"
        assert expected in caught.value.what and "generators only" in caught.value.help


def test_samples_that_differ_each_time_are_not_blamed_on_what_collates_them():
    own = iter(range(1000))
    data = [(torch.tensor(0), torch.tensor(0))] * 3 + [(torch.tensor(1), torch.tensor(1))]

    class Data(list):
        def __getitem__(self, index):
            inputs, targets = super().__getitem__(index)
            return inputs + (next(own) if index == 3 else 0), targets

    with pytest.raises(JobError, match=r"data\[3\] gives two different values"):
        Batches(Data(data), 8, 4, 0, pairs_by(default_collate)).samples()


def test_a_collation_that_changes_its_samples_in_place_is_taken():
    data = [(torch.tensor(i), torch.tensor(-i)) for i in range(40)]
    assert not Batches(data, 8, 8, 0, batches_by(in_arrays(lambda: 0))).samples().collating_draws
    assert data[7][0] == 3


def test_an_evaluation_collates_the_same_each_time():
    net = nn.Linear(1, 1)
    data = [(torch.ones(1), torch.ones(1))] * 8
    run = odyssey.resilient(
        net,
        torch.optim.SGD(net.parameters(), 0.1),
        lambda batch: net(batch[0]).mean(),
        data,
        global_batch=4,
        micro_batch=2,
        collate=mixed(lambda: float(torch.rand(()))),
    )
    found = []
    for number in range(2):
        torch.manual_seed(number)
        found.append(run.evaluate(data))
    assert found[0] == found[1]


def seed_all(number):
    torch.manual_seed(number), random.seed(number), numpy.random.seed(number)


@pytest.mark.parametrize("kind", DRAWS)
def test_a_loss_draws_by_its_place_in_the_training_and_the_script_by_its_own(kind):
    """I7."""
    data = [torch.ones(1)] * 8

    def begun():
        net, drawn = nn.Linear(1, 1), []

        def loss(batch):
            drawn.append(DRAWS[kind]())
            return net(batch).mean()

        return odyssey.resilient(net, torch.optim.SGD(net.parameters(), 0.1), loss, data, global_batch=4, micro_batch=2), drawn

    (run, drawn), (other, drawn_again) = begun(), begun()
    seed_all(1)
    expected = [DRAWS[kind]() for _ in range(6)]
    seed_all(1)
    own = [DRAWS[kind]() for _ in run.steps(3)]
    evaluated = run.evaluate(data[:4]), run.evaluate(data[:4])
    own += [DRAWS[kind]() for _ in other.steps(3)]
    assert own == expected, "training and evaluating leave them as they were"
    assert evaluated[0] == evaluated[1] and drawn[6:8] == drawn[8:]
    assert drawn_again == drawn[:6] and len(set(drawn)) == 8, "each micro-batch has its own"


def test_a_data_set_without_random_numbers_is_fetched_ahead():
    assert not draws_random_numbers(models.TokenData(), spread(64))


def test_a_sample_that_is_another_one_each_time_is_refused():
    own = random.Random(0)
    with pytest.raises(JobError, match=r"data\[3\] gives two different values"):
        draws_random_numbers(Augmented(lambda: own.randrange(10**6)), [3, 0])
