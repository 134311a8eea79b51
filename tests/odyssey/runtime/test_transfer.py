"""Layer states on their way between ranks: in the plan's order, in pieces, passed on; and cut in the middle."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch

from launcher.agent.introductions import Introductions
from odyssey.errors import OdysseyError
from odyssey.plan.moves import Move
from odyssey.plan.needs import Needs
from odyssey.protocol.reports import Offered
from odyssey.runtime import peer_memory, transfer
from odyssey.runtime.cut import Cut
from odyssey.runtime.groups import Groups
from odyssey.runtime.transfer import Moved, move_layers

pytestmark = pytest.mark.timeout(60)
CPU = torch.device("cpu")


class Holder:
    """What a rank holds: layer -> its state."""

    def __init__(self, held: Mapping[int, Any]) -> None:
        self.held = dict(held)

    def export(self, layer: int) -> Any:
        return self.held[layer]

    def adopt(self, layer: int, state: Any) -> None:
        assert layer not in self.held
        self.held[layer] = state


def state_of(layer: int) -> dict[str, Any]:
    draws = torch.Generator().manual_seed(layer)
    weight = torch.randn(40 + layer, 33, generator=draws, dtype=torch.float64)
    view = weight.T[3:9]
    return {"weight": weight, "of a view": view, "step": torch.tensor(3.0), "empty": torch.empty(0), "rate": 0.1 * layer}


def together(generation: int, run: Mapping[int, Callable[[Groups], None]]) -> dict[int, BaseException | None]:
    """Run each rank's part in a thread of its own, with groups of them all; what each ended with."""
    ended: dict[int, BaseException | None] = {}
    members = sorted(run)
    all_have_ended = threading.Barrier(len(members))
    of_rank: dict[int, Groups] = {}
    introductions, lock = Introductions(lambda rank, known: of_rank[rank].introductions.learn(known)), threading.Lock()

    def offer(rank: int, offered: Offered) -> None:
        with lock:
            introductions.offered(rank, offered)

    def part(rank: int) -> None:
        groups = of_rank[rank] = Groups(partial(offer, rank), generation, Needs(tuple(members)), rank, CPU)
        try:
            groups.build()
            run[rank](groups)
            ended[rank] = None
        except (Cut, OdysseyError) as error:
            ended[rank] = error
        finally:
            all_have_ended.wait()  # the connections of one process are shut together
            groups.release()

    threads = [threading.Thread(target=part, args=(rank,)) for rank in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ended


@pytest.fixture(params=["read", "sent"])
def is_read(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether ranks can read each other's memory."""
    if request.param == "sent":
        monkeypatch.setattr(peer_memory, "reach", lambda handle: None)
    return bool(request.param == "read")


def same(a: Any, b: Any) -> bool:
    return all(torch.equal(a[key], b[key]) if isinstance(b[key], torch.Tensor) else a[key] == b[key] for key in b)


@pytest.mark.parametrize("piece_bytes", [48, 4096, 4 << 20])
def test_all_arrives_as_it_left_also_what_is_passed_on(
    piece_bytes: int, is_read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0 to 1 to 2 to 3 while others go the opposite way: an order in which a rank sends and receives in turn."""
    monkeypatch.setattr(transfer, "PIECE_BYTES", piece_bytes)
    moves = [Move(0, 0, 1), Move(3, 3, 2), Move(0, 1, 2), Move(3, 2, 1), Move(1, 0, 3), Move(0, 2, 3), Move(3, 1, 0)]
    ranks = {rank: Holder({layer: state_of(layer) for layer in held}) for rank, held in enumerate(((0, 1), (), (), (3,)))}
    moved: dict[int, Moved] = {}

    def part(rank: int) -> Callable[[Groups], None]:
        def run(groups: Groups) -> None:
            moved[rank] = move_layers(moves, rank, ranks[rank], groups)  # type: ignore[arg-type]

        return run

    ended = together(100 + piece_bytes, {rank: part(rank) for rank in ranks})

    assert set(ended.values()) == {None}
    assert {rank: set(holder.held) for rank, holder in ranks.items()} == {0: {0, 1, 3}, 1: {0, 3}, 2: {0, 3}, 3: {0, 1, 3}}
    assert all(same(state, state_of(layer)) for holder in ranks.values() for layer, state in holder.held.items())
    assert all(moved[rank].n_bytes > 8 * 33 * 40 for rank in ranks)
    assert all(each.n_read_bytes == each.n_bytes * is_read for each in moved.values())


def test_what_did_not_arrive_as_it_was_sent_is_refused(is_read: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "PIECE_BYTES", 4096)
    digest, sender = transfer.digest_bytes, threading.local()
    n_digested = iter(range(10**6))

    def wrong_once(flat: torch.Tensor) -> int:
        is_third = getattr(sender, "is_me", False) and next(n_digested) == 2
        return digest(flat) ^ is_third

    def send(groups: Groups) -> None:
        sender.is_me = True
        move_layers([Move(5, 0, 1)], 0, Holder({5: state_of(5)}), groups)  # type: ignore[arg-type]

    def receive(groups: Groups) -> None:
        move_layers([Move(5, 0, 1)], 1, Holder({}), groups)  # type: ignore[arg-type]

    monkeypatch.setattr(transfer, "digest_bytes", wrong_once)
    ended = together(200, {0: send, 1: receive})
    assert isinstance(ended[1], OdysseyError) and "layer 5 from rank 0 did not arrive as it was sent" in str(ended[1])


def test_a_cut_in_the_middle_of_a_move_frees_both_and_keeps_what_they_had(
    is_read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I8: The target is cut when it has digested some pieces; the move before has arrived. What was lent to it stays no longer
    than the groups do."""
    monkeypatch.setattr(transfer, "PIECE_BYTES", 1024)
    moves = [Move(1, 0, 1), Move(2, 0, 1)]
    source, target = Holder({1: state_of(1), 2: state_of(2)}), Holder({})
    to_cut: list[Groups] = []
    digest, receiver = transfer.digest_bytes, threading.local()

    def and_cut(flat: torch.Tensor) -> int:
        if getattr(receiver, "is_me", False) and 1 in target.held:
            for each in to_cut:
                each.cut("a newer generation")  # as all ranks are told to
        return digest(flat)

    def send(groups: Groups) -> None:
        to_cut.append(groups)
        try:
            move_layers(moves, 0, source, groups)  # type: ignore[arg-type]
        finally:
            assert bool(groups.memory.lent) is is_read

    def receive(groups: Groups) -> None:
        receiver.is_me = True
        to_cut.append(groups)
        move_layers(moves, 1, target, groups)  # type: ignore[arg-type]

    monkeypatch.setattr(transfer, "digest_bytes", and_cut)
    ended = together(300, {0: send, 1: receive})
    assert isinstance(ended[0], Cut) and isinstance(ended[1], Cut)
    for groups in to_cut:
        groups.waiter.thread.join()
        assert not groups.memory.lent
    assert set(source.held) == {1, 2} and set(target.held) == {1} and same(target.held[1], state_of(1))
