"""The table of ranks: what it answers at once against a count over all ranks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from launcher.coordinator.ranks import ALIVE, NEXT, Ranks, RankState
from odyssey.codec import Packed
from odyssey.protocol import frames
from odyssey.protocol.reports import Paused, Ready
from odyssey.protocol.units import Position

N_RANKS = 5


@given(st.data())
def test_what_the_table_answers_is_what_a_count_over_all_ranks_finds(data: st.DataObject) -> None:
    ranks = Ranks()
    ranks.start_all(N_RANKS)
    states = dict.fromkeys(range(N_RANKS), RankState.STARTING)
    has_run: set[int] = set()
    paused: set[int] = set()
    for _ in range(data.draw(st.integers(0, 30))):
        rank = data.draw(st.sampled_from(range(N_RANKS)))
        if data.draw(st.booleans()) and states[rank] in ALIVE:
            ranks.answer_paused(Paused(rank, 1, Position(0, 0), "compute", ()))
            ranks.answer_ready(Ready(rank, 1, Position(0, 0), (), (), 0, 0.0, 0.0, 0))
            paused.add(rank)
            continue
        if data.draw(st.booleans()):
            ranks.run(None)
            has_run |= {rank for rank, state in states.items() if state is RankState.MEMBER}
        state = data.draw(st.sampled_from(RankState))
        try:
            ranks.enter(rank, state)
        except ValueError:
            assert state not in NEXT[states[rank]]
            continue
        assert state in NEXT[states[rank]]
        states[rank] = state
        if state not in ALIVE or state is RankState.STARTING:
            paused.discard(rank)
        if state in (RankState.STARTING, RankState.ABSENT):
            has_run.discard(rank)

    again: Ranks = Packed(Ranks).decode(frames.packed(ranks))
    for table in (ranks, again):
        assert table.alive == {rank for rank, state in states.items() if state in ALIVE}
        for state in RankState:
            assert table.of(state) == {rank for rank, its in states.items() if its is state}
        assert table.new == table.alive - has_run
        asked = data.draw(st.lists(st.sampled_from(RankState), unique=True))
        for rank in range(N_RANKS):
            assert table.is_another(rank, *asked) == any(its in asked for other, its in states.items() if other != rank)
        assert table.paused.keys() == table.ready.keys() == paused
        n_members = sum(state in (RankState.MEMBER, RankState.FAILING) for state in states.values())
        assert table.have_all_paused() == table.are_all_ready() == (len(paused) >= n_members)
    ranks.forget_answers()
    assert not ranks.paused and not ranks.ready
