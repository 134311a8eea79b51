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
HELP = "have the hosts let each other through to the agents' ports, or tell with --local-addr where the others reach that agent"


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
        self._asked_at: float | None = None
        """They were found, and have not agreed yet."""
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
            self._asked_at = None
            self.look()

    def vote(self, voters: frozenset[int]) -> None:
        """These do from now on."""
        self._voters, self._asked_at = voters, None
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
            self._ask(now)
        elif starts_at is not None and now >= starts_at:
            self._is_over = self._roster.has_begun = True
            self._sink.event(self._job_of(self._roster.in_order()))
        elif starts_at is None and now >= self._roster.gives_up_at:
            what = f"{self._roster.missing()} did not come within {self._roster.patience_s:g} s"
            help = "start the missing agents, or ask for fewer with --nnodes MIN:MAX"
            unreached = self._roster.unreached.values()
            self._sink.event(StopRequested("; ".join((what, *unreached)), ExitCode.FAILED, HELP if unreached else help))
        else:
            self._loop.later((starts_at or self._roster.gives_up_at) - now, self.look)

    def _ask(self, now: float) -> None:
        if self._asked_at is None:
            self._asked_at = now
            self._loop.later(self._roster.patience_s, self.look)
        if now - self._asked_at < self._roster.patience_s:
            self.found(tuple(self._roster.agents.values()))
        else:
            what = f"{self._unheard()} did not agree within {self._roster.patience_s:g} s that the job begins"
            self._sink.event(StopRequested(what, ExitCode.FAILED, "see the output there; " + HELP))

    def _unheard(self) -> str:
        agents = self._roster.agents
        return " and ".join(f"agent {number} ({agents[number].host})" for number in sorted(agents.keys() - self._voters))

    def _compare(self) -> None:
        assert self._roster.comparison is not None
        self._roster.comparison.is_decided = True
        for line in self._roster.comparison.verdict():
            self._sink.say(line)
        self._is_choosing = True
        self.choose()
        self._is_choosing = False

    def _tell(self) -> None:
        if self._is_over:
            return
        here, most = self._roster.n_here, self._roster.most
        if self._asked_at is not None:
            self._sink.say(f"waiting for {self._unheard()} to agree that the job begins")
        elif here < most:
            text = f"leading at {self._where}: {here} of {most} agents here, waiting for {self._roster.missing()}"
            self._sink.say("; ".join((text, *self._roster.unreached.values())))
        self._loop.later(TELL_EVERY_S, self._tell)
