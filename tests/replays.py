"""Replays of small jobs on small traces, and what must hold of all of them."""

from __future__ import annotations

import math
from itertools import pairwise

import msgspec
import pytest
from hypothesis import strategies as st

from benchmarks.published_systems import policies
from odyssey_cli.replay.first_plans import FirstPlans, step_s
from odyssey_cli.replay.generators import GENERATORS, Failures
from odyssey_cli.replay.ledger import Doing, Totals
from odyssey_cli.replay.outcome import Outcome
from odyssey_cli.replay.restart_costs import RestartCosts
from odyssey_cli.replay.simulated_job import Setup
from odyssey_cli.replay.traces import Change, NodeEventKind, Trace
from perfmodel.profile.profile import Recovery
from strategies.situation import Aim, Protect
from tests.planning import layer, profile

RECOVERY = Recovery(
    detect_s=0.5, pause_s=0.25, spawn_s=4.0, groups_base_s=0.25, groups_member_s=0.0, warm_up_s=1.0, move_layer_s=0.0
)
NEVER = 1e9


def outcome(
    policy: str, layout: str, n_nodes: int, batch: int, trace: Trace, restart_costs: RestartCosts, n_layers: int = 4
) -> Outcome:
    """Layers take one second forward and two backward, which is not split; nothing else costs anything but a recovery."""
    layers = [layer(str(i), 1.0, 2.0, 0.0) for i in range(n_layers)]
    setup = Setup(profile(layers, batch, ranks_per_node=1, recovery=RECOVERY), 1, layout, aim=Aim(protect=Protect.NONE))
    first_plans = FirstPlans(setup, n_nodes)
    with_all = first_plans.on(n_nodes)
    assert with_all is not None
    result = policies(policy)[0].live(trace, setup, first_plans, restart_costs, lambda at_s: None)
    return Outcome(policy, "", trace.length_s, step_s(with_all), result)


def trace(n_nodes: int, length_s: float, *changes: tuple[float, int, NodeEventKind]) -> Trace:
    return Trace("t", "", n_nodes, length_s, tuple(Change(*change) for change in changes))


def all_s(totals: Totals) -> float:
    """All that time went into."""
    return math.fsum(msgspec.structs.astuple(totals))


def assert_totals(totals: Totals, **seconds: float) -> None:
    assert {name: getattr(totals, name) for name in seconds} == pytest.approx(seconds)
    assert all_s(totals) == pytest.approx(sum(seconds.values())), "and nothing else"


@st.composite
def drawn_traces(draw: st.DrawFn) -> Trace:
    """10,000 s of six nodes, with losses from rare to more often than a restart takes."""
    generator = draw(st.sampled_from(sorted(GENERATORS)))
    mtbf_s, transient = draw(st.sampled_from([30.0, 300.0, 3000.0])), draw(st.sampled_from([0.0, 0.7]))
    return GENERATORS[generator](Failures(6, 10_000.0, mtbf_s, 600.0, transient, draw(st.integers(0, 1000))))


def assert_time_is_whole(found: Outcome) -> None:
    """It adds up to that of a drawn trace."""
    stretches = found.result.stretches
    assert stretches[0].start_s == 0 and stretches[-1].end_s == 10_000
    assert all(a.end_s == b.start_s and a.end_s > a.start_s for a, b in pairwise(stretches)), (
        "one after the other, without gaps"
    )
    assert all_s(found.totals) == pytest.approx(10_000)
    assert 0 <= found.useful <= 1 + 1e-9, "nothing beats all nodes without failures"
    assert sum(found.over_time(7)) / 7 == pytest.approx(found.useful)
    assert all(stretch.step_s > 0 for stretch in stretches if stretch.doing is Doing.TRAINING)
