"""A sharded model at its coordinator: who is measured, and with whose values its shards begin."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from launcher.coordinator.actions import Record, StartMeasure
from launcher.coordinator.gate import built_otherwise
from launcher.coordinator.state import Status
from launcher.joblog.events import PlanChosen, Profiled, Proposed
from odyssey.plan.moves import Move
from odyssey.plan.plan import StateFrom
from odyssey.protocol.model_spec import ModelSpec
from odyssey.protocol.reports import Hello
from strategies.situation import Candidate
from tests.launcher.coordinator.talk import N_LAYERS, Talk, model, profile, text_of
from tests.odyssey.plan.test_sharded import sharded_plan
from tests.planning import sharded


def shards(n_shards: int, values: tuple[str, ...] = ()) -> ModelSpec:
    return replace(model(n_shards), n_shards=n_shards, values=values)


def joined(n_ranks: int, n_shards: int) -> tuple[Talk, str]:
    """A job whose ranks are all there, and what was done then."""
    talk = Talk()
    talk.say(f"start {n_ranks}")
    lines = [line for rank in range(n_ranks) for line in text_of(talk.feed(Hello(rank, shards(n_shards), 1)))]
    return talk, "\n".join(lines)


# -- who is measured -----------------------------------------------------------------------------------------------------


@given(n_shards=st.integers(2, 5), n_copies=st.integers(1, 3), n_more=st.integers(0, 4))
def test_the_lowest_rank_with_each_shard_is_measured(n_shards: int, n_copies: int, n_more: int) -> None:
    _, said = joined(n_shards * n_copies + n_more, n_shards)
    assert f"measure(0) along {', '.join(f'{shard}:{shard}-{shard + 1}' for shard in range(n_shards))}" in said


@given(n_shards=st.integers(2, 4), n_copies=st.integers(1, 3), data=st.data())
def test_after_a_loss_in_the_trial_the_next_one_with_the_shard_is_measured_or_the_job_ends(
    n_shards: int, n_copies: int, data: st.DataObject
) -> None:
    n_ranks = n_shards * n_copies
    talk, _ = joined(n_ranks, n_shards)
    left = list(range(n_ranks))
    for _ in range(data.draw(st.integers(1, n_ranks - 1))):
        lost = data.draw(st.sampled_from(left))
        left.remove(lost)
        talk.say(f"lost {lost}")
        said = "\n".join(talk.say(f"paused {rank} 0 compute held=") for rank in left)
        first = {rank % n_shards: rank for rank in reversed(left)}
        missing = sorted(set(range(n_shards)) - first.keys())
        if missing:
            what = f"ended 1: no rank is there for shard {missing[0]} of the model"
            assert f"{what} | help: start as many ranks as odyssey.shard_mesh is of, or a multiple" in said
            assert "end 1\n" in said and "measure(" not in said
            return
        along = ", ".join(f"{first[shard]}:{shard}-{shard + 1}" for shard in range(n_shards))
        assert f"measure({talk.state.world.generation}) along {along}\n" in said


def test_a_job_that_has_too_few_ranks_for_its_shards_ends_before_it_measures() -> None:
    talk, said = joined(2, 3)
    assert "ended 1: no rank is there for shard 2 of the model | help: start as many ranks as odyssey.shard_mesh is of" in said
    assert not any(isinstance(action, StartMeasure) for action in talk.actions)


# -- with whose values it begins -----------------------------------------------------------------------------------------


def built(rank: int, n_shards: int, value: str) -> ModelSpec:
    """It is what a rank tells of that has its own shard of the model."""
    return shards(n_shards, tuple(value if shard == rank % n_shards else "" for shard in range(n_shards)))


@given(n_shards=st.integers(2, 4), n_copies=st.integers(1, 3), n_keepers=st.integers(0, 3), data=st.data())
def test_shards_begin_with_the_values_of_the_first_rank_that_has_them(
    n_shards: int, n_copies: int, n_keepers: int, data: st.DataObject
) -> None:
    """Each other rank with the shard that has built other values gets them, whether it computes or keeps its shard."""
    n_working = n_shards * n_copies
    ranks = data.draw(st.permutations(range(n_working + n_keepers)))
    by_shard = [[rank for rank in ranks if rank % n_shards == shard] for shard in range(n_shards)]
    copies = [[column[c] for column in by_shard] for c in range(n_copies)]
    keepers = [rank for column in by_shard for rank in column[n_copies:]]
    plan = sharded_plan(copies, [1] * n_copies, keepers)
    value = {rank: data.draw(st.sampled_from(["one", "other"])) for rank in ranks}

    moves = built_otherwise({rank: built(rank, n_shards, value[rank]) for rank in ranks}, plan)

    got = dict(value)
    for move in moves:
        assert move.layer == move.source % n_shards == move.target % n_shards
        assert value[move.target] != value[move.source] and move.source == move.layer
        got[move.target] = value[move.source]
    assert [got[rank] for rank in range(n_working + n_keepers)] == [
        value[rank % n_shards] for rank in range(n_working + n_keepers)
    ]
    assert len({move.target for move in moves}) == len(moves)


@pytest.mark.parametrize("silent", [0, 2])
def test_a_rank_that_has_told_nothing_of_its_values_begins_with_those_of_the_first(silent: int) -> None:
    """It was started again before the first plan, and its script may have built anything."""
    plan = sharded_plan([[0, 1], [2, 3]], [1, 1])
    models = {rank: shards(2) if rank == silent else built(rank, 2, "one") for rank in range(4)}
    assert built_otherwise(models, plan) == [Move(0, 0, 2)]


def test_who_keeps_its_shard_from_the_start_begins_with_the_values_of_those_who_train_it() -> None:
    """And it is said who has built other ones."""
    talk = Talk()
    talk.say("start 5")
    for rank in range(5):
        talk.feed(Hello(rank, built(rank, 2, "other" if rank == 4 else "one"), 1))
    talk.feed(Profiled(sharded(profile(2)), 0.1))
    assert talk.asked is not None
    plan = sharded_plan([[0, 1], [2, 3]], [1, 3], keepers=[4])
    plan = replace(plan, generation=talk.asked.generation, step=0, state_from=StateFrom.SCRIPT)

    done = talk.feed(Proposed((Candidate("copies", plan, None, "best"),), 60.0, "test", 0.0, False))

    chosen = [action.body.plan for action in done if isinstance(action, Record) and isinstance(action.body, PlanChosen)]
    assert [its.moves for its in chosen] == [(Move(0, 0, 4),)]
    assert "note: rank 4 may have other values than rank 0, with whose all begin" in "\n".join(text_of(done))


def test_a_second_job_begins_with_what_those_have_that_had_work_in_the_first() -> None:
    """Rank 0 stood by: its model is older, and its scheduler was never stepped, if the script goes on with both."""
    talk = Talk()
    talk.say("start 3")
    for number, newest in enumerate([("one", "lr=1"), ("trained", "lr=0.5")], 1):
        for rank in range(3):
            value, rate = ("one", "lr=1") if rank == 0 else newest
            its = replace(model(), n_shards=1, values=(value,) * N_LAYERS, optimizers=(f"SGD({rate})",))
            talk.feed(Hello(rank, its, number))
        talk.feed(Profiled(replace(profile(), n_shards=1), 0.1))
        chosen = talk.say("plan 1:0-4 / 2:0-4 idle=0" if number == 1 else "plan 0:0-4 / 1:0-4 idle=2")
        talk.say("ready 0 1 2")
        talk.say("commit 0")
        assert talk.state.status is Status.RUNNING
        talk.say("finish 0 1 2 at=1")
    plans = [event.body.plan for event in talk.log if isinstance(event.body, PlanChosen)]
    assert [plan.moves for plan in plans] == [(), tuple(Move(layer, 1, 0) for layer in range(N_LAYERS))]
    assert "rank 0 may have other values than rank 1, with whose all begin" in chosen
