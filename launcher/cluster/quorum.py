"""The leading agent waits for the others: until the job can begin, and then for those that come late or are lost."""

from __future__ import annotations

from collections.abc import Callable

from launcher.cluster.roster import Roster
from launcher.coordinator.rank_assignment import in_order
from launcher.host.loop import Loop
from launcher.joblog.events import AgentInfo

TELL_EVERY_S = 10.0
"""How often it is said who is being waited for."""


class Quorum:
    """`begin(agents)`: there are enough, in the order of their ranks; `give_up(what, help)`: there will not be.

    From then on `joined(agent)` and `lost(agent, why)` are passed on. `where`: the endpoint, for people.
    """

    def __init__(
        self,
        roster: Roster,
        loop: Loop,
        where: str,
        *,
        say: Callable[[str], None],
        begin: Callable[[tuple[AgentInfo, ...]], None],
        give_up: Callable[[str, str], None],
        joined: Callable[[AgentInfo], None],
        lost: Callable[[AgentInfo, str], None],
    ) -> None:
        self._roster = roster
        self._loop = loop
        self._where = where
        self._say = say
        self._begin = begin
        self._give_up = give_up
        self._joined = joined
        self._lost = lost
        self._is_over = False

    @property
    def is_waiting(self) -> bool:
        """The job has not begun."""
        return not self._is_over

    def start(self) -> None:
        """Wait from now on."""
        self._tell()
        self._look()

    def end(self) -> None:
        """The job ends before it has begun, or after."""
        self._is_over = True

    def joined(self, agent: AgentInfo) -> None:
        """An agent has come."""
        if self._is_over:
            self._joined(agent)
        else:
            self._say(f"agent {agent.number} joined: {agent.host}, {agent.n_ranks} rank{'s' if agent.n_ranks > 1 else ''}")
            self._look()

    def lost(self, agent: AgentInfo, why: str) -> None:
        """An agent that had come is gone."""
        if self._is_over:
            self._lost(agent, why)
        else:
            self._say(f"agent {agent.number} ({agent.host}) is gone: {why}")

    def _look(self) -> None:
        if self._is_over:
            return
        now, starts_at = self._loop.clock(), self._roster.starts_at()
        if starts_at is not None and now >= starts_at:
            self._is_over = True
            self._begin(in_order(tuple(self._roster.agents.values())))
        elif starts_at is None and now >= self._roster.gives_up_at:
            what = f"{self._roster.missing()} did not come within {self._roster.patience_s:g} s"
            self._give_up(what, "start the missing agents, or ask for fewer with --nnodes MIN:MAX")
        else:
            self._loop.later((starts_at or self._roster.gives_up_at) - now, self._look)

    def _tell(self) -> None:
        if not self._is_over:
            here, most = len(self._roster.agents), self._roster.most
            self._say(f"leading at {self._where}: {here} of {most} agents here, waiting for {self._roster.missing()}")
            self._loop.later(TELL_EVERY_S, self._tell)
