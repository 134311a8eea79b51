"""Data that can only be iterated over: each micro-batch is the same whoever reads it when, and what it was before."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, default_collate, get_worker_info

from odyssey.errors import JobError
from odyssey.plan.needs import Needs
from odyssey.plan.worker import Rank, worker_of
from odyssey.runtime import streams as module
from odyssey.runtime.batches import Batches
from odyssey.runtime.data import batches_by, pairs_by
from odyssey.runtime.prefetcher import Prefetcher
from odyssey.runtime.snapshots import Snapshot, Snapshots, is_due
from tests import streams

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore:This DataLoader will create")]
GLOBAL_BATCH, MICRO_BATCH, SEED, N_STEPS = 14, 4, 7, 9
WHOLE = [range(start, min(start + MICRO_BATCH, GLOBAL_BATCH)) for start in range(0, GLOBAL_BATCH, MICRO_BATCH)]
CUT = [range(3), range(3, 5), range(5, 9), range(9, 13), range(13, 14)]


class Pairs:
    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor(i), torch.tensor(-i)


def prefetcher(data: Any, num_workers: int = 0, micro_batch: int = MICRO_BATCH) -> Prefetcher:
    return Batches(data, GLOBAL_BATCH, micro_batch, SEED, num_workers=num_workers).checked().samples().prefetcher()


def expected(kind: str, step: int, positions: range) -> list[int]:
    if kind not in EXPECTED:
        EXPECTED[kind] = streams.steps_of(streams.Stream(Pairs(), kind), GLOBAL_BATCH, MICRO_BATCH, SEED, N_STEPS)
    return [int(EXPECTED[kind][step][position][0]) for position in positions]


EXPECTED: dict[str, list[list[Any]]] = {}


@pytest.mark.parametrize("num_workers", [0, 1, 2])
@pytest.mark.parametrize("kind", streams.KINDS)
def test_steps_use_what_the_workers_of_a_data_loader_would_read(kind: str, num_workers: int) -> None:
    data = prefetcher(streams.Stream(Pairs(), kind), num_workers)
    for step in range(N_STEPS):
        data.want(step, WHOLE)
        for positions in WHOLE:
            inputs, targets = data.get(step, positions)
            assert inputs.tolist() == expected(kind, step, positions)
            assert torch.equal(inputs, -targets)
    data.close()


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", streams.KINDS)
def test_who_takes_over_goes_back_or_reads_otherwise_reads_the_same(
    kind: str, num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker process answers after each sample that it is not there yet."""
    monkeypatch.setattr(module, "READ_AT_A_TIME_S", 0.0)
    data = prefetcher(streams.Stream(Pairs(), kind), num_workers)

    @given(st.lists(st.tuples(st.integers(0, N_STEPS - 1), st.sampled_from([WHOLE, CUT]), st.data()), min_size=1, max_size=4))
    @settings(max_examples=40 if num_workers == 0 else 8, deadline=None)
    def check(units: list[Any]) -> None:
        for step, micro_batches, draw in units:
            mine = draw.draw(st.lists(st.sampled_from(micro_batches), unique=True, min_size=1))
            data.want(step, mine)
            for positions in draw.draw(st.permutations(mine)):
                assert data.get(step, positions)[0].tolist() == expected(kind, step, positions)

    check()
    data.close()


ALONE: Any = SimpleNamespace(needs=Needs((worker_of(Rank(0)),)))
"""Groups of a rank that meets nobody."""


def read_alone(data: Prefetcher, steps: Sequence[int]) -> list[list[int]]:
    """A rank that trains alone does so, too. Gives the samples of each micro-batch."""
    assert data.snapshots is not None
    found = []
    for step in steps:
        data.want(step, WHOLE)
        found += [data.get(step, positions)[0].tolist() for positions in WHOLE]
        if is_due(step):
            data.snapshots.exchange(step, WHOLE, ALONE)
            data.snapshots.take()
    return found


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", streams.STATED)
def test_who_takes_over_reads_on_from_the_newest_snapshot(
    kind: str, num_workers: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    units = {step: [expected(kind, step, positions) for positions in WHOLE] for step in (5, 6, 8)}  # which reads all, too
    first = prefetcher(streams.Stream(Pairs(), kind), num_workers)
    monkeypatch.setenv("BEGUN", str(tmp_path / "begun"))
    monkeypatch.setenv("RANK", "1")
    second = prefetcher(streams.Stream(Pairs(), kind), num_workers)
    (tmp_path / "begun").unlink()  # by the first look
    assert first.snapshots is not None and second.snapshots is not None
    read_alone(first, range(6))
    first.close()
    (tmp_path / "begun").unlink(missing_ok=True)
    second.snapshots.load_state_dict(first.snapshots.state_dict())
    for step, micro_batches in units.items():
        second.want(step, WHOLE)
        assert [second.get(step, positions)[0].tolist() for positions in WHOLE] == micro_batches
    second.close()
    begun = [tuple(map(int, line.split()[2:])) for line in (tmp_path / "begun").read_text().splitlines()]
    assert begun and (0, 0) not in begun


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", streams.STATED)
def test_a_step_that_is_gone_back_to_has_the_snapshots_that_it_had(kind: str, num_workers: int) -> None:
    """A `load` goes back so. What was read of it may be there still, here or in a worker process."""
    data = prefetcher(streams.Stream(Pairs(), kind), num_workers)
    assert data.snapshots is not None
    read_alone(data, range(5))
    shared = data.snapshots.shared
    for steps in ([4, 5], [3, 4, 5, 6], [4]):
        data.snapshots.shared = {}
        assert read_alone(data, steps) == [expected(kind, step, positions) for step in steps for positions in WHOLE]
        assert data.snapshots.shared == shared
    data.close()


class Forgets(streams.Stream):
    """Its state is not all that it has."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Cannot(Forgets):
    def state_dict(self) -> dict[str, Any]:
        raise OSError("not of this kind")


class Large(Forgets):
    def state_dict(self) -> dict[str, Any]:
        return {"buffer": bytes(2 << 20)}


@pytest.mark.parametrize(
    ("kind", "why"), [(Large, "larger than"), (Forgets, "other samples follow upon"), (Cannot, "not of this kind")]
)
def test_a_state_of_no_use_is_not_used_and_who_reads_long_is_told(
    kind: type[Forgets], why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "SAY_AFTER_S", 0.0)
    data = prefetcher(kind(Pairs(), "whole"))
    assert data.snapshots is None
    data.want(3, WHOLE)
    assert data.get(3, WHOLE[0])[0].tolist() == expected("whole", 3, WHOLE[0])
    assert why in capsys.readouterr().err
    data.close()


def test_a_state_that_grows_too_large_leaves_the_one_before() -> None:
    class Grows(streams.Stated):
        def state_dict(self) -> dict[str, Any]:
            return {"numbers": list(self.reading.numbers), "buffer": [], "more": bytes(self.epoch * (2 << 20))}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.given = state

    data = prefetcher(Grows(Pairs(), "divided stated"))
    assert data.snapshots is not None
    read_alone(data, range(14))
    data.close()
    assert data.snapshots.shared[3].n_read == 16, "the last one in the first epoch of its split"
    assert 0 not in data.snapshots.shared, "its first epoch was over in the second step"


def test_a_snapshot_of_data_that_were_divided_otherwise_is_not_used() -> None:
    snapshots = Snapshots(range(0, 14, 4))
    snapshots.load_state_dict({"n_splits": 3, "splits": {0: (8, 0, "")}})
    assert snapshots.shared == {}


def test_a_snapshot_may_come_while_those_of_earlier_steps_are_dropped() -> None:
    """The reader's thread tells of it at any moment, such as when two steps are compared."""
    snapshots = Snapshots(range(1))
    told = Snapshot(8, 0, b"")

    class Step(int):
        def __lt__(self, other: int) -> bool:
            snapshots.tell(0, 8, told)
            return super().__lt__(other)

        def __le__(self, other: int) -> bool:
            snapshots.tell(0, 8, told)
            return super().__le__(other)

    snapshots.tell(0, Step(4), told)
    snapshots.exchange(4, [range(1)], ALONE)
    snapshots.take()
    snapshots.forget_before(5)
    snapshots.exchange(8, [range(1)], ALONE)


def test_an_epoch_of_a_whole_stream_uses_each_sample_once() -> None:
    data = prefetcher(streams.Stream(Pairs(), "whole"))
    found: list[int] = []
    for step in range(6):
        data.want(step, WHOLE)
        found += [i for positions in WHOLE for i in data.get(step, positions)[0].tolist()]
    assert sorted(found[:40]) == sorted(found[40:80]) == list(range(40))
    assert found[:40] != found[40:80]


class OnItself(IterableDataset[Any]):
    """What it iterates over is kept on the object itself."""

    def __iter__(self) -> OnItself:
        info = get_worker_info()
        assert info is not None
        self.left = list(range(info.id, 40, info.num_workers))
        return self

    def __next__(self) -> Any:
        if not self.left:
            raise StopIteration
        return Pairs()[self.left.pop(0)]


def test_splits_that_are_read_in_turn_do_not_meet_in_the_data_set() -> None:
    data = prefetcher(OnItself())
    found = []
    for step in range(2):
        data.want(step, WHOLE)
        found += [data.get(step, positions)[0].tolist() for positions in WHOLE]
    assert found[:4] == [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7]]
    assert found[4:] == [[16, 20, 24, 28], [17, 21, 25, 29], [18, 22, 26, 30], [11, 15]]


def test_a_script_that_goes_on_to_use_its_data_set_changes_nothing() -> None:
    stream = streams.Stream(Pairs(), "divided")
    data = prefetcher(stream)
    stream.data = []
    data.want(2, WHOLE)
    assert data.get(2, WHOLE[3])[0].tolist() == expected("divided", 2, WHOLE[3])


@pytest.mark.parametrize("kind", ["drawn", "whole drawn"])
def test_reading_leaves_the_generators_and_the_worker_as_they_were(kind: str) -> None:
    def draw() -> tuple[float, ...]:
        return float(torch.rand(())), random.random(), numpy.random.random()

    torch.manual_seed(1), random.seed(1), numpy.random.seed(1)
    before = draw()
    torch.manual_seed(1), random.seed(1), numpy.random.seed(1)
    data = prefetcher(streams.Stream(Pairs(), kind))
    data.want(3, WHOLE)
    data.get(3, WHOLE[1])
    assert draw() == before
    assert get_worker_info() is None


class Fails(streams.Stream):
    """Once, at a sample; it is told by a file, as worker processes are others."""

    error: type[BaseException] = OSError

    def __init__(self, kind: str, mark: Any) -> None:
        super().__init__(Pairs(), kind)
        self.mark = mark

    def __iter__(self) -> Iterator[Any]:
        for n, sample in enumerate(super().__iter__()):
            if n == 6 and not self.mark.exists():
                self.mark.touch()
                raise self.error("disk is gone")
            yield sample


@pytest.mark.parametrize(("num_workers", "error"), [(0, OSError), (2, OSError), (0, SystemExit)])
@pytest.mark.parametrize(("kind", "place"), [("divided", "sample 6 of split 1 of 4 of data"), ("whole", "sample 6 of data")])
def test_an_exception_says_where_it_was_and_who_asks_again_reads_on_as_if_there_had_been_none(
    kind: str, place: str, num_workers: int, error: type[BaseException], tmp_path: Any
) -> None:
    failing = Fails(kind, tmp_path / "mark")
    failing.error = error
    data = prefetcher(failing, num_workers)
    step = 1 if kind == "divided" else 0
    data.want(step, WHOLE[1:2])
    with pytest.raises(error, match="disk is gone") as raised:
        data.get(step, WHOLE[1])
    assert place in f"{raised.value} {getattr(raised.value, '__notes__', '')}"
    data.want(step, WHOLE[1:2])
    assert data.get(step, WHOLE[1])[0].tolist() == expected(kind, step, WHOLE[1])
    data.close()


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("kind", ["whole", "divided", "whole stated"])
def test_samples_that_are_changed_by_collating_are_read_anew_with_those_that_follow(kind: str, num_workers: int) -> None:
    def collate(samples: list[dict[str, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.stack([sample["x"].mul_(-1) for sample in samples]), torch.stack([each.pop("x") for each in samples])

    batches = Batches(
        streams.Stream(Named(), kind), GLOBAL_BATCH, MICRO_BATCH, SEED, collate=pairs_by(collate), num_workers=num_workers
    )
    data = batches.samples().prefetcher()
    for cuts in (WHOLE, CUT, WHOLE):
        data.want(2, cuts)
        for positions in cuts:
            assert (-data.get(2, positions)[0]).tolist() == expected(kind, 2, positions)
    data.close()


class Unseen:
    """A change of what it has cannot be seen."""

    def __init__(self, x: int) -> None:
        self.x = x


class Uncopied(Unseen):
    """It cannot be copied, either."""

    def __deepcopy__(self, memo: Any) -> Unseen:
        raise TypeError("cannot be copied")


class Counted(IterableDataset[Any]):
    """Samples of a form, which change when they are collated; who begins to read is counted."""

    def __init__(self, form: Callable[[int], Any], n_begun: list[None]) -> None:
        self.form, self.n_begun = form, n_begun

    def __deepcopy__(self, memo: Any) -> Any:
        return self

    def __iter__(self) -> Iterator[Any]:
        self.n_begun.append(None)
        return map(self.form, range(200))


def negated(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    found = []
    for sample in samples:
        if isinstance(sample, dict):
            sample["x"] *= -1
            found.append(int(sample["x"]))
        else:
            sample.x *= -1
            found.append(sample.x)
    return torch.tensor(found), torch.zeros(len(found))


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("form", [lambda i: {"x": numpy.full((), i)}, Unseen, Uncopied], ids=["array", "own class", "uncopied"])
def test_changes_that_cannot_be_seen_by_collating_change_no_sample_that_is_wanted_again(
    form: Callable[[int], Any], num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker process answers after each sample that it is not there yet, and goes on from there all the same."""
    monkeypatch.setattr(module, "READ_AT_A_TIME_S", 0.0)
    n_begun: list[None] = []
    batches = Batches(Counted(form, n_begun), GLOBAL_BATCH, MICRO_BATCH, SEED, pairs_by(negated), num_workers)
    data = batches.samples().prefetcher()
    n_begun.clear()
    for cuts in (WHOLE, CUT, WHOLE):
        data.want(2, cuts, [])
        for positions in cuts:
            assert (-data.get(2, positions)[0]).tolist() == [2 * GLOBAL_BATCH + i for i in positions]
    data.close()
    if form is not Uncopied and not num_workers:
        assert len(n_begun) == 1, "what was read is not read again"


def test_a_batch_that_is_the_very_sample_may_be_changed_in_place() -> None:
    stream = Counted(lambda i: numpy.full(2, float(i)), [])
    data = Batches(stream, 4, 1, SEED, batches_by(lambda samples: torch.from_numpy(samples[0]))).samples().prefetcher()
    for _ in range(2):
        data.want(0, [range(1, 2)])
        batch, _ = data.get(0, range(1, 2))
        assert batch.tolist() == [1, 1]
        batch.sub_(5)
    data.close()


class Named(Pairs):
    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"x": torch.tensor(i)}


class Cut(Exception):
    pass


def test_a_cut_ends_the_reading_between_two_samples_and_it_goes_on_from_there() -> None:
    data = prefetcher(streams.Stream(Pairs(), "drawn"))
    data.want(5, WHOLE)
    n = 0

    def check() -> None:
        nonlocal n
        n += 1
        if n in (5, 9):
            raise Cut

    for _ in range(2):
        with pytest.raises(Cut):
            data.get(5, WHOLE[2], check)
    assert data.get(5, WHOLE[2], check)[0].tolist() == expected("drawn", 5, WHOLE[2])
    assert n == 6 * 4 + 2, "each sample was read once"


def test_what_comes_before_is_not_read_for_nobody() -> None:
    begun: SimpleQueue[int] = SimpleQueue()
    let: SimpleQueue[None] = SimpleQueue()
    is_gated = threading.Event()

    class Gated(IterableDataset[Any]):
        def __deepcopy__(self, memo: Any) -> Any:
            return self

        def __iter__(self) -> Iterator[Any]:
            for i in range(1000):
                if is_gated.is_set():
                    begun.put(i)
                    let.get()
                yield Pairs()[i]

    data = prefetcher(Gated())
    is_gated.set()
    data.want(50, WHOLE[:1])
    assert begun.get() == 0
    data.want(0, WHOLE[:1], [])
    for _ in range(5):
        let.put(None)
    assert data.get(0, WHOLE[0])[0].tolist() == [0, 1, 2, 3]
    data.close()
    assert [begun.get() for _ in range(4)] == [0, 1, 2, 3], "what is wanted now comes next"
    assert begun.empty()


def test_what_is_read_to_be_dropped_is_told_of(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    data = prefetcher(streams.Stream(Pairs(), "drawn"))
    data.want(1, WHOLE)
    data.get(1, WHOLE[0])
    assert capfd.readouterr().err == "", "not what is short"
    monkeypatch.setattr(module, "SAY_AFTER_S", 0.0)
    data.get(1, WHOLE[1])
    first, *_ = capfd.readouterr().err.splitlines()
    assert first == "odyssey: split 1 of 4 of data: 1 of the 4 samples before this step are read, in 0 s"


class AnotherEachTime(IterableDataset[Any]):
    own = random.Random(0)

    def __iter__(self) -> Iterator[Any]:
        yield from (Pairs()[self.own.randrange(10**9)] for _ in range(100))


class Few(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        yield from map(Pairs().__getitem__, range(info.id, 3, info.num_workers))


class Open(IterableDataset[Any]):
    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __iter__(self) -> Iterator[Any]:
        yield from map(Pairs().__getitem__, range(30))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("data", "what", "help"),
    [
        (AnotherEachTime(), "data gives other samples when it is iterated over again", "generators only"),
        (Few(), "split 3 of 4 of data has no samples", "samples to each of 4 workers"),
        (Open(), "data cannot be copied: cannot pickle", "in __iter__"),
        ((Pairs()[i] for i in range(40)), "data is a generator, which can be iterated over once", "begins anew"),
    ],
)
def test_what_cannot_be_read_again_is_refused(data: Any, what: str, help: str, num_workers: int) -> None:
    def read() -> None:
        found = prefetcher(data, num_workers)
        found.want(0, WHOLE)
        with closing(found):
            for positions in WHOLE:
                found.get(0, positions)

    with pytest.raises(JobError, match=what) as error:
        read()
    assert help in error.value.help


def test_samples_that_cannot_be_one_micro_batch_are_named() -> None:
    class OfAnyLength(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            yield from ((torch.zeros(2 + (i == 5)), torch.zeros(1)) for i in range(40))

    data = prefetcher(OfAnyLength())
    data.want(0, WHOLE)
    with pytest.raises(JobError, match=r"sample 4 of data and sample 5 of data cannot be one micro-batch: \(float32\[2\], "):
        data.get(0, WHOLE[1])
    data.close()


def test_the_first_micro_batch_is_told_of_whoever_looks_at_it() -> None:
    def look(kind: str) -> Any:
        return Batches(streams.Stream(Pairs(), kind), GLOBAL_BATCH, MICRO_BATCH, SEED).samples()

    for kind in streams.KINDS:
        torch.rand(1), random.random()
        assert look(kind).digest == look(kind).digest
        samples = [Pairs()[i] for i in expected(kind, 0, WHOLE[0])]
        assert [each.tolist() for each in look(kind).first()] == [each.tolist() for each in default_collate(samples)]
    assert look("whole drawn").digest != look("whole").digest
