"""An evaluation reads its samples ahead, beside the forward, and leaves no thread and no process behind."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import odyssey
from odyssey.plan.needs import Needs
from odyssey.runtime import local
from odyssey.runtime.cut import Cut
from odyssey.runtime.data import pair_of
from odyssey.runtime.evaluation import Reader
from odyssey.runtime.groups import Groups
from odyssey.runtime.introductions import to_nobody
from tests import models
from tests.jobs.train import make_optimizer
from tests.odyssey.test_rank_parts import Gated, one_stage_plan

CPU = torch.device("cpu")
LIMIT_S = 30.0


@pytest.fixture(autouse=True)
def ended(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What reads ahead for a test's jobs ends with it and not with this process, whose children and files other tests count."""
    ends: list[Callable[[], None]] = []
    monkeypatch.setattr(local, "atexit", SimpleNamespace(register=ends.append))
    yield
    for end in ends:
        end()


def readers() -> set[threading.Thread]:
    """Threads that read samples."""
    return {thread for thread in threading.enumerate() if thread.name == "odyssey-data"}


def job(num_workers: int = 0, **changes: Any) -> odyssey.Job:
    given = {"global_batch": 4, "micro_batch": 2, "num_workers": num_workers}
    layers = partial(models.build_layers, "mlp", n_blocks=1)
    return odyssey.Job(layers, models.loss_for("mlp"), make_optimizer, models.data_for("mlp", 8), **given | changes)


def test_samples_are_read_while_those_before_are_computed() -> None:
    """The metric of the first micro-batch waits until the second one is being read."""

    class Told(models.VectorData):
        def __getitem__(self, index: int) -> Any:
            begun.put(index)
            return super().__getitem__(index)

    def metric(output: torch.Tensor, target: torch.Tensor) -> float:
        if not seen:
            while (index := begun.get(timeout=LIMIT_S)) < 2:
                assert index in (0, 1)
        seen.append(len(target))
        return 1.0

    begun: SimpleQueue[int] = SimpleQueue()
    seen: list[int] = []
    before = readers()
    its = job()
    between = readers()
    assert its.evaluate(Told(7), metrics={"it": metric})["it"] == 1.0
    assert seen == [2, 2, 2, 1]
    assert readers() == between and len(between - before) == 1, "the training's own is left"


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("n_samples", [1, 3, 11, 40])
def test_worker_processes_read_each_sample_once_and_are_gone(num_workers: int, n_samples: int) -> None:
    class Traced(models.VectorData):
        def __getitem__(self, index: int) -> Any:
            assert os.getpid() != here
            reading.put(index)
            return super().__getitem__(index)

    here, reading = os.getpid(), multiprocessing.get_context("fork").SimpleQueue()
    alone, many = job(), job(num_workers)
    before = set(multiprocessing.active_children()), readers()
    assert many.evaluate(Traced(n_samples)) == alone.evaluate(models.VectorData(n_samples))
    assert (set(multiprocessing.active_children()), readers()) == before
    assert sorted(reading.get() for _ in range(n_samples)) == list(range(n_samples))
    assert reading.empty()


def test_few_samples_are_read_ahead() -> None:
    """However many there are."""

    def metric(output: torch.Tensor, target: torch.Tensor) -> float:
        most.append(len(read) - 2 * len(most))
        return 1.0

    class Told(models.VectorData):
        def __getitem__(self, index: int) -> Any:
            read.append(index)
            return super().__getitem__(index)

    read: list[int] = []
    most: list[int] = []
    job().evaluate(Told(400), metrics={"it": metric})
    assert len(read) == 402 and max(most) <= 14, "the first sample is looked at, twice; some two parts of two or three"


class Failing(models.VectorData):
    def __getitem__(self, index: int) -> Any:
        if index == 5:
            raise OSError("disk is gone")
        return super().__getitem__(index)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_exception_of_a_sample_names_it_and_leaves_nothing(num_workers: int) -> None:
    its = job(num_workers)
    before = set(multiprocessing.active_children()), readers()
    with pytest.raises(OSError, match="disk is gone") as raised:
        its.evaluate(Failing(8))
    assert "in data[5]" in f"{raised.value} {raised.value.__notes__ if num_workers == 0 else ''}"
    assert (set(multiprocessing.active_children()), readers()) == before
    assert its.evaluate(models.VectorData(8)) > 0


def test_the_first_sample_is_named_too() -> None:
    class Broken(models.VectorData):
        def __getitem__(self, index: int) -> Any:
            raise OSError("disk is gone")

    with pytest.raises(OSError, match="disk is gone") as raised:
        job().evaluate(Broken(8))
    assert raised.value.__notes__ == ["in data[0]"]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_sample_draws_the_same_however_it_is_read(num_workers: int) -> None:
    """And what else draws goes on where it was."""

    class Drawing(models.VectorData):
        def __getitem__(self, index: int) -> Any:
            point, target = super().__getitem__(index)
            return point + torch.randn(16), target

    its = job(num_workers)
    torch.manual_seed(5)
    found = its.evaluate(Drawing(9))
    drawn = torch.rand(())
    torch.manual_seed(5)
    assert drawn == torch.rand(())
    assert found == its.evaluate(Drawing(9)) == job(micro_batch=1).evaluate(Drawing(9))


def test_a_cut_ends_the_wait_for_a_sample_which_the_next_try_has() -> None:
    gated = Gated()
    reader = Reader(gated, pair_of, 0, is_random=False)
    first, second = (Groups(to_nobody, generation, Needs((0,)), 0, CPU) for generation in (1, 2))
    engine: Any = SimpleNamespace(plan=one_stage_plan(), groups=first)
    micro_batches = [range(2), range(4, 6), range(8, 9)]
    samples = reader.read(engine, micro_batches)

    def cut() -> None:
        assert gated.begun.get(timeout=LIMIT_S) == 0
        first.cut("paused")

    cutting = threading.Thread(target=cut)
    cutting.start()
    with pytest.raises(Cut, match="paused"):
        next(samples)
    cutting.join()

    engine.groups = second
    for _ in range(5):
        gated.let.put(None)
    assert [sample[0].tolist() for sample in reader.read(engine, micro_batches)] == [[0, 1], [4, 5], [8]]
    (thread,) = reader._prefetcher._threads
    reader.close()
    assert not thread.is_alive()
    assert [gated.begun.get_nowait() for _ in range(4)] == [1, 4, 5, 8] and gated.begun.empty()
    for groups in (first, second):
        groups.release()


def test_the_next_try_has_samples_as_they_were_read() -> None:
    samples = [(torch.tensor(float(i)), torch.tensor(float(-i))) for i in range(10)]
    reader = Reader(samples, pair_of, 0, is_random=False)
    groups = Groups(to_nobody, 1, Needs((0,)), 0, CPU)
    engine: Any = SimpleNamespace(plan=one_stage_plan(), groups=groups)
    micro_batches = [range(2), range(4, 6), range(8, 9)]
    for _ in range(2):
        found = list(reader.read(engine, micro_batches))
        assert [batch.tolist() for batch, _ in found] == [[0, 1], [4, 5], [8]]
        for batch, target in found:
            batch.add_(target.sub_(1))
    reader.close()
    groups.release()


def test_who_has_nothing_to_read_any_more_stops_reading() -> None:
    gated = Gated()
    reader = Reader(gated, pair_of, 0, is_random=False)
    groups = Groups(to_nobody, 1, Needs((0,)), 0, CPU)
    engine: Any = SimpleNamespace(plan=one_stage_plan(), groups=groups)
    reader.read(engine, [range(1), range(1, 2), range(2, 3)])
    assert gated.begun.get(timeout=LIMIT_S) == 0
    assert list(reader.read(engine, [])) == []
    gated.let.put(None)
    reader.close()
    assert gated.begun.empty()
    groups.release()
