"""The leading agent waits for the others: until the job can begin, and then for those that come late or are lost.

enough are here ─► found: they are to vote ─► vote: they do ─► the job begins
"""

from __future__ import annotations

from collections.abc import Callable

from launcher.cluster.leading.roster import Roster
from launcher.host.loop import Loop
from launcher.joblog.event_sink import EventSink
from launcher.joblog.events import AgentInfo, AgentJoined, AgentLost, JobStarted, StopRequested
from launcher.joblog.exit_codes import ExitCode

TELL_EVERY_S = 10.0
"""How often it is said who is being waited for."""


class Quorum:
    """`where`: the endpoint, for people; `job_of(agents)`: the job that begins with these, in the order of their ranks."""

    def __init__(
        self,
        roster: Roster,
        loop: Loop,
        where: str,
        sink: EventSink,
        job_of: Callable[[tuple[AgentInfo, ...]], JobStarted],
    ) -> None:
        self._roster = roster
        self._loop = loop
        self._where = where
        self._sink = sink
        self._job_of = job_of
        self._is_over = False
        self._is_choosing = False
        self._voters: frozenset[int] = frozenset()
        self.found: Callable[[tuple[AgentInfo, ...]], None] = lambda agents: None
        """The job is about to begin with these: `vote` is called when all have agreed that they vote."""
        self.choose: Callable[[], None] = lambda: None
        """The hosts have been compared: those that may are taken in."""

    @property
    def is_waiting(self) -> bool:
        """The job has not begun."""
        return not self._is_over

    def start(self) -> None:
        """Wait from now on; not at all where this agent is enough."""
        self._tell()
        if first_s := self._roster.waits_first_s:
            text = f"with fewer than {self._roster.most} agents it begins after {first_s:g} s at the earliest"
            self._sink.say(f"{text}: an earlier job of this --rdzv-id that goes on elsewhere is heard of until then")
        self.look()

    def end(self) -> None:
        """The job has begun under another agent, or ends before it has begun, or after."""
        self._is_over = True

    def wait(self) -> None:
        """Another job of this run id lives, of which nobody says yet where it is led."""
        if self._roster.wait(self._loop.clock()):
            self._sink.say("agents of an earlier job of this --rdzv-id live, and look for one that leads it: waiting for them")

    def joined(self, agent: AgentInfo) -> None:
        """An agent has come."""
        if self._is_over:
            self._sink.event(AgentJoined(agent))
        else:
            ranks = f"{agent.n_ranks} rank{'s' if agent.n_ranks > 1 else ''}"
            self._sink.say(f"agent {agent.number} joined: {agent.host}, {ranks}")
            self.look()

    def lost(self, agent: AgentInfo, why: str) -> None:
        """An agent that had come is gone."""
        if self._is_over:
            self._sink.event(AgentLost(agent, why))
        else:
            self._sink.say(f"agent {agent.number} ({agent.host}) is gone: {why}")
            self.look()

    def vote(self, voters: frozenset[int]) -> None:
        """These do from now on."""
        self._voters = voters
        self.look()

    def look(self) -> None:
        """Begin, if it is time to; else later."""
        if self._is_over or self._is_choosing:
            return
        now, starts_at = self._loop.clock(), self._roster.starts_at()
        if starts_at is not None and now >= starts_at and self._roster.is_comparing:
            self._compare()
            self.look()
        elif starts_at is not None and now >= starts_at and self._voters != self._roster.agents.keys():
            self.found(tuple(self._roster.agents.values()))
        elif starts_at is not None and now >= starts_at:
            self._is_over = self._roster.has_begun = True
            self._sink.event(self._job_of(self._roster.in_order()))
        elif starts_at is None and now >= self._roster.gives_up_at:
            what = f"{self._roster.missing()} did not come within {self._roster.patience_s:g} s"
            help = "start the missing agents, or ask for fewer with --nnodes MIN:MAX"
            self._sink.event(StopRequested(what, ExitCode.FAILED, help))
        else:
            self._loop.later((starts_at or self._roster.gives_up_at) - now, self.look)

    def _compare(self) -> None:
        assert self._roster.comparison is not None
        self._roster.comparison.is_decided = True
        for line in self._roster.comparison.verdict():
            self._sink.say(line)
        self._is_choosing = True
        self.choose()
        self._is_choosing = False

    def _tell(self) -> None:
        here, most = self._roster.n_here, self._roster.most
        if here < most and not self._is_over:
            text = f"leading at {self._where}: {here} of {most} agents here, waiting for {self._roster.missing()}"
            self._sink.say(text)
            self._loop.later(TELL_EVERY_S, self._tell)
