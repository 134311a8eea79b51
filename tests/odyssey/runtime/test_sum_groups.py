"""Groups that one generation hands over to the next: those in which no sum was cut, and they sum as new ones do."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.agent.introductions import Introductions
from launcher.coordinator import gate
from odyssey.plan import needs
from odyssey.plan.needs import Needs, SumOver
from odyssey.plan.worker import Worker
from odyssey.protocol.reports import Offered, Paused, WholeGroup
from odyssey.protocol.units import Position
from odyssey.runtime import nccl
from odyssey.runtime.groups import Groups
from odyssey.runtime.introductions import to_nobody
from odyssey.runtime.sum_group import Sum, SumGroup
from tests.odyssey.runtime.test_transfer import CPU

pytestmark = pytest.mark.timeout(120)
Subsets = tuple[tuple[Worker, ...], ...]


class Ranks:
    """Ranks of this process, a thread each, and what introduces them."""

    def __init__(self) -> None:
        self.of: dict[int, Groups] = {}
        self._introductions = Introductions(lambda rank, known: self.of[rank].introductions.learn(known))
        self._lock = threading.Lock()

    def _offer(self, rank: int, offered: Offered) -> None:
        with self._lock:
            self._introductions.offered(rank, offered)

    def each(self, part: Callable[[Groups], None]) -> None:
        """Have all of them do it, at once."""
        errors: list[BaseException] = []

        def run(groups: Groups) -> None:
            try:
                part(groups)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=(groups,)) for groups in self.of.values()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors

    def build(self, generation: int, members: Iterable[int], subsets: Subsets, kept: Iterable[str] = ()) -> None:
        """Hand over and build as `Session._prepare` does."""
        old, names = self.of, set(kept)
        its = Needs(tuple(sorted(members)), subsets)
        handed = {rank: old[rank].hand_over(names, its) if rank in old else [] for rank in its.members}
        self.of = {
            rank: Groups(partial(self._offer, rank), generation, its, rank, CPU, kept=handed[rank]) for rank in its.members
        }
        for groups in old.values():
            groups.release()
        self.each(Groups.build)

    def paused(self, generation: int) -> dict[int, Paused]:
        return {
            rank: Paused(rank, generation, Position(0, 0), "compute", (), (), groups.whole())
            for rank, groups in self.of.items()
        }

    def group(self, rank: int, over: SumOver) -> SumGroup:
        return self.of[rank]._sums[over]

    def check_sums(self, subsets: Subsets) -> None:
        """Each rank sums with all, and with each subset that it is in."""

        def part(groups: Groups) -> None:
            for subset in (None, *subsets):
                over = groups.needs.members if subset is None else subset
                if groups.me in over and len(over) > 1:
                    value = torch.tensor([2.0**groups.me, 1.0], dtype=torch.float64)
                    groups.waiter.wait(groups.all_reduce(value, subset).wait)
                    assert value.tolist() == [sum(2.0**rank for rank in over), len(over)]

        self.each(part)

    def release(self) -> None:
        """A thread that takes a cut group down may never come back: Gloo keeps some sends that are cut to itself."""
        for groups in self.of.values():
            groups.close()


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, int, Subsets, int | None, dict[int, set[int]], int]:
    """Members of a branch and ranks, subsets, who is lost, which ranks begin a sum of which number that is cut (-1: over all),
    and how many sums had been finished."""
    n = draw(st.integers(3, 6))
    ranks = st.integers(0, n - 1)
    subsets = draw(st.lists(st.sets(ranks, min_size=2), min_size=1, max_size=4, unique_by=lambda its: tuple(sorted(its))))
    ordered = tuple(tuple(sorted(its)) for its in subsets)
    lost = draw(st.none() | ranks)
    begun = draw(st.dictionaries(st.integers(-1, len(ordered) - 1), st.sets(ranks, min_size=1), max_size=2))
    return draw(st.sampled_from((2, 3, 16))), n, ordered, lost, begun, draw(st.integers(0, 2))


@settings(deadline=None, max_examples=25)
@given(case=cases())
def test_what_was_in_no_cut_sum_and_lost_nobody_goes_on(
    case: tuple[int, int, Subsets, int | None, dict[int, set[int]], int],
) -> None:
    branch, n, subsets, lost, begun, n_sums = case
    ranks = Ranks()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(needs, "BRANCH", branch)
        ranks.build(1, range(n), subsets)
        for _ in range(n_sums):
            ranks.check_sums(subsets)
        cut: dict[SumOver, set[int]] = {}
        for number, who in begun.items():
            for rank in who:
                groups = ranks.of[rank]
                if number >= 0 and rank in subsets[number]:
                    groups.all_reduce(torch.ones(1), subsets[number])
                    cut.setdefault(SumOver(False, subsets[number]), set()).add(rank)
                elif number < 0 and groups.needs.is_tree:
                    groups.all_reduce(torch.ones(1))
                    for over in groups.needs.sums_of(rank):
                        if over.is_branch:
                            cut.setdefault(over, set()).add(rank)
        for groups in ranks.of.values():
            groups.cut("paused")
        if lost is not None:
            groups = ranks.of.pop(lost)
            groups.release()

        before = {(rank, over): group.name for rank in ranks.of for over, group in ranks.of[rank]._sums.items()}
        whole = gate.whole_groups(ranks.paused(2))

        assert set(whole.values()) == {over for _, over in before if lost not in over.members and over not in cut}
        left = tuple(its for its in (tuple(rank for rank in subset if rank != lost) for subset in subsets) if its)
        ranks.build(2, ranks.of, left, whole)
        for rank, groups in ranks.of.items():
            for over in groups.needs.sums_of(rank):
                is_same = ranks.group(rank, over).name == before.get((rank, over))
                assert is_same == (over in whole.values())
        for _ in range(2):
            ranks.check_sums(left)
        ranks.release()


def test_no_other_thread_destroys_a_group_than_the_one_that_waits() -> None:
    """To destroy one whose connections were cut may wait for ever, and works and exceptions keep a rank's part of it."""
    ranks = Ranks()
    ranks.build(1, range(2), ((0, 1),))
    parts = [ranks.group(rank, SumOver(False, (0, 1))) for rank in ranks.of]
    assert all(part.group is not None for part in parts)
    destroyed_by: list[str] = []
    for part in parts:
        weakref.finalize(part.group, lambda: destroyed_by.append(threading.current_thread().name))
    ranks.release()
    for groups in ranks.of.values():
        groups.waiter.thread.join()
    assert destroyed_by == ["odyssey-wait-1"] * 2
    assert len(parts) == 2


def test_no_thread_of_c_destroys_a_tensor() -> None:
    """It would need a state of a thread for it, in whose making a process that is forked meanwhile stands still."""
    ranks, destroyed_by = Ranks(), Counter[str]()

    def destroyed() -> None:
        destroyed_by[threading.current_thread().name.partition("-")[0]] += 1

    def part(groups: Groups) -> None:
        for subset in (None, (0, 1)) * 100:
            if subset is not None and groups.me not in subset:
                continue
            value = torch.ones(1)
            weakref.finalize(value, destroyed)
            work = groups.all_reduce(value, subset)
            del value
            groups.finish(work)
            del work

    for branch in (16, 2):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(needs, "BRANCH", branch)
            ranks.build(branch, range(3), ((0, 1),))
            ranks.each(part)
    ranks.release()
    for groups in ranks.of.values():
        groups.waiter.thread.join()
    assert "Dummy" not in destroyed_by, destroyed_by
    assert destroyed_by.total() == 2 * (100 * 3 + 100 * 2)


def whole_of(said: Mapping[int, Iterable[WholeGroup]]) -> dict[str, SumOver]:
    paused = {rank: Paused(rank, 2, Position(0, 0), "compute", (), (), tuple(its)) for rank, its in said.items()}
    return gate.whole_groups(paused)


def test_a_group_serves_on_if_all_its_ranks_say_so() -> None:
    two, three = WholeGroup("1 reduce 0", 2, False), WholeGroup("1 level 0 from 0", 3, True)
    assert whole_of({0: [two, three], 1: [two, three], 2: [three]}) == {
        "1 level 0 from 0": SumOver(True, (0, 1, 2)),
        "1 reduce 0": SumOver(False, (0, 1)),
    }
    assert whole_of({0: [two, three], 2: [three]}) == {}
    assert whole_of({0: [two], 1: [WholeGroup("1 reduce 0", 3, False)]}) == {}, "they do not mean the same"
    assert whole_of({0: [two, two]}) == {}, "a rank counts once"


class Work:
    """It stands for work of a device: a wait only queues it, and it tells of its failure once it has come to an end."""

    def __init__(self) -> None:
        self.is_at_end = self.has_failed = False

    def is_completed(self) -> bool:
        return self.is_at_end

    def wait(self) -> None:
        if self.is_at_end and self.has_failed:
            raise RuntimeError("it was aborted")


class OnDevice:
    """A communicator."""

    is_aborted = False

    def abort(self) -> None:
        self.is_aborted = True


@pytest.mark.parametrize("has_failed", [False, True])
def test_a_group_on_a_device_is_whole_when_the_device_has_done_its_sums(has_failed: bool) -> None:
    group = SumGroup("1 reduce 0", SumOver(False, (0, 1)), is_on_device=True)
    communicator = group.group = OnDevice()
    group.connected()
    group.begin()
    work = Work()
    one = Sum((group,), work, ())
    one.wait()
    assert not group.is_whole, "it is only queued"
    work.is_at_end, work.has_failed = True, has_failed
    if has_failed:
        with pytest.raises(RuntimeError, match="aborted"):
            one.wait()
    else:
        one.wait()
    assert group.is_whole != has_failed

    group.cut()
    nccl.await_aborts(60)

    assert communicator.is_aborted == has_failed


def test_a_generation_without_peers_takes_on_nothing() -> None:
    alone = Groups(to_nobody, 1, Needs((0,), ((0,),)), 0, CPU)
    alone.build()
    assert alone.whole() == () and alone.kept_members == 0
    alone.close()
