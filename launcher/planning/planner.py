"""What plans cost and which there are, on the agent's side: has ranks measure, keeps the profile true, has plans searched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from math import prod

from launcher.coordinator.actions import Propose, StartMeasure
from launcher.coordinator.state import JobState, State, Status
from launcher.coordinator.workers import WORKERS
from launcher.health.slow_ranks import KeptRanks, SlowRanks
from launcher.health.waits import Wait
from launcher.host.loop import Loop, Timer
from launcher.joblog.events import Body, Event, GenerationStarted, Profiled, ProfileRefined, Proposed, RankSlowed
from launcher.joblog.wording import faults_texts
from launcher.options import RunOptions
from launcher.planning.live_profile import LiveProfile
from launcher.planning.situations import PlanSearch, expected_change
from odyssey.plan.approximation import LowRank
from odyssey.plan.worker import Rank, Worker
from odyssey.protocol.orders import Measure
from odyssey.protocol.reports import Committed, Measured, OpTimes
from perfmodel.goodput.reliability import ExpectedChange
from perfmodel.profile.profile import Profile

FIRST_LOOK_S, LAST_LOOK_S = 1.0, 600.0
"""After a Go, plans for the next loss are made anew at the costs that real steps have shown: soon, then ever more rarely."""


class Planner:
    """`state`: the coordinator's, as it is now; `now`: seconds since the epoch; `feed`: to the coordinator."""

    def __init__(
        self,
        options: RunOptions,
        node_of: dict[Worker, int],
        loop: Loop,
        *,
        state: Callable[[], State],
        now: Callable[[], float],
        feed: Callable[[Body], None],
    ) -> None:
        """`node_of` is filled by its owner whenever ranks are seated: agents may have ranks of any number, and come and go."""
        self._options = options
        self._node_of = node_of
        self._loop = loop
        self._state = state
        self._now = now
        self._feed = feed
        self.live_profile = LiveProfile(options, node_of)
        self._search = PlanSearch(options, node_of, loop)
        self._slow_ranks, self._kept_ranks = SlowRanks(), KeptRanks()
        self._told_faults: set[str] = set()
        self._first_step_is_late: Timer | None = None
        """Set from a Go until its first step is done, or has taken long: it has the processors to itself."""

    def close(self) -> None:
        """End the process that searches ahead."""
        self._search.close()

    def awaited(self) -> Iterator[Wait]:
        """For the agent's watch."""
        return self._search.awaited()

    def watch(self, event: Event) -> None:
        """What real steps and transitions take; and when the first step of a generation is done."""
        self.live_profile.watch(event)
        if isinstance(event.body, Committed) and self._first_step_is_late is not None:
            self._after_first_step()

    def read(self, profile: Profile) -> Profiled:
        """Take a profile that was measured before."""
        self.live_profile.profile = profile
        return Profiled(profile, 0.0)

    def measure(self, action: StartMeasure) -> tuple[Measure, tuple[Rank, ...]]:
        """Answers an order to measure, and the ranks that are to. Approximate backwards as well, where plans may have any, and
        for a file, which may be used by jobs whose plans may."""
        low_rank = self._options.aim.approximate
        if low_rank is None and self._options.write_profile is not None:
            low_rank = LowRank()
        return Measure(action.generation, action.chain, low_rank), self.live_profile.begin(action, self._now())

    def measured(self, rank: Rank, report: Measured) -> Profiled | None:
        """The profile, when the last rank has told what it measured. Raises OdysseyError or OSError."""
        state = self._state()
        if not self.live_profile.take(rank, report) or not isinstance(state, JobState) or state.status is not Status.MEASURING:
            return None
        profile = self.live_profile.merge(state.model)
        return Profiled(profile, self._now() - self.live_profile.since)

    def took(self, rank: Rank, times: OpTimes) -> None:
        """What the ops of a rank have taken: the profile is refined, and who has become slow is told."""
        slow, kept, now = self._slow_ranks, self._kept_ranks, self._now()
        self.live_profile.refresh(times, slow.slow[rank].factor if rank in slow.slow else 1.0)
        if any([slow.take(now, rank, times.times), kept.take(now, rank, times.times)]):
            found = [of.slow[rank] for of in (slow, kept) if rank in of.slow]
            self._feed(RankSlowed(rank, prod(one.factor for one in found), min((one.since for one in found), default=now)))

    def propose(self, ask: Propose) -> Proposed:
        """Plans for a situation, best first; a table prepared ahead if there is one. Raises OdysseyError if there is none."""
        state = self._state()
        is_first = ask.plan is None and isinstance(state, JobState) and state.number == 1 and not state.world.attempt
        began = state.world.started
        if began is not None:
            self._search.n_absent = max(0, began.n_ranks - len(self._node_of))
        return self._search.propose(ask, self._in_force(), self._expected_change(), is_first_start=is_first)

    def untold_faults(self, found: Proposed) -> list[str]:
        """What a bug has cost, for people: once, as what fails at one loss may well fail at the next one."""
        new = [fault for fault in faults_texts(found.candidates) if fault not in self._told_faults]
        self._told_faults.update(new)
        return new

    def _in_force(self) -> Profile:
        """The profile as refined so far; it is told to the log if another one stands there."""
        state, profile = self._state(), self.live_profile.profile
        assert isinstance(state, JobState) and profile is not None
        if profile != state.profile:
            self._feed(ProfileRefined(profile))
        return profile

    def went(self, body: GenerationStarted) -> None:
        """A plan runs: learn from the transition, and have plans for the next loss soon."""
        state = self._state()
        assert isinstance(state, JobState) and state.plan is not None
        if state.replicas:
            return  # there is nothing to choose
        self.live_profile.calibrate(state.plan, body)
        if (profile := self.live_profile.profile) is not None:
            from perfmodel.refine import expected_s

            ranks = sorted(WORKERS.ranks(state.plan.workers))
            for of in (self._slow_ranks, self._kept_ranks):
                of.begin(ranks, partial(expected_s, profile, crowded=1.0))
        if self._first_step_is_late is not None:
            self._first_step_is_late.cancel()
        self._first_step_is_late = self._loop.later(FIRST_LOOK_S, self._after_first_step)

    def _after_first_step(self) -> None:
        assert self._first_step_is_late is not None
        self._first_step_is_late.cancel()
        self._first_step_is_late = None
        self._plan_ahead(FIRST_LOOK_S)

    def _plan_ahead(self, look_again_s: float) -> None:
        """At today's costs; and again when real steps have shown more of these."""
        state = self._state()
        if not isinstance(state, JobState) or state.plan is None or state.status is not Status.RUNNING:
            return
        generation = state.world.generation
        slow, members = WORKERS.slowest(state.factors), WORKERS.all_of(state.members)
        self.live_profile.rescale(state.plan, slow)
        profile = self._in_force()
        expected = self._expected_change()
        may_respawn, can_restart = state.may_respawn, state.can_restart
        self._search.plan_ahead(state.plan, members, may_respawn, slow, profile, expected, can_restart=can_restart)

        def look() -> None:
            if self._state().world.generation == generation:
                self._plan_ahead(min(3 * look_again_s, LAST_LOOK_S))

        self._loop.later(look_again_s, look)

    def _expected_change(self) -> ExpectedChange:
        return expected_change(self._state().world, self._now(), self._options.mtbf_s, self._options.failure_rate)
