"""More ranks than one group has: sums through a tree, what two exchange by a pair, which may be built when it is wanted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue

import pytest
import torch

from launcher.agent.introductions import Introductions
from odyssey.plan import needs
from odyssey.plan.moves import Move
from odyssey.plan.needs import Needs
from odyssey.protocol.reports import Offered
from odyssey.runtime.cut import Cut
from odyssey.runtime.groups import Groups
from odyssey.runtime.transfer import move_layers
from tests.odyssey.runtime.test_transfer import CPU, Holder, same, state_of, together

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize(("branch", "n"), [(2, 3), (2, 7), (3, 10), (4, 13)])
def test_all_have_the_same_sum(branch: int, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each adds what it has, also where several sums are begun before the first is waited for."""
    monkeypatch.setattr(needs, "BRANCH", branch)
    sums: dict[int, list[torch.Tensor]] = {}

    def part(rank: int) -> Callable[[Groups], None]:
        def run(groups: Groups) -> None:
            mine = [torch.tensor([0.1 * rank, 1.0, k], dtype=torch.float64) for k in range(3)]
            works = [groups.all_reduce(tensor) for tensor in mine]
            for work in works:
                groups.waiter.wait(work.wait)
            sums[rank] = mine

        return run

    ended = together(300 + 10 * branch + n, {rank: part(rank) for rank in range(n)})

    assert set(ended.values()) == {None}
    for k in range(3):
        assert sums[0][k].tolist() == pytest.approx([0.1 * sum(range(n)), n, k * n])
        assert all(torch.equal(sums[rank][k], sums[0][k]) for rank in range(n)), "to the last bit"


def test_states_move_over_pairs_that_are_built_when_they_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needs, "BRANCH", 2)
    moves = [Move(0, 0, 1), Move(3, 3, 2), Move(0, 1, 2), Move(3, 2, 1), Move(1, 0, 3), Move(0, 2, 3), Move(3, 1, 0)]
    ranks = {rank: Holder({layer: state_of(layer) for layer in held}) for rank, held in enumerate(((0, 1), (), (), (3,)))}

    def part(rank: int) -> Callable[[Groups], None]:
        return lambda groups: move_layers(moves, rank, ranks[rank], groups) and None  # type: ignore[arg-type, func-returns-value]

    ended = together(400, {rank: part(rank) for rank in ranks})

    assert set(ended.values()) == {None}
    assert {rank: set(holder.held) for rank, holder in ranks.items()} == {0: {0, 1, 3}, 1: {0, 3}, 2: {0, 3}, 3: {0, 1, 3}}
    assert all(same(state, state_of(layer)) for holder in ranks.values() for layer, state in holder.held.items())


def test_groups_that_were_built_before_their_generation_have_pairs_within_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent drops what is offered for any generation but the one at hand."""
    monkeypatch.setattr(needs, "BRANCH", 2)
    at_hand, n = 1, 3
    of_rank: dict[int, Groups] = {}
    introductions, lock = Introductions(lambda rank, known: of_rank[rank].introductions.learn(known)), threading.Lock()

    def offer(rank: int, offered: Offered) -> None:
        with lock:
            if offered.generation == at_hand:
                introductions.offered(rank, offered)

    built: SimpleQueue[str] = SimpleQueue()
    for rank in range(n):
        of_rank[rank] = Groups(partial(offer, rank), 1, Needs(tuple(range(n))), rank, CPU, attempt=1)
        of_rank[rank].build_beside(lambda: None, built.put)
    assert [built.get() for _ in range(n)] == [""] * n
    at_hand = 2
    for groups in of_rank.values():
        groups.introductions.generation = 2
        groups.build()
    passed = torch.zeros(1)

    def send() -> None:
        of_rank[1].waiter.wait(of_rank[1].send(torch.ones(1), 2, 7).wait)

    sender = threading.Thread(target=send)
    sender.start()
    of_rank[2].waiter.wait(of_rank[2].receive(passed, 1, 7).wait)
    sender.join()
    for groups in of_rank.values():
        groups.release()
        groups.waiter.thread.join()

    assert passed.item() == 1.0


def test_a_cut_ends_the_wait_for_a_sum_and_for_a_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank of another branch begins no sum; another one waits for a pair that nobody else wants."""
    monkeypatch.setattr(needs, "BRANCH", 2)
    of_rank: dict[int, Groups] = {}
    all_are_there = threading.Barrier(5)

    def part(rank: int) -> Callable[[Groups], None]:
        def run(groups: Groups) -> None:
            of_rank[rank] = groups
            all_are_there.wait()
            if rank == 4:
                for each in of_rank.values():
                    threading.Timer(0.0, each.cut, ["paused"]).start()
            elif rank == 3:
                groups.send(torch.zeros(1), 0, 1)
            else:
                groups.waiter.wait(groups.all_reduce(torch.zeros(1)).wait)

        return run

    ended = together(401, {rank: part(rank) for rank in range(5)})

    assert {rank for rank, error in ended.items() if isinstance(error, Cut)} == {0, 1, 2, 3}
