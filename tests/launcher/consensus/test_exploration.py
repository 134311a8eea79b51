"""All that can happen to two or three agents, within budgets, breaks no promise of the consensus. See consensus_explored.py."""

from __future__ import annotations

import pytest

from launcher.consensus.membership import Membership
from tests.launcher.consensus.explored import Budget, Case, Exploration


def of(*voters: int, tie_breaker: int | None = None) -> Membership:
    return Membership(frozenset(voters), tie_breaker)


THREE, TWO, ONE = of(0, 1, 2), of(0, 1, tie_breaker=0), of(0)
FOLLOWED = ("a later leader", "a later leader in charge", "an entry replaced")
CHANGED = (*FOLLOWED, "a membership changed")

WHOLE = {
    "two": (Case(2, TWO, Budget(elections=2, heartbeats=1, proposals=1, step_downs=1, crashes=1)), FOLLOWED),
    "three": (Case(3, THREE, Budget(elections=1, proposals=1)), FOLLOWED),
    "joins": (
        Case(2, ONE, Budget(elections=2, heartbeats=1, compactions=1, changes=(TWO,))),
        (*CHANGED, "a snapshot installed"),
    ),
    "leaves": (Case(2, TWO, Budget(elections=2, proposals=1, crashes=1, changes=(of(1),))), (*CHANGED, "handed over")),
}
"""Every state there is."""
NEAREST = {
    "three twice": (Case(3, THREE, Budget(elections=2, proposals=1, step_downs=1)), FOLLOWED),
    "three to two": (Case(3, THREE, Budget(elections=1, crashes=1, changes=(TWO,))), CHANGED),
    "three to two to one": (Case(3, THREE, Budget(elections=1, changes=(TWO, ONE))), CHANGED),
    "another instead": (Case(3, TWO, Budget(elections=1, copies=1, changes=(of(0, 2, tie_breaker=2),))), CHANGED),
    "with pre-votes": (Case(3, THREE, Budget(elections=2, step_downs=1), with_pre_votes=True), ("a later leader",)),
}
"""Too many: those that take the fewest steps."""
ROUNDS = {
    "four elections": (Case(3, THREE, Budget(elections=4), in_rounds=True, max_entries=1), FOLLOWED),
    "changes": (Case(3, THREE, Budget(elections=2, crashes=1, changes=(TWO, ONE)), in_rounds=True), (*CHANGED, "handed over")),
}
"""Whole rounds of messages."""
DEEP = {
    "rounds": Case(3, THREE, Budget(elections=4, heartbeats=1, proposals=1), in_rounds=True, max_entries=1),
    "rounds with changes": Case(3, THREE, Budget(elections=4, crashes=1, changes=(TWO, ONE)), in_rounds=True, max_entries=1),
    "rounds with a joiner": Case(
        3, TWO, Budget(elections=3, proposals=1, compactions=1, changes=(THREE, of(1, 2, tie_breaker=1))), in_rounds=True
    ),
    "three twice": Case(3, THREE, Budget(elections=2, proposals=2, crashes=1, copies=1)),
    "three after a crash": Case(3, THREE, Budget(elections=2, heartbeats=1, proposals=1, crashes=1)),
    "three to two to one": Case(3, THREE, Budget(elections=2, proposals=1, crashes=1, changes=(TWO, ONE))),
    "another instead": Case(3, TWO, Budget(elections=2, proposals=1, crashes=1, changes=(of(0, 2, tie_breaker=2),))),
    "one to three": Case(3, ONE, Budget(elections=2, proposals=1, compactions=1, changes=(TWO, THREE))),
    "two, everything": Case(
        2, TWO, Budget(elections=3, heartbeats=1, proposals=2, step_downs=1, copies=1, compactions=1, changes=(of(1), TWO))
    ),
    "with pre-votes": Case(3, THREE, Budget(elections=3, proposals=1, step_downs=1, crashes=1), with_pre_votes=True),
}


@pytest.mark.parametrize("name", WHOLE)
def test_whatever_happens_to_a_few_agents_they_agree(name: str) -> None:
    """I11."""
    case, must_meet = WHOLE[name]
    exploration = Exploration(case)

    exploration.run()

    assert [what for what in must_meet if not exploration.met()[what]] == []


@pytest.mark.parametrize("name", NEAREST)
def test_whatever_happens_first_to_a_few_agents_they_agree(name: str) -> None:
    case, must_meet = NEAREST[name]
    exploration = Exploration(case)

    assert exploration.run(15_000) >= 15_000
    assert [what for what in must_meet if not exploration.met()[what]] == []


@pytest.mark.parametrize("name", ROUNDS)
def test_whatever_happens_to_a_few_agents_in_rounds_they_agree(name: str) -> None:
    case, must_meet = ROUNDS[name]
    exploration = Exploration(case)

    exploration.run()

    assert [what for what in must_meet if not exploration.met()[what]] == []


@pytest.mark.soak
@pytest.mark.parametrize("name", DEEP)
def test_whatever_happens_to_a_few_agents_for_longer_they_agree(name: str) -> None:
    Exploration(DEEP[name]).run(200_000)
