"""Random lives of a job in simulated time: what ranks do takes milliseconds or hours, and nobody is lost by being slow.

Ranks, orders and kills are those of test_coordinator_machine.py. Only time is added: however much of it passes, and wherever
the job stands then, who lives goes on living, and the job goes on. Only a plan does not wait for ever for ranks that were
started for it and do not come, or do not connect while the others train.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from launcher.coordinator.actions import Action, End, EndRanks, Kill, SetDeadline
from launcher.coordinator.ranks import RankState
from launcher.coordinator.state import Status
from launcher.joblog.events import Tick
from tests.examples import examples
from tests.launcher.coordinator.test_machine import Job

AT_WORK = (Status.MEASURING, Status.PLANNING, Status.PAUSING, Status.MOVING, Status.RUNNING, Status.FINISHING)
"""Where the ranks, or the search, are to do something that may take long."""


class SlowJob(Job):
    """A job that time passes in."""

    deadline_s: float | None = None

    def obey(self, action: Action) -> None:
        if isinstance(action, SetDeadline):
            self.deadline_s = None if action.seconds is None else self.talk.now + action.seconds
        super().obey(action)

    @rule(seconds=st.sampled_from([0.001, 0.5, 5.0, 60.0, 600.0, 3600.0, 36000.0]))
    @precondition(lambda self: self.talk.state.status in AT_WORK)
    def a_deadline_passes(self, seconds: float) -> None:
        """And nobody has answered."""
        state = self.talk.state
        self.talk.now += seconds
        if self.deadline_s is None or self.talk.now < self.deadline_s:
            return
        self.deadline_s = None
        started_for_a_plan = {Status.MOVING: RankState.STARTING, Status.RUNNING: RankState.JOINED}.get(state.status)
        awaited = state.world.ranks.of(started_for_a_plan) if started_for_a_plan is not None else set()
        actions = self.talk.feed(Tick(state.world.deadline))
        hard = [action for action in actions if isinstance(action, Kill | End | EndRanks)]
        assert all(isinstance(action, Kill) and action.rank in awaited for action in hard), f"{seconds:g} s passed: {hard}"
        for action in actions:
            self.obey(action)


TestSlowRanks = SlowJob.TestCase
TestSlowRanks.settings = settings(max_examples=examples(100), stateful_step_count=50, suppress_health_check=list(HealthCheck))
