"""Which groups a plan needs: the tree over all, and pairs."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from odyssey.plan import needs
from odyssey.plan.estimate import Estimate, Transition
from odyssey.plan.needs import Needs, levels
from odyssey.plan.pipelines import Stage
from tests.launcher.coordinator.talk import make_plan


@given(members=st.lists(st.integers(0, 10**6), unique=True, min_size=1, max_size=400), branch=st.integers(2, 20))
def test_a_tree_has_everybody_once_and_one_root(members: list[int], branch: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(needs, "BRANCH", branch)
        found = levels(members)

        assert [rank for its in found[0] for rank in its] == sorted(members)
        assert len(found[-1]) == 1
        for below, above in pairwise(found):
            assert [its[0] for its in below] == [rank for its in above for rank in its]
        assert max(len(its) for level in found for its in level) <= branch
        assert len(found) == 1 or len(members) > branch
        for rank in members:
            mine = [over.members for over in Needs(tuple(members)).sums_of(rank)]
            assert all(its[0] == rank for its in mine[:-1]), "it goes up where it is the first"
            assert not mine or Needs(tuple(members)).in_root(rank) == (mine[-1] == found[-1][0])


@given(members=st.lists(st.integers(0, 3000), unique=True, min_size=2, max_size=300), branch=st.integers(2, 20), data=st.data())
def test_a_loss_changes_the_branches_above_the_one_who_is_lost(members: list[int], branch: int, data: st.DataObject) -> None:
    lost = data.draw(st.sampled_from(members))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(needs, "BRANCH", branch)
        before, after = levels(members), levels([rank for rank in members if rank != lost])

        for number, (had, has) in enumerate(zip(before[:-1], after[:-1], strict=False), start=1):
            changed = {its[0] // branch**number for its in set(has) - set(had)}
            assert changed <= {lost // branch**number}


def test_up_to_a_number_all_are_meshed_and_beyond_there_are_pairs_for_what_is_exchanged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = make_plan([[(0, 0, 2), (1, 2, 4)], [(2, 0, 2), (3, 2, 4)]], None)

    meshed = Needs.of(plan, 0)
    assert not meshed.is_tree and meshed.are_meshed(0, 3) and meshed.pairs_of(0) == []
    monkeypatch.setattr(needs, "BRANCH", 2)
    of = {rank: Needs.of(plan, rank) for rank in plan.workers}

    assert all(its.is_tree and not its.are_meshed(0, 1) for its in of.values())
    assert {rank: its.pairs_of(rank) for rank, its in of.items()} == {0: [1], 1: [0], 2: [3], 3: [2]}


def test_a_chain_has_pairs_of_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needs, "BRANCH", 2)
    chain = [Stage(4, 0, 1), Stage(1, 1, 2), Stage(7, 2, 3)]

    assert [Needs.of_chain(chain, rank).pairs_of(rank) for rank in (4, 1, 7)] == [[1], [4, 7], [1]]


def test_an_operation_has_a_limit_where_it_is_known_what_it_takes() -> None:
    """A script's own loop may let others wait for an hour, while one of its ranks evaluates."""
    plan = make_plan([[(0, 0, 4)], [(1, 0, 4)]], None)
    slow = replace(plan, estimate=Estimate(1000.0, Transition(), 0, 1.0))
    assert Needs.of(plan, 0).limit == needs.NO_LIMIT
    assert Needs.of(replace(plan, estimate=Estimate(1.0, Transition(), 0, 1.0)), 0).limit == needs.FORGOTTEN
    assert needs.FORGOTTEN < Needs.of(slow, 0).limit < needs.NO_LIMIT
