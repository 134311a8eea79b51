"""What the agent learns of the profile from the job itself."""

from __future__ import annotations

import msgspec
import pytest

from launcher.coordinator.actions import Propose
from launcher.coordinator.machine import step
from launcher.coordinator.state import JobState, World
from launcher.host.loop import Loop
from launcher.joblog.events import (
    AgentInfo,
    Body,
    Event,
    GenerationStarted,
    JobStarted,
    LeaderChanged,
    ProfileRefined,
    RankStarted,
)
from launcher.options import RunOptions
from launcher.planning.live_profile import LiveProfile
from launcher.planning.planner import Planner
from odyssey.protocol.reports import Committed, Hello, OpTime, OpTimes
from odyssey.protocol.units import Result
from tests import planning
from tests.launcher.coordinator.talk import make_plan, model, profile

PLAN = make_plan([[(0, 0, 4)], [(1, 0, 4)]], None)


US = AgentInfo(1, "h1", 100, 1, "", None, "", 0)
STARTED = JobStarted("train.py", (), 2, 1, 0, "auto", "auto", None, "", 1)


def after(*bodies: tuple[float, Body], first: Body | None = STARTED) -> LiveProfile:
    """A job with a profile from a file; (time, event), in order. `first`: None where another agent has led before."""
    live_profile = LiveProfile(RunOptions("train.py"), {})
    live_profile.profile = profile()
    for time, body in (*([(0.0, first)] if first is not None else []), *bodies):
        live_profile.watch(Event(time, 0, "test", body))
    return live_profile


def spawn_s(live_profile: LiveProfile) -> float:
    assert live_profile.profile is not None
    return live_profile.profile.recovery.spawn_s


START = (
    (5.0, RankStarted(0, 10, 0)),
    (5.2, RankStarted(1, 11, 0)),
    (5.6, Hello(1, model())),
    (6.0, Hello(0, model())),
)


def test_a_spawn_takes_what_the_fastest_rank_took_at_the_start_whatever_a_file_says() -> None:
    assert spawn_s(after()) == 1.0
    assert spawn_s(after(*START)) == pytest.approx(0.4)


def test_what_had_started_under_another_leading_agent_and_is_told_at_once_is_no_time_of_a_spawn() -> None:
    told = [(5.0, RankStarted(0, 10, 0)), (5.001, Hello(0, model())), (5.002, LeaderChanged(US))]
    assert spawn_s(after(*told, first=None)) == 1.0
    assert spawn_s(after(*told, (6.0, RankStarted(1, 11, 0)), (6.5, Hello(1, model())), first=None)) == pytest.approx(0.5)


def test_each_respawn_moves_it_half_way() -> None:
    live_profile = after(*START)
    live_profile.calibrate(PLAN, GenerationStarted(None, None, None, 0.01, 0.0, None))
    live_profile.watch(Event(8.0, 1, "test", RankStarted(1, 12, 0)))
    live_profile.watch(Event(8.1, 1, "test", Hello(1, model())))
    assert spawn_s(live_profile) == pytest.approx(0.4)
    live_profile.calibrate(PLAN, GenerationStarted(None, 0.01, 0.01, 0.01, 0.0, 0.14, 0.1, 0.01))
    assert spawn_s(live_profile) == pytest.approx(0.25)
    live_profile.calibrate(PLAN, GenerationStarted(None, 0.01, 0.01, 0.01, 0.0, 0.04, None, 0.01))
    assert spawn_s(live_profile) == pytest.approx(0.25), "nothing was spawned"


def test_steps_of_the_plan_before_a_loss_say_nothing_of_the_one_after_it() -> None:
    """Where a step then takes ten times as long, the plan is not taken for one that was priced ten times too high."""

    def committed(first: float, seconds: float, n: int) -> list[tuple[float, Body]]:
        return [(first + i * seconds, Committed(0, 1, Result(i, "step", ()), 8, seconds)) for i in range(n)]

    live_profile = after()
    assert live_profile.profile is not None
    live_profile.calibrate(PLAN, GenerationStarted(None, None, None, 0.01, 0.0, None))
    for at, body in committed(0.0, 1.0, 9):
        live_profile.watch(Event(at, 1, "test", body))
    for _ in range(20):
        live_profile.rescale(PLAN)
    before = live_profile.profile.step_scale
    live_profile.calibrate(PLAN, GenerationStarted(None, 0.01, 0.01, 0.01, 0.0, 0.1))
    live_profile.rescale(PLAN)
    assert live_profile.profile.step_scale == before, "none of its own has come yet"
    for at, body in committed(100.0, 10.0, 9):
        live_profile.watch(Event(at, 2, "test", body))
    for _ in range(20):
        live_profile.rescale(PLAN)
    assert live_profile.profile.step_scale == pytest.approx(10 * before)


def test_ops_that_ranks_took_together_say_what_they_would_take_alone() -> None:
    """Two ranks on two cores slow each other down by a fifth, and no longer when one of them is left."""
    of = planning.profile(1, 2, cores=2)
    live_profile = after()
    live_profile.profile = of = msgspec.structs.replace(of, cluster=msgspec.structs.replace(of.cluster, crowding=1.2))
    for layout, took_s in (("2x1", 1.2), ("1x1", 1.0)):
        plan = planning.first_plan(of, layout, 2)
        live_profile.calibrate(plan, GenerationStarted(None, None, None, 0.01, 0.0, None))
        live_profile.refresh(OpTimes(1, (OpTime("F", 0, 1, 10, took_s),)))
        assert live_profile.profile.layers[0].forward_s == pytest.approx(1.0)


def test_a_layer_that_begins_to_draw_is_known_from_then_on() -> None:
    live_profile = after()
    live_profile.profile = msgspec.structs.replace(profile(), uncut="")
    live_profile.refresh(OpTimes(1, ()))
    assert live_profile.profile.uncut == ""
    live_profile.refresh(OpTimes(1, (), "layer 3 draws random numbers"))
    live_profile.refresh(OpTimes(1, ()))
    assert live_profile.profile.uncut == "layer 3 draws random numbers"


def test_the_log_is_told_at_which_costs_a_plan_is_chosen() -> None:
    """Where refinements have changed them; the state has them from there."""
    told: list[Body] = []
    known = profile()
    state = JobState(World(), profile=known)
    loop = Loop(lambda: 0.0)
    planner = Planner(
        *(RunOptions("train.py", n_nodes=2), {0: 0, 1: 1}, loop), state=lambda: state, now=lambda: 9.0, feed=told.append
    )
    first = Propose(1, 0, None, (0, 1), (), (), {}, untrained=True)
    planner.live_profile.profile = known
    planner.propose(first)
    assert told == []
    planner.live_profile.profile = refined = msgspec.structs.replace(known, step_scale=1.5)
    assert planner.propose(first).candidates[0].plan is not None
    assert told == [ProfileRefined(refined)]
    state, _ = step(state, Event(9.0, 0, "agent", told[0]))  # type: ignore[assignment]
    assert state.profile == refined
    loop.close()


@pytest.mark.parametrize(("rehearsed", "rest_s"), [("", 0.6), ("toy", 0.0)])
def test_the_start_of_a_rehearsal_says_nothing_of_the_rest_of_a_transition(rehearsed: str, rest_s: float) -> None:
    """All stand-ins start at once on the cores of one machine."""
    live_profile = LiveProfile(RunOptions("train.py", rehearsed=rehearsed), {})
    live_profile.profile = profile()
    live_profile.calibrate(PLAN, GenerationStarted(None, None, None, 0.01, 0.0, None, rest_s=0.7, proof_s=0.1))
    assert live_profile.profile.recovery.rest_s == pytest.approx(rest_s)
