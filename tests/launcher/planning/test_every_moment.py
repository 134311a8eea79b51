"""At every moment of a job there is a plan where there can be one: before the start, and when ranks come, idle or are lost."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from launcher.coordinator.actions import Propose
from launcher.joblog.events import Proposed
from launcher.planning.situations import proposed
from odyssey.errors import UsageError
from odyssey.plan.form import layout_of
from odyssey.plan.plan import Plan
from perfmodel.profile.profile import Profile
from perfmodel.worth.reliability import ExpectedChange
from strategies.search import best
from strategies.situation import Aim
from tests.planning import layer, profile

CHANGE = ExpectedChange(3600.0, "test")
N_MICRO_BATCHES = 4


def job(n_layers: int) -> Profile:
    rows = [layer(str(i), 0.01, 0.01, 0.01, parameter_bytes=1000, gradient_bytes=1000) for i in range(n_layers)]
    return profile(rows, N_MICRO_BATCHES)


def whole() -> Profile:
    """A script's own model."""
    return replace(job(1), n_shards=1)


def ask(
    of: Profile, n_ranks: int, said: Propose, aim: Aim | None = None, *, n_spares: int = 0, layout: str = "auto"
) -> Proposed:
    nodes = {rank: rank // of.cluster.ranks_per_node for rank in range(n_ranks)}
    return proposed(said, of, nodes, CHANGE, "auto", layout, aim or Aim(), n_spares)


def at_start(n_ranks: int, *lost: int) -> Propose:
    return Propose(1, 0, None, tuple(rank for rank in range(n_ranks) if rank not in lost), (), (), {}, untrained=True)


def later(plan: Plan, n_ranks: int, *lost: int, untrained: bool = False) -> Propose:
    """All that are not lost have paused, and those that the plan does not know are newcomers, who stood by."""
    alive = tuple(rank for rank in range(n_ranks) if rank not in lost)
    held = {rank: plan.holds.get(rank, frozenset()) for rank in alive}
    return Propose(plan.generation + 1, 0 if untrained else 7, plan, alive, lost, (), held, untrained=untrained)


def chosen(found: Proposed) -> Plan:
    row = best(found.candidates)
    assert row is not None and row.plan is not None, [(row.strategy, row.reason) for row in found.candidates]
    return row.plan


# -- what has to be survived ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("aim", [Aim(survive=1), Aim(survive_nodes=1)], ids=["ranks", "nodes"])
def test_too_few_for_what_has_to_be_survived_go_on_where_ranks_were_lost_before_the_start(aim: Aim) -> None:
    """It is an error where nobody is missing."""
    of = job(2)
    of = replace(of, cluster=replace(of.cluster, ranks_per_node=1))
    assert chosen(ask(of, 1, at_start(1))).workers == (0,)
    with pytest.raises(UsageError):
        ask(of, 1, at_start(1), aim)
    assert chosen(ask(of, 2, at_start(2, 1), aim)).workers == (0,)
    assert layout_of(chosen(ask(of, 3, at_start(3, 1), aim))) == "2x1", "the plan that survives most of it is taken"


def test_too_few_for_what_has_to_be_survived_begin_anew_where_nothing_is_trained() -> None:
    """The only holders of a layer are lost."""
    of, aim = job(2), Aim(survive=1)
    plan = chosen(ask(of, 4, at_start(4), aim, layout="2x2"))
    left = next(rank for rank in plan.workers if len(plan.holds[rank]) == 1)
    lost = tuple(rank for rank in plan.workers if rank != left)
    now = chosen(ask(of, 4, later(plan, 4, *lost, untrained=True), aim, layout="2x2"))
    assert now.workers == (left,)
